"""The gpu lane, and that it leaves the same bytes as the cpu lane. Needs a GPU."""

import pytest

from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import Exit
from kvfuzz.model import scene
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.target import TargetSpec
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

pytestmark = pytest.mark.gpu

OPS = (*scene.OPS, *BY_OP)
MOST_CASES = {"gather_cache": 500, "reshape_and_cache": 500}


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def _drawn(op, domain, count):
    within = space(op, domain)
    return [drawn_case(Drawn(seed), within) for seed in range(count)]


@pytest.mark.parametrize("op", OPS)
def test_our_kernels_are_clean_on_the_gpu(campaign, op):
    cases = MOST_CASES.get(op, 150)
    code, found, summary = campaign(f"builtin:{op}", lane="gpu", max_cases=cases, budget_s=300)
    assert (code, found, summary.cases) == (Exit.CLEAN, [], cases)
    unchecked = {name for name in summary.not_checked if name not in summary.passed}
    assert unchecked == {"bounds", "no_overflow", "no_race"}


def test_a_mutant_is_found_on_the_gpu_and_its_seed_replays_on_the_cpu(campaign):
    from kvfuzz.engine.replay import replay

    code, (found,), _ = campaign("mutant:hardcoded_block_stride", lane="gpu", max_cases=300)
    assert code == Exit.FINDING
    on_cpu = replay(found.seed, lane="cpu")
    assert on_cpu.exit_code == Exit.FINDING
    assert on_cpu.same_bytes


@pytest.mark.parametrize("op", OPS)
def test_both_lanes_leave_the_same_bytes(op):
    target = TargetSpec(f"builtin:{op}")
    gpu = Worker(WorkerConfig(target, "gpu", "gfx942"), case_timeout_s=120)
    cpu = Worker(WorkerConfig(target, "cpu", "gfx950"), case_timeout_s=120)
    with gpu, cpu:
        domain = gpu.describe().info.domain
        for case in _drawn(op, domain, MOST_CASES.get(op, 250) * 3 // 5):
            found, expected = (each.check(case, explain=True).digest for each in (gpu, cpu))
            assert found == expected != "", case.scene
