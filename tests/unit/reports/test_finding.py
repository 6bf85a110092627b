"""The text of a finding, by the sentences that a kernel engineer looks for."""

import pytest
import torch
from layout_scenes import scene_of

from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.model.held import whole
from kvfuzz.model.lower import lower
from kvfuzz.model.verdict import Place, PropertyResult, Violation
from kvfuzz.oracles.stored_bytes import place_of
from kvfuzz.oracles.table import PROPERTIES
from kvfuzz.reports import places
from kvfuzz.reports.cases import buffer_rows, case_rows
from kvfuzz.reports.finding import finding_text
from kvfuzz.reports.words import _WORDS


def test_every_property_has_words():
    assert {each.name for each in PROPERTIES} <= _WORDS.keys()


def test_a_finding_names_the_element_its_row_and_its_byte(wrong_row):
    text = finding_text(wrong_row)
    assert text.startswith("FINDING  oracle: a byte that the op must write holds the wrong value")
    assert "key_out, row 3, head 1, dim 0 (byte 448 of key_out)" in text
    assert "row 3 is position 16 of sequence 0: block 1, token 0 (block_table[0, 1])" in text


def test_a_finding_says_expected_and_got_as_bits_and_number(wrong_row):
    text = finding_text(wrong_row)
    assert "expected     0x3f80 = 1 (bf16)" in text
    assert "got          0xc000 = -2 (bf16)" in text
    assert "31 of 576 bytes that must be written" in text


def test_a_finding_says_whose_byte_it_is_and_how_far_off(wrong_row):
    text = finding_text(wrong_row)
    assert (
        "the value of layer.0 k, block 1, head 1, token 0, dim 0 (byte 4,160 of kv_cache)" in text
    )
    assert "that is the byte of layer.0 v, block 0, head 1, token 2, dim 0 (byte 2,368" in text
    assert "read 1,792 bytes before the right element" in text


def test_a_finding_lists_what_else_failed_and_the_smallest_case(wrong_row):
    text = finding_text(wrong_row)
    assert "also failed  roundtrip: key row 3 came back wrong" in text
    assert "num_blocks=5, block_size=16, num_kv_heads=2, head_size=32" in text
    assert "sequence 0   tokens 13..18 of 32, blocks 3, 1" in text
    assert "k_scale 1 (0x3f800000)" in text
    assert "gather_cache_kernel[8x2x1]  HEAD_SIZE=32  num_warps=4" in text


def test_the_last_line_is_the_replay_command_alone(wrong_row):
    assert finding_text(wrong_row).splitlines()[-2:] == ["", "kvfuzz replay out/seeds/1.json"]


def test_a_finding_fits_a_screen(wrong_row):
    lines = finding_text(wrong_row).splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) <= 100


def test_a_lane_that_records_no_origin_says_so(gather_scene, found):
    place = Place("key_out", 0, "key_out", "", {"token": 0, "head": 0, "dim": 0})
    violation = Violation("wrong", place, "0x3f80", "0x0000", 1, 2)
    text = finding_text(found(gather_scene, "oracle", violation, lane="gpu"))
    assert "whose byte that is, lane gpu did not record" in text


def test_a_value_that_no_buffer_holds_is_told_from_one_that_was_not_recorded(gather_scene, found):
    place = Place("key_out", 0, "key_out", "", {"token": 0, "head": 0, "dim": 0})
    violation = Violation("wrong", place, "0x3f80", "0x0000", 1, 2, traced=True)
    text = finding_text(found(gather_scene, "oracle", violation))
    assert "no byte of any buffer: it was computed" in text


def test_a_stored_padding_row_is_called_one(write_scene, found):
    case = lower(write_scene)
    at = {"block": 0, "head": 0, "token": 0, "dim": 0}
    row = {"token": 0, "head": 0, "dim": 0}
    place = Place("kv_cache", case.field("k").byte(at), "k", "layer.0", at)
    violation = Violation("wrong", place, "0x00", "0x01", 2, 9, Place("key", 0, "key", "", row))
    assert "row 0 is padding" in finding_text(found(write_scene, "frame", violation))


