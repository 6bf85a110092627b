import json

import msgspec
import pytest

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


def test_each_schema_version_has_an_upgrade_to_the_next():
    assert sorted(seeds.UPGRADES) == list(range(1, seeds.SCHEMA))
