"""What a replayed seed says."""

import msgspec

from kvfuzz.model.verdict import PropertyResult, Verdict
from kvfuzz.reports.replay import replay_lines
from kvfuzz.reports.seed import seed_lines


def _lines(seed, verdict, *, checked=True, **changed):
    return replay_lines(
        seed,
        verdict,
        target="builtin:x",
        now=msgspec.structs.replace(seed.provenance, **changed),
        checked=checked,
        path="s.json",
        command="kvfuzz replay s.json",
    )


def test_a_reproduced_finding_ends_with_its_command(wrong_row):
    lines = _lines(wrong_row.seed, wrong_row.verdict)
    assert lines[0].startswith("FINDING  oracle")
    assert lines[-1] == "kvfuzz replay s.json"
    assert any("failed (oracle) for builtin:x; the same bytes now" in line for line in lines)


def test_a_clean_replay_says_which_property_holds_now_and_that_the_source_changed(wrong_row):
    results = (
        PropertyResult("oracle", "passed"),
        PropertyResult("bounds", "not_checked", "no record"),
    )
    lines = _lines(wrong_row.seed, Verdict(results, digest="e"), content="f" * 16, triton="3.9")
    text = "\n".join(lines)
    assert lines[0] == "clean: s.json: oracle holds for builtin:x"
    assert "not checked  bounds: no record" in text
    assert "other bytes now" in text
    assert "with triton 3.6.0, now 3.9; content 0123456789abcdef, now ffffffffffffffff" in text


def test_a_property_that_could_not_be_decided_is_not_called_clean(wrong_row):
    verdict = Verdict((PropertyResult("oracle", "not_checked", "lane cpu: dot"),))
    assert _lines(wrong_row.seed, verdict, checked=False)[0] == (
        "not checked: s.json: oracle: lane cpu: dot"
    )
    refused = Verdict((), refused="NotImplementedError: no")
    assert "the target refused the case" in _lines(wrong_row.seed, refused, checked=False)[0]


def test_show_prints_provenance_case_buffers_and_arguments(wrong_row):
    noted = msgspec.structs.replace(
        wrong_row.seed,
        provenance=msgspec.structs.replace(wrong_row.seed.provenance, note="from #47685"),
    )
    text = "\n".join(seed_lines(noted, "s.json"))
    for part in (
        "from #47685",
        "triton 3.6.0",
        "block_table     24",
        "hash of seed 7: any bytes",
        "fp32: 0x3f800000",
        "order=nhd",
        "num_blocks=5",
    ):
        assert part in text
