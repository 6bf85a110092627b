"""What is known: by which failures, and under which levels, a finding shows.

Several bugs in one kernel must not hide each other. A failing case says which properties failed on
which side (key or value); a finding says in addition under which levels it was seen to fail when
one axis of its smallest case was changed at a time. A case that fails in a way, or under levels,
that no finding explains is a new one. What is known is frozen while the next one is hunted.
"""

from collections.abc import Mapping

import msgspec

from kvfuzz.model.axes import Levels
from kvfuzz.model.verdict import Verdict, Violation

CAUSES = ("crash", "no_overflow")
"""What else fails beside one of these is its consequence."""
RELATIONS = (
    "roundtrip",
    "dead_bytes",
    "layout_equivariance",
    "block_permutation",
    "size1_stride",
    "scale_homogeneity",
    "batch_invariance",
    "determinism",
    "no_race",
)
"""Properties that relate runs or accesses: where bytes are wrong, they say nothing more."""


class Symptom(msgspec.Struct, frozen=True, order=True):
    """A property that failed, and the side whose bytes were wrong; empty where there is none."""

    property: str
    side: str


class Known(msgspec.Struct, frozen=True):
    """A finding: its symptom, and the levels under which it shows; an absent axis means all."""

    symptom: Symptom
    extent: dict[str, Levels] = {}

    def explains(self, symptom: Symptom, facts: Mapping[str, str]) -> bool:
        """Whether a case with these facts would fail like this for what is known already."""
        inside = all(facts[axis] in levels for axis, levels in self.extent.items())
        return inside and symptom == self.symptom


def symptoms(verdict: Verdict) -> tuple[Symptom, ...]:
    """How a case failed, causes first; consequences are left out."""
    failed = list(verdict.failed)
    for kinds in (
        [each for each in failed if each.name in CAUSES][:1],
        [each for each in failed if each.name not in RELATIONS],
        failed[:1],
    ):
        if kinds:
            found = [Symptom(each.name, side) for each in kinds for side in _sides(each.violation)]
            return tuple(dict.fromkeys(found))
    return ()


def _sides(violation: Violation | None) -> tuple[str, ...]:
    if violation is None:
        return ("",)
    names = violation.fields or ((violation.place.field,) if violation.place else ())
    return tuple(dict.fromkeys(_side(name) for name in names)) or ("",)


def _side(field: str) -> str:
    """Key or value, by the name of the field whose bytes were wrong."""
    return {"k": "key", "v": "value"}.get(field[:1], "")
