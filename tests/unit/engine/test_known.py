"""What a finding explains, and what makes two the same."""

import msgspec
import pytest

from kvfuzz.engine.known import Known, Mark, Symptom, mark_of, symptoms
from kvfuzz.model.lower import lower
from kvfuzz.model.verdict import (
    CAUSES,
    PROPERTY_NAMES,
    RELATIONS,
    Place,
    PropertyResult,
    Verdict,
    Violation,
)
from kvfuzz.oracles.properties import no_variants
from kvfuzz.oracles.table import PROPERTIES


def failing(*names, fields=("key_out",), place=None, origin=None):
    """A verdict in which these properties failed."""
    violation = Violation(
        "wrong", place or Place("key_out", 0, fields[0]), origin=origin, fields=fields
    )
    return Verdict(tuple(PropertyResult(name, "failed", violation=violation) for name in names))


def test_the_symptoms_are_the_properties_and_sides_whose_bytes_are_wrong():
    verdict = failing("oracle", "frame", fields=("key_out", "value_out"))
    expected = {(name, side) for name in ("oracle", "frame") for side in ("key", "value")}
    assert {(each.property, each.side) for each in symptoms(verdict)} == expected


def test_every_property_that_compares_runs_is_a_relation():
    compared = {each.name for each in PROPERTIES if each.variants is not no_variants}
    # Other fills outside of allocations tell whether a read there has any influence.
    assert compared - {"bounds"} <= set(RELATIONS)
    assert {*RELATIONS, *CAUSES} <= set(PROPERTY_NAMES)


def test_a_cause_leaves_out_its_consequences():
    assert [each.property for each in symptoms(failing("no_overflow", "oracle", "frame"))] == [
        "no_overflow"
    ]


def test_relations_count_only_where_no_byte_is_wrong_by_itself():
    assert {e.property for e in symptoms(failing("oracle", "roundtrip", "dead_bytes"))} == {
        "oracle"
    }
    assert {each.property for each in symptoms(failing("dead_bytes", "roundtrip"))} == {
        "dead_bytes"
    }


def test_crashes_are_told_apart_by_how_they_ended_and_not_by_their_numbers():
    def ended(message):
        result = PropertyResult("crash", "failed", violation=Violation(message))
        return symptoms(Verdict((result,)))

    assert ended("raised ValueError: 12 of 7") == ended("raised ValueError: 3 of 96")
    assert ended("raised ValueError: 12") != ended("killed its process with SIGSEGV")


def test_a_finding_explains_its_symptoms_under_the_levels_of_its_extents_alone(gather_scene):
    case = lower(gather_scene)
    symptom = Symptom("oracle", "key")
    mark = mark_of(case, symptom, failing("oracle"))
    known = Known(mark, frozenset({symptom}), ({"order": ("nhd",)},))
    assert known.explains(symptom, {"order": "nhd"})
    assert not known.explains(symptom, {"order": "hnd"})
    assert not known.explains(Symptom("oracle", "value"), {"order": "nhd"})
    wider = known.wider((Symptom("oracle", "value"),), {"order": ("hnd",)})
    assert wider.explains(Symptom("oracle", "value"), {"order": "hnd"})


def test_what_is_wrong_with_the_case_compared_with_is_explained_by_wrong_bytes_on_its_side():
    there = Symptom("batch_invariance", "key", elsewhere=True)
    here = Symptom("batch_invariance", "key")
    mark = Mark("oracle", ("key",), "strided", False, ("token",))
    known = Known(mark, frozenset({Symptom("oracle", "key")}), ({"order": ("nhd",)},))
    assert known.explains(there, {"order": "hnd"})
    assert not known.explains(here, {"order": "hnd"})
    assert not known.explains(
        Symptom("batch_invariance", "value", elsewhere=True), {"order": "nhd"}
    )
    relation = Known(mark, frozenset({Symptom("dead_bytes", "key")}), ({},))
    assert not relation.explains(there, {"order": "nhd"})


ROW = {"token": 0, "head": 0, "dim": 0}


@pytest.mark.parametrize(
    ("origin", "instead"),
    [
        ({"head": 1}, ("head",)),
        ({"dim": 3}, ("dim",)),
        ({"token": 5}, ("token",)),
        ({"block": 1}, ("token",)),
        ({}, ("value",)),
    ],
)
def test_the_mark_says_in_what_the_element_that_was_found_is_another(gather_scene, origin, instead):
    case = lower(gather_scene)
    from kvfuzz.model.round_trip import touched

    slot, n = touched(case, case.steps[0])[0], case.geometry.block_size
    right = {"block": slot // n, "token": slot % n, "head": 0, "dim": 0}
    found = Place("kv_cache", 0, "k", coordinate=right | origin)
    place = Place("key_out", 0, "key_out", coordinate=ROW)
    verdict = failing("oracle", place=place, origin=found)
    assert mark_of(case, Symptom("oracle", "key"), verdict).instead == instead


def test_v_in_place_of_k_is_another_side(gather_scene):
    case = lower(gather_scene)
    from kvfuzz.model.round_trip import touched

    slot, n = touched(case, case.steps[0])[0], case.geometry.block_size
    right = {"block": slot // n, "token": slot % n, "head": 0, "dim": 0}
    verdict = failing(
        "oracle",
        place=Place("key_out", 0, "key_out", coordinate=ROW),
        origin=Place("kv_cache", 0, "v", coordinate=right),
    )
    assert mark_of(case, Symptom("oracle", "key"), verdict).instead == ("side",)


def test_paths_and_conversions_make_marks_differ(gather_scene):
    case = lower(gather_scene)
    verdict, symptom = failing("oracle"), Symptom("oracle", "key")
    layer = msgspec.structs.replace(gather_scene.attention, order="hnd")
    plan = msgspec.structs.replace(gather_scene.plan, layers=(layer, *gather_scene.plan.layers[1:]))
    strided = lower(msgspec.structs.replace(gather_scene, plan=plan))
    assert mark_of(case, symptom, verdict) == mark_of(strided, symptom, verdict)
    layer = msgspec.structs.replace(gather_scene.attention, order="shuffle")
    plan = msgspec.structs.replace(gather_scene.plan, layers=(layer, *gather_scene.plan.layers[1:]))
    shuffled = lower(msgspec.structs.replace(gather_scene, plan=plan))
    assert mark_of(case, symptom, verdict) != mark_of(shuffled, symptom, verdict)
