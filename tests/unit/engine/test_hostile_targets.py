"""Targets that do not behave: none ends the campaign, passes for clean, or goes unnamed."""

import pytest

from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import InfrastructureError, NotCheckedError
from kvfuzz.model.lower import lower
from kvfuzz.model.target import TargetSpec

HEAD = (
    "import os, sys\n"
    "def gather_cache(key_cache, value_cache, key, value, block_table, cu_seqlens_kv, **more):\n"
)


@pytest.fixture
def worker(tmp_path):
    """Start a worker on a file with the given text."""
    workers = []

    def start(text):
        path = tmp_path / f"k{len(workers)}.py"
        path.write_text(text)
        spec = TargetSpec(f"{path}:gather_cache", op="gather_cache")
        workers.append(Worker(WorkerConfig(spec, "cpu", "gfx942"), case_timeout_s=10))
        return workers[-1].__enter__()

    yield start
    for each in workers:
        each.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("sys.exit('bye')", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("os._exit(0)", "os._exit(0)"),
        ("os._exit(114)", "made the GPU unusable"),
        ("os._exit(5)", "exit code 5"),
        ("os.abort()", "SIGABRT"),
        ("raise ValueError('\\ud800')", "ValueError: \\ud800"),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
            "Mute: no message: its __str__ raises ZeroDivisionError",
        ),
        ("raise ValueError('in\\ntwo') from KeyError('why')", "ValueError: in: two (from KeyError"),
    ],
)
def test_every_way_out_of_a_target_is_a_named_crash(worker, gather_scene, body, said):
    (failed,) = worker(f"{HEAD}    {body}\n").check(lower(gather_scene)).failed
    assert failed.name == "crash"
    assert said in failed.violation.message


@pytest.mark.parametrize("body", ["sys.exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit"])
def test_a_module_that_exits_while_it_loads_is_not_checked(worker, body):
    with pytest.raises(NotCheckedError, match="does not import"):
        worker(f"import sys\n{body}\n").describe()


def test_a_module_that_leaves_the_process_is_infrastructure_at_once(worker):
    with pytest.raises(InfrastructureError, match=r"os\._exit\(0\) while loading"):
        worker("import os\nos._exit(0)\n").describe()


def test_a_file_imports_its_neighbours_and_its_package(tmp_path, gather_scene):
    package = tmp_path / "mine" / "ops"
    package.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("ANSWER = 42\n")
    (package / "k.py").write_text("from .helper import ANSWER\n" + HEAD + "    assert ANSWER\n")
    (tmp_path / "flat_helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "flat.py").write_text(
        "from flat_helper import ANSWER\n" + HEAD + "    assert ANSWER\n"
    )
    for path in (package / "k.py", tmp_path / "flat.py"):
        spec = TargetSpec(f"{path}:gather_cache", op="gather_cache")
        with Worker(WorkerConfig(spec, "cpu", "gfx942"), case_timeout_s=30) as loaded:
            failed = loaded.check(lower(gather_scene)).failed
            assert {result.name for result in failed} == {"complete", "roundtrip"}


def test_a_kernel_that_does_not_compile_says_why(tmp_path, gather_scene, edited):
    target = edited(
        "kernels/builtin/gather_cache.py",
        "gather_cache",
        ("dim = tl.arange(0, PADDED_HEAD_SIZE)", "dim = tl.arange(0, 3)"),
    )
    with Worker(WorkerConfig(TargetSpec(target), "cpu", "gfx942"), case_timeout_s=30) as loaded:
        (failed,) = loaded.check(lower(gather_scene)).failed
    assert "power of 2" in failed.violation.message


def test_a_target_the_lane_cannot_evaluate_is_not_checked_even_in_part(campaign, edited):
    target = edited(
        "kernels/builtin/gather_cache.py",
        "gather_cache",
        (
            "k = tl.load(key_cache_ptr + k_at, mask=inside)",
            "k = tl.load(key_cache_ptr + k_at, mask=inside)\n"
            "    if DEQUANT:\n"
            "        tl.inline_asm_elementwise('v_dance $0', '=v', [], tl.int32, False, 1)",
        ),
    )
    with pytest.raises(NotCheckedError, match=r"no property was checked of \d+ of 40 cases"):
        campaign(target, max_cases=40)


def test_a_slow_target_is_not_taken_for_one_that_hangs(worker, gather_scene):
    verdict = worker(f"import time\n{HEAD}    time.sleep(3)\n").check(lower(gather_scene))
    assert [result.name for result in verdict.failed] == ["complete"]
    reasons = {result.name: result.reason for result in verdict.results if result.reason}
    assert "too long for one more within 10 s (--case-timeout)" in reasons["determinism"]
