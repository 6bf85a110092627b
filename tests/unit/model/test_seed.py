import json

import msgspec
import pytest
from layout_scenes import COMBINATIONS, scene_of

from kvfuzz.errors import UsageError
from kvfuzz.model import seed as seeds
from kvfuzz.model.lower import lower
from kvfuzz.model.seed import Expected, Provenance, Seed


@pytest.fixture
def seed(gather_scene):
    return Seed(
        target="mutant:hardcoded_block_stride",
        op="gather_cache",
        property="oracle",
        case=lower(gather_scene),
        expected=Expected("failed", "0123456789abcdef"),
        provenance=Provenance("0.1.0", "3.9.0", "2.13.0", "cpu", "gfx942", "feed"),
    )


def _edited(seed, **changes):
    raw = json.loads(seeds.dump(seed))
    raw.update(changes)
    return json.dumps(raw).encode()


def _refusal(data):
    with pytest.raises(UsageError) as error:
        seeds.load(data, where="s.json")
    message = str(error.value)
    assert message.startswith("seed s.json: ")
    assert "\n" not in message
    return message


def test_a_seed_survives_the_round_trip_through_its_file(seed):
    assert seeds.load(seeds.dump(seed), where="s.json") == seed


def test_the_id_ignores_provenance_and_changes_with_the_case(seed, write_scene):
    other_provenance = msgspec.structs.replace(seed.provenance, arch="gfx950", note="from the lab")
    assert msgspec.structs.replace(seed, provenance=other_provenance).id == seed.id
    assert msgspec.structs.replace(seed, case=lower(write_scene)).id != seed.id
    assert msgspec.structs.replace(seed, property="frame").id != seed.id


def test_text_that_is_no_json_is_refused():
    assert "not JSON" in _refusal(b"{broken")


def test_json_that_is_no_seed_is_refused():
    assert "schema=None" in _refusal(b"[1, 2]")


def test_a_newer_schema_is_refused_with_its_version(seed):
    assert "schema=99 is newer" in _refusal(_edited(seed, schema=99))


def test_an_unknown_field_is_named(seed):
    assert "surprise" in _refusal(_edited(seed, surprise=1))


def test_a_missing_field_is_named(seed):
    raw = json.loads(seeds.dump(seed))
    del raw["case"]["fields"]
    assert "fields" in _refusal(json.dumps(raw).encode())


def test_another_fill_algorithm_is_refused(seed):
    assert "splitmix64/2" in _refusal(_edited(seed, fill="splitmix64/2"))


