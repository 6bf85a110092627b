"""Header, summary, console and event log."""

import io

import msgspec
import pytest

from kvfuzz.errors import InfrastructureError, UsageError
from kvfuzz.model.events import Progress
from kvfuzz.model.verdict import WAITING
from kvfuzz.reports.campaign import header_lines, one_line, summary_lines
from kvfuzz.reports.console import ConsoleReport
from kvfuzz.reports.events_log import NAME, EventsLog, read_events
from kvfuzz.reports.text import columns, numbers, printable, seconds


def test_the_header_says_what_it_takes_to_run_it_again(started):
    text = "\n".join(header_lines(started))
    for part in ("builtin:x", "gfx942", "triton 3.6.0", "seed      5", "60 s", "whole domain"):
        assert part in text


def test_not_checked_is_never_shown_as_passed(summary):
    text = "\n".join(summary_lines(summary))
    passed, not_checked = text.split("not checked, of 40 cases")
    assert "bounds" not in passed
    assert "bounds     40  no record" in not_checked
    assert "roundtrip  10  no token is stored" in not_checked


def test_properties_that_took_turns_are_told_apart_from_those_that_could_not_be_checked(summary):
    turns = {
        "roundtrip": {"no token is stored": 3, WAITING: 20},
        "determinism": {WAITING: 25},
        "size1_stride": {"no dimension has size 1": 5, WAITING: 35},
    }
    passed = {"crash": 40, "roundtrip": 17, "determinism": 15}
    took = msgspec.structs.replace(summary, not_checked=turns, passed=passed)
    lines = [line.strip() for line in summary_lines(took)]
    assert "in turns  each asked of some cases only: roundtrip, determinism" in lines
    assert "never     no case decided: size1_stride" in lines
    assert not [line for line in lines if WAITING in line]
    assert "never checked: size1_stride" in one_line(took)
    assert "roundtrip not checked in 3 of 40 cases" in one_line(took)
    assert "determinism" not in one_line(took)


def test_hazards_stand_under_their_own_heading(summary):
    text = "\n".join(summary_lines(summary))
    assert "hazards (no influence on any result)\n    stray_read  7" in text


def test_levels_never_seen_are_named_but_only_those_that_could_be(summary, started):
    order = next(
        line for line in summary_lines(summary, started) if line.strip().startswith("order")
    )
    assert order.split(maxsplit=1)[1] == "nhd (40); never hnd"


def test_one_line_names_every_property_that_was_not_checked(summary):
    line = one_line(summary)
    assert "never checked: bounds" in line
    assert "roundtrip not checked in 10 of 40 cases" in line


def test_a_campaign_without_a_passed_property_is_not_called_clean(summary):
    nothing = msgspec.structs.replace(summary, passed={}, cases=0)
    assert summary_lines(nothing)[0].startswith("nothing was checked")


def _shown(*events, live=None, clock=None):
    stream = io.StringIO()
    extra = {} if clock is None else {"clock": clock}
    with ConsoleReport(stream, target="builtin:x", live=live, **extra) as console:
        for event in events:
            console(event)
    return stream.getvalue()


def test_off_a_terminal_there_are_no_control_characters(started, wrong_row, summary, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    ticks = iter(range(0, 1000, 10))
    text = _shown(
        started, Progress("random", 7, 2.0), wrong_row, summary, clock=lambda: next(ticks)
    )
    assert all(each.isprintable() or each == "\n" for each in text)
    assert "random  7 cases  3.5/s  2.0 s of 60 s" in text
    assert "\nkvfuzz replay out/seeds/1.json\n" in text


def test_off_a_terminal_progress_comes_every_few_seconds(started):
    now = [0.0]
    stream = io.StringIO()
    with ConsoleReport(stream, live=False, clock=lambda: now[0]) as console:
        console(started)
        for tick in range(200):
            now[0] = tick * 0.1
            console(Progress("random", tick, now[0]))
    assert stream.getvalue().count("random") == 3


def test_on_a_terminal_the_progress_line_is_gone_at_the_end(
    started, wrong_row, summary, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    text = _shown(started, Progress("random", 7, 2.0), wrong_row, summary, live=True)
    assert "loading builtin:x" in text
    assert "\x1b[2K" in text
    assert text.rstrip().splitlines()[-1].strip().startswith("values")


def test_every_event_comes_back_from_the_log(tmp_path, started, wrong_row, summary):
    events = [started, Progress("random", 1, 0.2), wrong_row, summary]
    with EventsLog(tmp_path) as log:
        for event in events:
            log(event)
            assert (tmp_path / NAME).read_bytes().endswith(b"\n")
    assert list(read_events(tmp_path / NAME)) == events


def test_the_log_is_appended_to_and_thins_out_progress(tmp_path, started):
    for _ in range(2):
        with EventsLog(tmp_path) as log:
            log(started)
            for tick in range(10):
                log(Progress("random", tick, tick * 0.1))
    kinds = [type(event).__name__ for event in read_events(tmp_path / NAME)]
    assert kinds == ["Started", "Progress"] * 2


def test_a_log_cut_off_in_its_last_line_is_read_up_to_there(tmp_path, started):
    with EventsLog(tmp_path) as log:
        log(started)
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes() + b'{"type":"Prog')
    assert list(read_events(path)) == [started]
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(UsageError, match="line 1: no event"):
        list(read_events(path))


def test_a_log_that_cannot_be_written_is_an_infrastructure_error(tmp_path, started):
    (tmp_path / NAME).mkdir()
    with EventsLog(tmp_path) as log, pytest.raises(InfrastructureError, match="cannot be written"):
        log(started)


def test_columns_wrap_the_last_cell_and_keep_the_others_aligned():
    lines = columns([("a", "word " * 30), ("long", "x")], width=40)
    assert lines[0].startswith("  a     word")
    assert lines[1].startswith("        word")
    assert lines[-1] == "  long  x"
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (59.6, "60 s"), (250.0, "4 min 10 s"), (7500.0, "2 h 5 min")],
)
def test_durations_read_well(value, text):
    assert seconds(value) == text


def test_runs_of_numbers_are_folded():
    assert numbers([0, 3, 4, 5, 9, 10]) == "0, 3-5, 9, 10"
    assert numbers(list(range(0, 60, 2))).endswith("22, ... (30 in all)")


def test_printable_keeps_newlines_and_escapes_the_rest():
    assert printable("a\nb\tc\x07") == "a\nb\\tc\\x07"