def test_a_wrong_conversion_of_the_right_element_is_told_from_a_wrong_address(
    gather_scene, scene_with, found
):
    scene = scene_with(gather_scene, cache_dtype="e4m3fn")
    case = lower(scene)
    place = Place("key_out", 0, "key_out", "", {"token": 0, "head": 0, "dim": 0})
    source = places.counterpart(case, place)
    violation = Violation("wrong", place, "0x3f80", "0x0000", 1, 2, source)
    text = finding_text(found(scene, "oracle", violation))
    assert "read from the right element: the conversion is wrong" in text
    assert "which holds 0x" in text
    assert "(e4m3fn)" in text


def test_an_overwritten_byte_says_where_its_value_belongs(write_scene, found):
    case = lower(write_scene)
    v = case.field("v")
    at = {"block": 0, "head": 0, "token": 0, "dim": 0}
    row = {"token": 1, "head": 0, "dim": 0}
    violation = Violation(
        "a byte that the op must not touch was overwritten",
        Place("kv_cache", v.byte(at), "v", "layer.0", at),
        "0x0000",
        "0x3f80",
        2,
        100,
        Place("key", case.field("key").byte(row), "key", "", row),
    )
    text = finding_text(found(write_scene, "frame", violation))
    assert "block 0 belongs to no sequence" in text
    assert "before       0x0000 = 0 (bf16)" in text
    assert "that is the byte of key, row 1, head 0, dim 0" in text
    assert "it belongs in layer.0 k, block 3, head 0, token 13, dim 0" in text
    assert "before the right element" in text


def test_a_padding_row_is_called_one(write_scene):
    place = Place("key", 0, "key", "", {"token": 0, "head": 0, "dim": 0})
    assert places.meaning(lower(write_scene), place) == "row 0 is padding: its slot is -1"
    assert places.counterpart(lower(write_scene), place) is None


def test_a_slot_names_its_sequence_and_its_row(write_scene):
    at = {"block": 3, "head": 0, "token": 13, "dim": 0}
    place = Place("kv_cache", 0, "k", "layer.0", at)
    meaning = places.meaning(lower(write_scene), place)
    assert meaning == "slot 61 is position 13 of sequence 0, row 1 of the batch"


@pytest.mark.parametrize(
    ("buffer", "byte", "said"),
    [
        ("kv_cache", -4, "4 bytes before the first byte of kv_cache (20,480 bytes)"),
        ("kv_cache", 20_481, "2 bytes after the last byte of kv_cache (20,480 bytes)"),
        ("block_table", 4, "element 1 of block_table, given as 1"),
    ],
)
def test_a_byte_that_no_element_owns_is_still_explained(gather_scene, buffer, byte, said):
    assert places.meaning(lower(gather_scene), Place(buffer, byte)) == said


def test_counterparts_pair_every_row_with_its_slot_and_back(write_scene):
    case = lower(write_scene)
    for row in (1, 2, 3, 5, 8):
        there = places.counterpart(
            case, Place("key", 0, "key", "", {"token": row, "head": 1, "dim": 9})
        )
        back = places.counterpart(case, there)
        assert back.coordinate == {"token": row, "head": 1, "dim": 9}


def test_the_first_content_of_an_element_is_that_of_the_worker(write_scene, scene_with):
    from kvfuzz.engine.worker.fill import filled

    scene = scene_with(write_scene, cache_dtype="e5m2")
    case = lower(scene)
    for name, coordinate in (
        ("k", {"block": 1, "head": 1, "token": 3, "dim": 5}),
        ("key", {"token": 2, "head": 1, "dim": 5}),
    ):
        field = case.field(name)
        buffer = case.buffer(field.buffer)
        start = field.byte(coordinate)
        held = filled(buffer.fill, buffer.name, whole(buffer.nbytes), "cpu")
        size = 1 if name == "k" else 2
        bits = "0x" + bytes(held[start : start + size].tolist())[::-1].hex()
        assert places.initial(case, Place(field.buffer, start, name, "", coordinate)) == bits


