"""Seeds of real findings: red on the releases that have the bug, clean on those that fixed it.

A release that is red on a seed's property leaves the very bytes that were recorded.
"""

import hashlib
import json
from pathlib import Path

import pytest
from nights import by_night, first_by_day

from kvfuzz.engine.replay import replay
from kvfuzz.engine.store import read_seed
from kvfuzz.errors import Exit
from kvfuzz.model.lower import lower
from kvfuzz.model.seed import SCHEMA

SEEDS = Path(__file__).with_name("seeds")

# seed: (releases of the source tree that are red, releases that are clean)
VLLM = {
    "05d50c198f4fa890": (["0.18.0"], ["0.19.0", "0.24.0", "0.33.0"]),  # #37228
    "8c5a7e82d7c3e268": (["0.18.0", "0.19.0"], ["0.24.0", "0.33.0"]),  # #39122
    "dd907dbf615592bc": (["0.18.0", "0.19.0", "0.24.0"], ["0.33.0"]),  # #37228, SHUFFLE
    "db03de7d84c1d152": (["0.24.0"], ["0.33.0"]),  # #43660, SHUFFLE
    "4dc5129b42713f9a": (["0.19.0", "0.24.0"], ["0.33.0"]),  # SHUFFLE gather ignores scales
    "40c5da047f7fb65a": (["0.18.0", "0.19.0"], ["0.24.0", "0.33.0"]),  # #39192
    "ca494833be38e264": (["0.19.0", "0.24.0"], ["0.33.0"]),  # SHUFFLE writer ignores scales
    "a5ee2b2bb175a0b4": (["0.18.0", "0.19.0"], ["0.24.0", "0.33.0"]),  # #37940
}
# The same of views, whose seeds are of schema 3.
VIEWS = {
    "4f59e669f8eb560c": (["0.24.0"], ["0.25.0"]),  # #47685, V2
    "392796722a591cac": (["0.24.0"], ["0.25.0"]),  # #47035, V1
    "7da8afa6f16eb767": (["0.24.0", "0.25.0"], []),  # #47314, fixed in 0.26.0
    "bed432d83ec41ea1": (["0.24.0", "0.25.0"], []),  # packed Mamba layers, to 0.28.0
    "32acc38b7fe28360": (["0.24.0"], ["0.25.0"]),  # #43945, both layers blocks-first
}
# Of other ops, whose seeds are of schema 4.
OPS = {
    "b9b7bba082a02584": (["0.24.0"], ["0.29.0"]),  # #51031, V1
    "b646452117d33011": (["0.24.0"], ["0.29.0"]),  # #51031, V2
    "5567e5c4b8f63096": (["0.23.0"], ["0.24.0", "0.33.0"]),  # #45361
    "e2823ead5fc07cc9": (["0.23.0"], ["0.24.0", "0.33.0"]),  # the indexer's gather past 2**31
    "52f3184b9a7e8b6c": (["0.29.0"], ["0.30.0", "0.33.0"]),  # #55887
    "9ff20a1d19c160e5": (["0.30.0", "0.32.0"], ["0.33.0"]),  # the same path, SHUFFLE's scales
    "589589d990beb04b": (["0.23.0"], ["0.24.0", "0.33.0"]),  # #45111
    "7e8bba91a54c3826": (["0.24.0"], ["0.25.0"]),  # MLA's decode past 2**31
    "3c20b1dcf7e885c7": (["0.18.0"], ["0.19.0"]),  # MLA's values by V's scale
    "65a2e75871d20bac": (["0.24.0"], ["0.25.0"]),  # #47305
    "c0410d4361bca0f9": (["0.24.0"], ["0.33.0"]),  # low scores in half precision
    "ba4d4d5b250198af": (["0.30.0", "0.32.0"], ["0.33.0"]),  # the same in diffkv
    "566d527934ef383e": (["0.33.0"], []),  # #47305 by descriptors
    "795490f16f15ac44": (["0.24.0"], ["0.33.0"]),  # #39148
    "6a1198f81876443c": (["0.24.0"], []),  # #42642; from 0.26.0 on such strides are refused
}
CONCH = (
    "d6a4ec4a1f6b4865",  # conch 1.3: head stride never used
    "687df16eebbd7389",
)
CONCH_OPS = (
    "83c6b0d1b328b9ca",  # its decode multiplies block ids in 32 bits
    "be62eb6786412fc7",  # its varlen attention takes a context for none
)


