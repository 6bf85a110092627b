"""Hand-made findings, one for each way of going wrong."""

from collections.abc import Callable

import pytest

from kvfuzz.model.axes import Domain
from kvfuzz.model.events import Found, Started, Summary
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import Scene
from kvfuzz.model.seed import Expected, Provenance, Seed
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.verdict import Hazard, Launch, Place, PropertyResult, Verdict, Violation

LAUNCH = Launch("gather_cache_kernel", (8, 2, 1), {"HEAD_SIZE": "32"}, {"num_warps": "4"})


def seed_of(scene: Scene, name: str = "oracle", *, lane: str = "cpu") -> Seed:
    provenance = Provenance("0.1.0", "3.6.0", "2.9.0", lane, "gfx942", "0123456789abcdef")
    return Seed("builtin:x", scene.op, name, lower(scene), Expected("failed", "d"), provenance)


@pytest.fixture
def found() -> Callable[..., Found]:
    def make(
        scene: Scene, name: str, violation: Violation, *more: PropertyResult, lane: str = "cpu"
    ) -> Found:
        results = (
            PropertyResult("crash", "passed"),
            PropertyResult(name, "failed", violation=violation),
            *more,
        )
        verdict = Verdict(results, digest="d", launches=(LAUNCH,))
        seed = seed_of(scene, name, lane=lane)
        return Found(seed, verdict, "out/seeds/1.json", "kvfuzz replay out/seeds/1.json", 1 << 20)

    return make


@pytest.fixture
def wrong_row(gather_scene: Scene, found: Callable[..., Found]) -> Found:
    """Row 3 of the output holds V of another block instead of K of block 1."""
    case = lower(gather_scene)
    coordinate = {"token": 3, "head": 1, "dim": 0}
    origin = {"block": 0, "head": 1, "token": 2, "dim": 0}
    out, v = case.field("key_out"), case.field("v")
    violation = Violation(
        "a byte that the op must write holds the wrong value",
        Place("key_out", out.byte(coordinate), "key_out", "", coordinate),
        "0x3f80",
        "0xc000",
        31,
        576,
        Place("kv_cache", v.byte(origin), "v", "layer.0", origin),
    )
    also = PropertyResult("roundtrip", "failed", violation=Violation("key row 3 came back wrong"))
    return found(gather_scene, "oracle", violation, also)


@pytest.fixture
def started() -> Started:
    info = TargetInfo(
        "builtin:x", "gather_cache", Domain({"order": ("nhd", "hnd")}), Quantise(), "", "01234567"
    )
    return Started(info, "kvfuzz run x", "cpu", "gfx942", 5, 60.0, {}, "0.1.0", "3.6.0", "2.9.0")


@pytest.fixture
def summary() -> Summary:
    return Summary(
        cases=40,
        refused=0,
        undecided=0,
        rejected=3,
        findings=0,
        elapsed_s=12.0,
        ended_by="budget",
        facts={"order": {"nhd": 40, "hnd": 0, "shuffle": 0}},
        not_checked={"roundtrip": {"no token is stored": 10}, "bounds": {"no record": 40}},
        passed={"crash": 40, "oracle": 40, "roundtrip": 30},
        failed={},
        hazards=((Hazard("stray_read", "k, program 0, reads 4 bytes"), 7),),
    )