def test_a_crash_has_no_byte_and_still_a_case(gather_scene, found):
    text = finding_text(found(gather_scene, "crash", Violation("the target killed its process")))
    assert text.startswith("FINDING  crash: the target killed its process")
    assert "first wrong" not in text
    assert "op           gather_cache" in text


def test_escape_sequences_of_a_target_do_not_reach_the_text(gather_scene, found):
    violation = Violation("the target raised \x1b[31mRuntimeError\x1b[0m\r")
    text = finding_text(found(gather_scene, "crash", violation))
    assert "\x1b" not in text
    assert "\r" not in text
    assert r"\x1b[31mRuntimeError" in text


def test_a_round_trip_of_a_write_names_a_row_that_the_case_itself_lacks(write_scene, found):
    place = Place("key_out", 0, "key_out", "", {"token": 0, "head": 0, "dim": 0})
    violation = Violation(
        "key row 1 was written, and gathered back", place, "0x3f80", "0x0000", 2, 8
    )
    text = finding_text(found(write_scene, "roundtrip", violation, PropertyResult("x", "passed")))
    assert "went in      0x3f80 = 1 (bf16)" in text


@pytest.fixture
def inline_case():
    """K and V of unequal size with scales behind them, in padded pages of three layers."""
    return lower(
        scene_of(
            {
                "layout": "content_packed",
                "order": "hnd",
                "nesting": "block_first",
                "page": "padded",
                "value_size": "narrower",
                "granularity": "token_head_inline",
                "cache_dtype": "e4m3fnuz",
            },
            "reshape_and_cache",
        )
    )


def test_a_case_names_what_is_not_plain_about_its_layout(inline_case):
    rows = dict(case_rows(inline_case))
    assert rows["layout"].startswith(
        "content_packed, order hnd, nesting block_first of 3 attention layers, "
        "16 bytes of padding behind a page"
    )
    assert rows["geometry"].endswith("head_size=32, head_size_v=16")
    assert rows["scales"].endswith("granularity token_head_inline")
    (cache,) = [row for row in buffer_rows(inline_case) if row[0] == "kv_cache"]
    assert "k_scale inside: hash of seed 0: fp32 from 1.2" in cache[2]


def test_a_plain_case_says_nothing_of_what_is_plain(gather_scene):
    rows = dict(case_rows(lower(gather_scene)))
    assert rows["layout"] == "blocks_first, order nhd, views are not dense"
    assert "head_size_v" not in rows["geometry"]
    assert "granularity" not in rows["scales"]


def test_a_scale_inside_a_page_is_named_with_what_it_holds(inline_case):
    field = inline_case.field("k_scale")
    at = {"block": 1, "token": 3, "head": 1}
    place = place_of(inline_case, "kv_cache", field.byte(at) + 2)
    assert places.element(place) == "layer.1 k_scale, block 1, head 1, token 3"
    assert "a scale, which the op only reads" in places.meaning(inline_case, place)
    data = before_the_first_launch(inline_case, inline_case.buffer("kv_cache"), torch.device("cpu"))
    first = places.first_byte(inline_case, place)
    held_there = int.from_bytes(bytes(data[first : first + 4].tolist()), "little")
    assert places.initial(inline_case, place) == f"0x{held_there:08x}"


def test_a_scale_of_a_whole_tensor_has_no_coordinates(gather_scene):
    case = lower(gather_scene)
    place = place_of(case, "k_scale", 2)
    assert places.element(place) == "layer.0 k_scale"
    assert places.initial(case, place) == "0x3f800000"


def test_memory_that_the_target_allocates_itself_is_called_that(write_scene, found):
    violation = Violation("two programs wrote it", Place("scratch", 6))
    text = finding_text(found(write_scene, "no_race", violation))
    assert "scratch is memory that the target allocates itself" in text
