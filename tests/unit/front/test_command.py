"""The console script end to end: real workers, a mutant that is found, a seed that replays."""

import subprocess
import sys
from pathlib import Path

from kvfuzz.errors import Exit
from kvfuzz.model.events import Found, Progress, Started, Summary
from kvfuzz.reports.events_log import read_events

SCRIPT = Path(sys.executable).with_name("kvfuzz")
MUTANT = "mutant:hardcoded_block_stride"


def _kvfuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_mutant_is_found_saved_and_replayed_by_the_printed_line(tmp_path):
    ran = _kvfuzz(tmp_path, "run", MUTANT, "--max-cases", "200")
    assert ran.returncode == Exit.FINDING, ran.stderr
    assert ran.stderr == ""
    assert "FINDING  oracle" in ran.stdout
    assert "1 finding after" in ran.stdout
    assert all(each.isprintable() or each == "\n" for each in ran.stdout)
    line = next(each for each in ran.stdout.splitlines() if each.startswith("kvfuzz replay "))

    again = _kvfuzz(tmp_path, *line.split()[1:])
    assert again.returncode == Exit.FINDING
    assert again.stdout.splitlines()[-1] == line
    assert "the same bytes now" in again.stdout

    healthy = _kvfuzz(tmp_path, *line.split()[1:], "--bisect", "--target", "builtin:gather_cache")
    assert healthy.returncode == Exit.CLEAN, healthy.stderr
    assert healthy.stdout.startswith("clean: ")

    events = list(read_events(tmp_path / "kvfuzz-out" / "events.ndjson"))
    assert [type(e) for e in events if not isinstance(e, Progress)] == [
        Started,
        Found,
        Summary,
    ]
    assert events[0].command == f"kvfuzz run {MUTANT} --max-cases 200"


def test_an_unknown_target_gets_the_nearest_name(tmp_path):
    ran = _kvfuzz(tmp_path, "run", "builtin:gather_cach")
    assert ran.returncode == Exit.USAGE
    assert ran.stderr.count("\n") == 1
    assert "did you mean builtin:gather_cache?" in ran.stderr


def test_a_narrowed_clean_run_says_so_and_exits_0(tmp_path):
    where = "layout=hybrid,order=hnd,cache_dtype=bf16"
    ran = _kvfuzz(tmp_path, "run", "builtin:gather_cache", "--where", where, "--max-cases", "5")
    assert ran.returncode == Exit.CLEAN, ran.stderr
    assert "where     layout=hybrid, order=hnd, cache_dtype=bf16" in ran.stdout
    assert "no finding in 5 cases" in ran.stdout
    assert "hybrid (5)" in ran.stdout
