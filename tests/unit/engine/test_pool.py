"""Crash and hang are verdicts: each costs one case, is named, and the next case runs."""

import os
import signal
from multiprocessing.forkserver import _forkserver

import pytest

from kvfuzz.engine.pool import Worker, serve
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import InfrastructureError, NotCheckedError, UsageError
from kvfuzz.model.lower import lower
from kvfuzz.model.target import TargetSpec

DIES_AND_HANGS = """
import os, signal, time

def gather_cache(key_cache, value_cache, key, value, block_table, cu_seqlens_kv, token_to_batch):
    if token_to_batch.shape[0] == 8:
        os.kill(os.getpid(), signal.SIGSEGV)
    if token_to_batch.shape[0] == 6:
        time.sleep(3600)
    if token_to_batch.shape[0] == 2:
        os._exit(7)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(DIES_AND_HANGS)
    return f"{path}:gather_cache"


def _config(target, lane="cpu"):
    return WorkerConfig(TargetSpec(target), lane, "gfx942")


def _crash(verdict):
    (failed,) = verdict.failed
    assert failed.name == "crash"
    return failed.violation.message


def test_a_crash_and_a_hang_cost_one_case_each_and_are_named(target, gather_scene, scene_with):
    sequences = gather_scene.batch.sequences
    segfaults = lower(gather_scene)
    hangs = lower(scene_with(gather_scene, sequences=sequences[:1]))
    exits = lower(scene_with(gather_scene, sequences=sequences[1:]))
    with Worker(_config(target), case_timeout_s=3) as worker:
        assert "SIGSEGV" in _crash(worker.check(segfaults))
        assert "hung: no end after 3 s" in _crash(worker.check(hangs))
        assert "exit code 7" in _crash(worker.check(exits))
    with Worker(_config("builtin:gather_cache"), case_timeout_s=30) as worker:
        assert not worker.check(segfaults).failed


CHANGES_TORCH = """
import torch

def gather_cache(key_cache, value_cache, key, value, block_table, cu_seqlens_kv, token_to_batch):
    torch.changed = getattr(torch, "changed", 0) + 1
    raise ValueError(f"for the {torch.changed}. time")
"""


def test_a_worker_is_as_fresh_as_the_first(tmp_path, gather_scene):
    """Workers fork from a server that runs no target."""
    path = tmp_path / "k.py"
    path.write_text(CHANGES_TORCH)
    for _ in range(2):
        with Worker(_config(f"{path}:gather_cache"), case_timeout_s=30) as worker:
            assert "for the 1. time" in _crash(worker.check(lower(gather_scene)))


SAYS_WHAT_IT_IS_TOLD = """
import os

def gather_cache(key_cache, value_cache, key, value, block_table, cu_seqlens_kv, token_to_batch):
    raise ValueError(f"told {os.environ.get('KVFUZZ_TEST')}")
"""


def test_a_worker_has_the_variables_of_now(tmp_path, gather_scene, monkeypatch):
    path = tmp_path / "k.py"
    path.write_text(SAYS_WHAT_IT_IS_TOLD)
    serve()
    for value in ("one", "two"):
        monkeypatch.setenv("KVFUZZ_TEST", value)
        with Worker(_config(f"{path}:gather_cache"), case_timeout_s=30) as worker:
            assert f"told {value}" in _crash(worker.check(lower(gather_scene)))
    monkeypatch.delenv("KVFUZZ_TEST")
    with Worker(_config(f"{path}:gather_cache"), case_timeout_s=30) as worker:
        assert "told None" in _crash(worker.check(lower(gather_scene)))


def test_a_server_that_was_killed_is_replaced(gather_scene):
    case = lower(gather_scene)
    serve()
    server = _forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    with Worker(_config("builtin:gather_cache"), case_timeout_s=30) as worker:
        assert not worker.check(case).failed


LATE_ONCE = """
import time
from pathlib import Path
from kvfuzz.kernels.builtin.gather_cache import gather_cache as right

LATE = Path({mark!r})


def gather_cache(
    key_cache, value_cache, key, value, block_table, cu_seqlens_kv, seq_starts, token_to_batch,
    k_scale, v_scale, kv_cache_layout,
):
    arguments = dict(locals())
    if not LATE.exists():
        LATE.touch()
        time.sleep(3600)
    right(**arguments)
"""


def test_what_ends_late_once_is_asked_again_before_it_is_called_a_hang(tmp_path, gather_scene):
    path = tmp_path / "k.py"
    path.write_text(LATE_ONCE.format(mark=str(tmp_path / "late")))
    with Worker(_config(f"{path}:gather_cache"), case_timeout_s=5) as worker:
        verdict = worker.check(lower(gather_scene))
    assert not verdict.failed
    assert (tmp_path / "late").exists()


def test_a_lane_without_its_device_is_infrastructure():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with (
        Worker(_config("builtin:gather_cache", lane="gpu"), case_timeout_s=30) as worker,
        pytest.raises(InfrastructureError, match="torch sees no GPU"),
    ):
        worker.describe()


def test_an_unknown_lane_is_usage():
    with (
        Worker(_config("builtin:gather_cache", lane="tpu"), case_timeout_s=30) as worker,
        pytest.raises(UsageError, match="lane='tpu'"),
    ):
        worker.describe()


def test_a_target_that_ends_the_worker_while_loading_is_infrastructure(tmp_path):
    path = tmp_path / "k.py"
    path.write_text("import os\nos._exit(3)\n")
    with (
        Worker(_config(f"{path}:gather_cache"), case_timeout_s=30) as worker,
        pytest.raises(InfrastructureError, match="exit code 3 while loading"),
    ):
        worker.describe()


def test_a_target_that_cannot_import_is_not_checked_in_one_line(tmp_path):
    path = tmp_path / "k.py"
    path.write_text("import no_such_module_here\n")
    with (
        Worker(_config(f"{path}:gather_cache"), case_timeout_s=30) as worker,
        pytest.raises(NotCheckedError) as error,
    ):
        worker.describe()
    assert "no_such_module_here" in str(error.value)
    assert "\n" not in str(error.value)