def _by_day(seed, releases, by_day):
    """Each release with a seed; those that are not nearest to the fix wait for the night."""
    for release in releases:
        yield (seed, release) if release == by_day else by_night(seed, release)


RED, CLEAN = [], []
for _seed, (_red, _clean) in (VLLM | VIEWS | OPS).items():
    RED += _by_day(_seed, _red, _red[-1])
    CLEAN += _by_day(_seed, _clean, _clean[0] if _clean else "")


def _outcome(replayed) -> str:
    results = {result.name: result.outcome for result in replayed.verdict.results}
    return results[replayed.seed.property]


@pytest.mark.thirdparty
@pytest.mark.parametrize(("seed_id", "release"), RED)
def test_a_release_with_the_bug_is_red_with_the_recorded_bytes(vllm, seed_id, release):
    replayed = replay(read_seed(SEEDS / f"{seed_id}.json"), sources=vllm(release))
    assert replayed.exit_code == Exit.FINDING
    assert _outcome(replayed) == "failed"
    assert replayed.same_bytes


@pytest.mark.thirdparty
@pytest.mark.parametrize(("seed_id", "release"), CLEAN)
def test_a_release_without_the_bug_is_clean(vllm, seed_id, release):
    replayed = replay(read_seed(SEEDS / f"{seed_id}.json"), sources=vllm(release))
    assert _outcome(replayed) == "passed"
    # What dead bytes change they do not change in the case as it is.
    assert replayed.same_bytes == (replayed.seed.property == "dead_bytes")


@pytest.mark.thirdparty
@pytest.mark.parametrize("seed_id", [*CONCH, *CONCH_OPS])
def test_conch_is_red_with_the_recorded_bytes(seed_id):
    replayed = replay(read_seed(SEEDS / f"{seed_id}.json"))
    assert replayed.exit_code == Exit.FINDING
    assert replayed.same_bytes


@pytest.mark.parametrize("seed_id", first_by_day([*VLLM, *OPS, *VIEWS, *CONCH, *CONCH_OPS], 12))
def test_our_own_target_is_clean_on_every_seed(seed_id):
    seed = read_seed(SEEDS / f"{seed_id}.json")
    assert replay(seed, target=f"builtin:{seed.op}").exit_code == Exit.CLEAN


def _id_in_its_file(raw):
    """The id by the words of the file, in whatever schema: what `Seed.id` hashes, as written."""
    about = [raw[key] for key in ("target", "op", "property", "case")]
    return hashlib.sha256(json.dumps(about, separators=(",", ":")).encode()).hexdigest()[:16]


def test_every_seed_is_small_named_by_its_id_and_expected_somewhere():
    found = {path.stem: path for path in SEEDS.glob("*.json")}
    assert found.keys() == {*VLLM, *VIEWS, *OPS, *CONCH, *CONCH_OPS}
    for name, path in found.items():
        assert _id_in_its_file(json.loads(path.read_text())) == name
        assert path.stat().st_size < 6400
        assert read_seed(path).provenance.note


@pytest.mark.parametrize("seed_id", [*VLLM, *CONCH])
def test_seeds_of_the_first_schema_stay_as_they_are_and_mean_what_their_scene_means(seed_id):
    """They are the frozen set: a change of schema upgrades them, and never edits a file."""
    path = SEEDS / f"{seed_id}.json"
    assert json.loads(path.read_text())["schema"] == 1
    seed = read_seed(path)
    assert seed.schema == SCHEMA
    assert lower(seed.case.scene) == seed.case