IMPOSSIBLE = {
    "a field that leaves its buffer": ("fields", 0, {"base": 10**9}),
    "a negative stride": ("fields", 0, {"terms": [["block", -2, 1, 0]]}),
    "a field of an unknown dtype": ("fields", 0, {"dtype": "e9m9"}),
    "a field in no buffer": ("fields", 0, {"buffer": "nowhere"}),
    "a buffer of another size than its values": ("buffers", 1, {"nbytes": 400}),
    "a view that leaves its buffer": ("tensors", 0, {3: [10**6, 2, 2, 2]}),
    "a view with a stride between elements": ("tensors", 0, {4: [3, 3, 3, 3]}),
    "a tensor bound to nothing": ("steps", 0, {"tensors": {"key": "nothing"}}),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_case_is_refused(seed, what):
    raw = json.loads(seeds.dump(seed))
    group, index, change = IMPOSSIBLE[what]
    part = raw["case"][group][index]
    for key, value in change.items():
        part[key] = value
    assert "impossible case" in _refusal(json.dumps(raw).encode())


def _set(raw, path, value):
    *most, last = path
    for key in most:
        raw = raw[key]
    raw[last] = value


BLOCK_TABLE, SEQ_STARTS, CU_SEQLENS, TOKEN_TO_BATCH = 3, 4, 5, 6


def _values(buffer):
    return ("case", "buffers", buffer, "fill", "values", 0)


STEP = ("case", "steps", 0)
UNRUNNABLE = {
    "a block id beyond the cache": (_values(BLOCK_TABLE), 10**6),
    "a negative block id": (_values(BLOCK_TABLE), -1),
    "a token of no sequence": (_values(TOKEN_TO_BATCH), -1),
    "a run that starts before its sequence": (_values(SEQ_STARTS), -5),
    "a run that ends behind its table": (_values(SEQ_STARTS), 1000),
    "row counts that do not start at 0": (_values(CU_SEQLENS), 3),
    "no steps": (("case", "steps"), []),
    "an unknown op": ((*STEP, "op"), "nop"),
    "a first step by the partner": ((*STEP, "by"), "partner"),
    "missing scalars": ((*STEP, "scalars"), {}),
    "another cache dtype than the fields": ((*STEP, "scalars", "cache_dtype"), "fp16"),
    "a view of another rank": (("case", "tensors", 0, 3), [5]),
    "a view of another dtype": (("case", "tensors", 0, 2), "fp16"),
    "a field without a term": (("case", "fields", 0, "terms"), [["block", 4096, 1, 0]]),
    "a fill seed past 64 bits": (("case", "buffers", 0, "fill", "seed"), 1 << 64),
    "a fill seed of the scene past 64 bits": (("case", "scene", "fill_seed"), 1 << 70),
    "a name that is no text": (("provenance", "note"), "\ud800"),
    "a buffer larger than any machine": (("case", "buffers", 0, "nbytes"), 10**15),
    "a value past its format": (_values(BLOCK_TABLE), 1 << 40),
    "a property that does not exist": (("property",), "nosuch"),
    "another op than the step's": (("op",), "reshape_and_cache"),
}


@pytest.mark.parametrize("what", UNRUNNABLE)
def test_a_seed_that_would_blame_the_kernel_for_its_own_fault_is_refused(seed, what):
    raw = json.loads(seeds.dump(seed))
    path, value = UNRUNNABLE[what]
    _set(raw, path, value)
    _refusal(json.dumps(raw).encode())


def test_json_nested_too_deep_is_refused():
    assert "not JSON" in _refusal(b"[" * 200_000)


def test_every_drawn_kind_of_case_passes_the_check(gather_scene, write_scene, seed):
    for scene in (gather_scene, write_scene):
        case = lower(scene)
        again = msgspec.structs.replace(seed, case=case, op=scene.op)
        assert seeds.load(seeds.dump(again), where="s.json").case == case


def test_each_schema_version_has_an_upgrade_to_the_next():
    assert sorted(seeds.UPGRADES) == list(range(1, seeds.SCHEMA))


@pytest.mark.parametrize("number", range(0, len(COMBINATIONS), 60))
def test_a_seed_keeps_every_attribute_of_a_layout(seed, number):
    scene = scene_of(COMBINATIONS[number], "gather_cache", number)
    again = msgspec.structs.replace(seed, case=lower(scene))
    assert seeds.load(seeds.dump(again), where="s.json") == again


def _as_schema_1(seed):
    """What the first schema wrote of a seed: nothing of what came later."""
    raw = json.loads(seeds.dump(seed))
    raw["schema"] = 1
    case = raw["case"]
    case["fields"] = [f for f in case["fields"] if f["name"] not in ("k_scale", "v_scale")]
    for field in case["fields"]:
        del field["fill"]
    for step in case["steps"]:
        del step["fields"]["k_scale"], step["fields"]["v_scale"]
    for layer in case["scene"]["plan"]["layers"]:
        for later in ("nesting", "page_padding", "granularity"):
            del layer[later]
        del layer["geometry"]["head_size_v"]
    return raw


def test_a_seed_of_the_first_schema_is_the_same_seed_in_this_one(seed):
    raw = _as_schema_1(seed)
    before = json.dumps(raw)
    assert seeds.load(before.encode(), where="s.json") == seed
    assert seeds.UPGRADES[1](raw)["schema"] == 2
    assert json.dumps(raw) == before, "an upgrade changed what it was given"


@pytest.mark.parametrize("lacks", ["case", "tensors", "steps", "scene"])
def test_a_seed_of_the_first_schema_that_lacks_a_part_is_refused_in_one_line(seed, lacks):
    raw = _as_schema_1(seed)
    del (raw if lacks == "case" else raw["case"])[lacks]
    assert "not of schema 1" in _refusal(json.dumps(raw).encode())


BINDINGS = {
    "a scale of other axes": (("case", "fields", 2, "extents"), {"token": 16}),
    "a scale that is no fp32": (("case", "fields", 2, "dtype"), "i32"),
    "an unknown layout of the cache": ((*STEP, "scalars", "kv_cache_layout"), "ZIGZAG"),
    "a rank that its layout has not": ((*STEP, "scalars", "kv_cache_layout"), "XPACKED"),
    "values of another size than V": (("case", "fields", 5, "extents", "dim"), 16),
    "a scale of hash bytes": (("case", "buffers", 1, "fill"), {"type": "bytes", "seed": 0}),
    "a scale of zero": (("case", "buffers", 1, "fill", "values"), [0]),
    "a fill that is none of scales": (
        ("case", "fields", 2, "fill"),
        {"type": "bytes", "seed": 0},
    ),
}


@pytest.mark.parametrize("what", BINDINGS)
def test_fields_that_do_not_fit_each_other_are_refused(seed, what):
    raw = json.loads(seeds.dump(seed))
    path, value = BINDINGS[what]
    _set(raw, path, value)
    said = _refusal(json.dumps(raw).encode())
    assert "impossible case" in said or "without written-out integers" in said
