"""Every mistake ends in one line on stderr and its exit code."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvfuzz.errors import Exit, InfrastructureError, NotCheckedError, UsageError
from kvfuzz.front import entry, replaying
from kvfuzz.front.replaying import ReplayOptions, worst

GATHER = "builtin:gather_cache"


def _one_line(ended, code, *parts):
    assert ended.code == code
    assert ended.err.startswith("kvfuzz: ")
    assert ended.err.count("\n") == 1
    for part in parts:
        assert part in ended.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--budget", "0"], ["--budget 0", "60s, 5m or 2h"]),
        (["--budget", "soon"], ["--budget soon", "60s, 5m or 2h"]),
        (["--case-timeout", "1"], ["--case-timeout 1", "60s, 5m or 2h"]),
        (["--where", "layuot=hybrid"], ["no axis 'layuot'", "did you mean layout?"]),
        (["--where", "layout=hybird"], ["layout has no level 'hybird'", "did you mean hybrid?"]),
        (["--where", "layout"], ["expected AXIS=LEVEL"]),
        (["--source", "vllm"], ["--source vllm", "expected PROJECT=DIR"]),
        (["--source", "vllm=/nowhere"], ["no folder /nowhere"]),
    ],
)
def test_a_wrong_option_of_run_is_named_before_anything_starts(kvfuzz, arguments, parts):
    _one_line(kvfuzz("run", GATHER, *arguments), Exit.USAGE, *parts)


def test_a_folder_that_cannot_be_written_is_a_usage_error(kvfuzz, tmp_path):
    (tmp_path / "file").write_text("")
    ended = kvfuzz("run", GATHER, "--out", "file/out")
    _one_line(ended, Exit.USAGE, "--out file/out", "Not a directory")


def test_a_wrong_configuration_is_named(kvfuzz, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.kvfuzz]\nmax_case = 3\n")
    ended = kvfuzz("run", GATHER)
    _one_line(ended, Exit.USAGE, "[tool.kvfuzz]", "unknown key 'max_case'", "max-cases")


def test_flags_win_over_the_configuration(kvfuzz, tmp_path):
    (tmp_path / "kvfuzz.toml").write_text("budget = '0s'\n")
    _one_line(kvfuzz("run", GATHER), Exit.USAGE, "--budget 0s")
    _one_line(kvfuzz("run", GATHER, "--budget", "7x"), Exit.USAGE, "--budget 7x")


def test_a_missing_seed_is_named(kvfuzz):
    _one_line(kvfuzz("replay", "gone.json"), Exit.USAGE, "seed gone.json: No such file")
    _one_line(kvfuzz("show", "gone.json"), Exit.USAGE, "seed gone.json: No such file")


def _broken(path, change):
    raw = json.loads(path.read_bytes())
    change(raw)
    path.write_text(json.dumps(raw))


def _impossible(raw):
    raw["case"]["buffers"][0]["nbytes"] = 16


@pytest.mark.parametrize("command", ["replay", "show"])
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda raw: raw.update(schema=99), "schema=99 is newer than this kvfuzz reads"),
        (lambda raw: raw.update(colour="red"), "unknown field `colour`"),
        (lambda raw: raw.pop("target"), "missing required field `target`"),
        (_impossible, "impossible case: field k in buffer kv_cache"),
    ],
)
def test_a_malformed_seed_is_explained_in_one_line(kvfuzz, seed_file, command, change, part):
    _broken(seed_file, change)
    _one_line(kvfuzz(command, str(seed_file)), Exit.USAGE, str(seed_file), part)


def test_a_seed_that_is_no_json_is_called_that(kvfuzz, tmp_path):
    (tmp_path / "s.json").write_text("{")
    _one_line(kvfuzz("replay", "s.json"), Exit.USAGE, "seed s.json: not JSON")


def test_every_seed_is_read_before_the_first_one_runs(kvfuzz, seed_file, monkeypatch):
    monkeypatch.setattr(replaying, "replay", lambda *a, **k: pytest.fail("ran"))
    _one_line(kvfuzz("replay", str(seed_file), "gone.json"), Exit.USAGE, "gone.json")


def test_a_pasted_seed_is_read_from_stdin(kvfuzz, seed_file, monkeypatch):
    data = seed_file.read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    ended = kvfuzz("show", "-")
    assert ended.code == Exit.CLEAN
    assert "property  oracle" in ended.out
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    _one_line(kvfuzz("show", "-"), Exit.USAGE, "seed on stdin: not JSON")


def test_a_bisection_takes_every_mistake_for_untestable(kvfuzz, seed_file):
    assert kvfuzz("replay", "--bisect", "gone.json").code == entry.BISECT_SKIP
    assert kvfuzz("replay", "--bisect", "--frobnicate").code == entry.BISECT_SKIP
    assert kvfuzz("replay", str(seed_file), "--bisect", "--lane", "x").code == entry.BISECT_SKIP


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfrastructureError("no device"), Exit.INFRASTRUCTURE),
        (NotCheckedError("absent"), Exit.NOT_CHECKED),
    ],
)
def test_a_seed_that_could_not_be_run_does_not_stop_the_others(
    kvfuzz, seed_file, monkeypatch, error, code
):
    calls = []

    def replay(*arguments, **options):
        calls.append(arguments)
        raise error

    monkeypatch.setattr(replaying, "replay", replay)
    ended = kvfuzz("replay", str(seed_file), str(seed_file))
    assert ended.code == code
    assert len(calls) == 2
    assert ended.err.splitlines() == [f"kvfuzz: seed {seed_file}: {error}"] * 2


def test_a_usage_error_while_replaying_ends_the_command(kvfuzz, seed_file, monkeypatch):
    def replay(*arguments, **options):
        raise UsageError("say --target")

    monkeypatch.setattr(replaying, "replay", replay)
    _one_line(kvfuzz("replay", str(seed_file), str(seed_file)), Exit.USAGE, "say --target")


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 4, 3, 1], 1), ([0, 4, 3], 3), ([0, 4], 4), ([0, 0], 0)],
)
def test_a_finding_wins_over_infrastructure_that_over_not_checked(codes, code):
    assert worst(codes) == code


def test_the_replay_command_of_a_replay_can_be_pasted():
    options = ReplayOptions("my k.py:f", ("vllm=/src",), "gpu", "gfx950")
    assert options.command("a b.json") == (
        "kvfuzz replay 'a b.json' --target 'my k.py:f' --source vllm=/src --lane gpu --arch gfx950"
    )


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), Exit.INTERRUPTED), (RuntimeError("oops"), Exit.INFRASTRUCTURE)],
)
def test_neither_ctrl_c_nor_a_bug_of_kvfuzz_looks_like_a_finding(
    kvfuzz, seed_file, monkeypatch, raised, code
):
    def replay(*arguments, **options):
        raise raised

    monkeypatch.setattr(replaying, "replay", replay)
    ended = kvfuzz("replay", str(seed_file))
    assert ended.code == code
    assert bool(ended.err.strip()) == (code == Exit.INFRASTRUCTURE)


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["run"], ["run", GATHER, "--max-cases", "0"], ["replay"]]
)
def test_a_usage_error_of_click_exits_2(kvfuzz, arguments):
    assert kvfuzz(*arguments).code == Exit.USAGE


def test_list_shows_targets_mutants_and_axes(kvfuzz):
    ended = kvfuzz("list")
    assert ended.code == Exit.CLEAN
    for part in (GATHER, "mutant:hardcoded_block_stride", "content_packed", "e4m3fnuz"):
        assert part in ended.out
    assert "mutant:" not in kvfuzz("list", "axes").out


def test_version_and_help_are_clean(kvfuzz):
    assert kvfuzz("--version").out.startswith("kvfuzz 0.1.0, triton ")
    assert "Exit codes" in kvfuzz("--help").out


HEAVY = "('hypothesis', 'torch', 'triton', 'numpy', 'click', 'rich', 'pebble')"


@pytest.mark.parametrize(
    "module",
    ["kvfuzz", "kvfuzz.front.entry", "kvfuzz.front.pytest_plugin", "kvfuzz.front.testing"],
)
def test_what_a_worker_or_a_foreign_project_imports_is_light(module):
    code = f"import {module}, sys; sys.exit(', '.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_and_show_load_neither_torch_nor_triton(seed_file):
    code = (
        "import sys; from kvfuzz.front.entry import main\n"
        f"main(['list']); main(['show', {str(seed_file)!r}])\n"
        "sys.exit(', '.join(m for m in ('torch', 'triton') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
