# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import CpuLane, LaneError, LaunchError
from kvfuzz.cpu.scratch import Scratch


@triton.jit
def fill(out, value, length, BLOCK: tl.constexpr, EXTRA: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, value + EXTRA, mask=at < length)


@triton.autotune(
    configs=[triton.Config({"BLOCK": size}, num_warps=size // 4) for size in (16, 8, 32)],
    key=["length"],
)
@triton.jit
def tuned(out, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, mask=at < length) + BLOCK, mask=at < length)


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["length"])})
@triton.jit
def guessed(out, length, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, BLOCK, mask=at < length)


@triton.jit
def scalars(out, flag, small, big, real, none):
    tl.store(out, small)
    tl.store(out + 1, big)
    tl.store(out + 2, (real * 4).to(tl.int64))
    if flag:
        tl.store(out + 3, 1)
    if none is None:
        tl.store(out + 4, 1)


@triton.jit
def which_target(out):
    tl.store(out, 1)
    if tl.target_info.is_hip():
        tl.store(out, 2)


def test_keyword_launches_and_callable_grids_work_unchanged(lane, buffer):
    out = buffer("out", torch.zeros(20))
    grid = lambda meta: (triton.cdiv(meta["length"], meta["BLOCK"]),)  # noqa: E731
    fill[grid](out=out, length=20, value=2.5, BLOCK=8, EXTRA=1)
    assert out.tolist() == [3.5] * 20


def test_a_launch_is_recorded_with_its_grid_constexprs_and_options(lane, buffer):
    out = buffer("out", torch.zeros(20))
    with lane.observe() as access:
        fill[(2, 1)](out, 1.0, 20, BLOCK=16, num_warps=2)
    (launch,) = access.launches
    assert (launch.kernel, launch.grid) == ("fill", (2, 1, 1))
    assert launch.constexprs == {"BLOCK": 16, "EXTRA": 0}
    assert (launch.options["num_warps"], launch.options["arch"]) == (2, "gfx942")


def test_autotuning_takes_the_first_config_and_runs_the_kernel_once(lane, buffer):
    out = buffer("out", torch.zeros(40, dtype=torch.int32))
    with lane.observe() as access:
        tuned[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](out, 40)
    assert out.tolist() == [16] * 40
    (launch,) = access.launches
    assert launch.constexprs["BLOCK"] == 16
    assert launch.options["num_warps"] == 4


def test_heuristics_are_applied(buffer):
    out = buffer("out", torch.zeros(5, dtype=torch.int32))
    guessed[(1,)](out, 5)
    assert out.tolist() == [8] * 5


@pytest.mark.parametrize(
    ("small", "big", "real", "flag"),
    [(1, 1 << 40, 0.25, True), (-7, -(1 << 62), -2.0, False), (16, (1 << 63) - 1, 1e9, True)],
)
def test_scalar_arguments_of_every_kind_arrive(buffer, small, big, real, flag):
    out = buffer("out", torch.zeros(5, dtype=torch.int64))
    scalars[(1,)](out, flag, small, big, real, None)
    assert out.tolist() == [small, big, int(real * 4), int(flag), 1]


def test_kernels_are_compiled_for_hip(buffer):
    out = buffer("out", torch.zeros(1, dtype=torch.int32))
    which_target[(1,)](out)
    assert out.item() == 2


def test_an_empty_grid_runs_nothing(buffer):
    out = buffer("out", torch.zeros(8))
    fill[(0,)](out, 1.0, 8, BLOCK=8)
    assert not out.any()


def test_a_tensor_that_is_not_on_the_cpu_is_refused(lane):
    with pytest.raises(LaunchError, match="expected a CPU tensor"):
        fill[(1,)](torch.empty(8, device="meta"), 1.0, 8, BLOCK=8)


def test_a_second_lane_cannot_be_activated_beside_the_first(lane):
    with pytest.raises(LaneError, match="active in this process already"):
        CpuLane().activate()


def test_observations_do_not_nest(lane):
    with lane.observe(), pytest.raises(LaneError, match="running already"), lane.observe():
        pass


def test_a_lane_can_be_given_up_and_another_takes_over(active_lane, lane, buffer):
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    lane.deactivate()
    other = CpuLane(arch="gfx950")
    other.activate()
    try:
        with other.observe() as access:
            which_target[(1,)](out)
        assert access.launches[0].options["arch"] == "gfx950"
    finally:
        other.deactivate()
        lane.activate()
    with lane.observe() as access:
        which_target[(1,)](out)
    assert access.launches[0].options["arch"] == "gfx942"


def test_compilations_leave_no_files_behind(active_lane, lane, buffer):
    which_target[(1,)](buffer("out", torch.zeros(1, dtype=torch.int32)))
    directory = Path(triton.knobs.cache.dir)
    assert directory.name.startswith("kvfuzz-triton-")
    assert list(directory.iterdir()) == []
    lane.deactivate()
    assert not directory.exists()
    lane.activate()


def test_the_directory_of_a_dead_process_is_cleared_away_and_no_living_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, other = "kvfuzz-triton-4194303-x", "kvfuzz-triton-someone"
    living = f"kvfuzz-triton-{os.getppid()}-y"
    for name in (dead, living, other):
        (tmp_path / name).mkdir()
    (tmp_path / dead / "kernel").mkdir()
    scratch = Scratch()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {living, other, Path(scratch.path).name}
    Scratch().close()  # a second worker starts: the empty directory of the first stays
    assert Path(scratch.path).is_dir()
    scratch.close()


def run_child(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_lane_works_where_the_interpreter_cannot_be_imported(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        textwrap.dedent(
            """
            import triton, triton.language as tl
            @triton.jit
            def twice(x):
                at = tl.arange(0, 4)
                tl.store(x + at, tl.load(x + at) * 2)
            """
        )
    )
    result = run_child(
        f"""
        import sys
        sys.modules["triton.runtime.interpreter"] = None
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from kvfuzz.cpu import CpuLane
        lane = CpuLane()
        lane.activate()
        from kernel import twice
        x = torch.arange(4.0)
        twice[(1,)](x)
        print(x.tolist())
        """
    )
    assert result.stdout.strip() == "[0.0, 2.0, 4.0, 6.0]", result.stderr
    assert result.stderr == ""


def test_importing_the_lane_changes_nothing_and_pulls_in_no_hypothesis():
    result = run_child(
        """
        import sys, triton
        from triton.backends import backends
        before = dict(backends), triton.runtime.driver._active
        import kvfuzz.cpu
        assert before == (dict(backends), triton.runtime.driver._active)
        assert "hypothesis" not in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr


def test_the_lane_refuses_a_process_that_interprets_kernels():
    result = run_child(
        """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        from kvfuzz.cpu import CpuLane, LaneError
        try:
            CpuLane().activate()
        except LaneError as error:
            print(error)
        """
    )
    assert "TRITON_INTERPRET is set" in result.stdout, result.stderr
