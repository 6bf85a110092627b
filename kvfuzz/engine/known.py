"""What is known: by which failures, under which levels and with which mark a finding shows.

Several bugs in one kernel must not hide each other, and one bug is to be reported once. A failing
case has *symptoms*: the properties that failed, each on a side, key or value. A finding *explains*
a case that has its symptoms under levels under which it was seen to fail; what nothing explains is
hunted and shrunk. Then the *mark* of its smallest case decides: the path of the kernel, and what
was found in place of the right element. A mark that is known already is the same bug, which shows
under more levels than was known. What is known is frozen while the next failure is hunted.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.case import Case
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.ops.table import family_of
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.round_trip import touched
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.verdict import CAUSES, RELATIONS, Place, PropertyResult, Verdict, Violation
from kvfuzz.model.vocabulary import Levels, code_path


class Symptom(msgspec.Struct, frozen=True, order=True):
    """A property that failed, and on which side.

    The side is that of the wrong bytes, key or value, or empty; of a crash it is how it ended.
    """

    property: str
    side: str
    elsewhere: bool = False
    """Whether the case that was compared with is the wrong one."""


STRAY, STRAYS = "stray", ("bounds", "frame")
"""A write that goes too far leaves its buffer, or, where that has more rows, hits those."""


class Mark(msgspec.Struct, frozen=True):
    """What makes two smallest cases the same finding."""

    property: str
    """The property that failed, or STRAY."""
    sides: tuple[str, ...]
    path: str
    """A kernel has one path for strided pages and one for each packed order."""
    converts: bool
    instead: tuple[str, ...]
    """In what the element that was found differs from the right one; empty where that is unknown
    or nobody's, `value` where it is the right one with a wrong value."""


class Known(msgspec.Struct, frozen=True):
    """A finding: all symptoms of its smallest cases, their mark, and by case where it shows."""

    mark: Mark
    symptoms: frozenset[Symptom]
    extents: tuple[dict[str, Levels], ...]
    """The levels of each axis; an absent axis has any."""

    def explains(self, symptom: Symptom, facts: Mapping[str, str]) -> bool:
        """Whether a case with these facts may fail like this for what is known already.

        Where the case that was compared with is the wrong one, so does a finding of wrong bytes on
        that side: by references alone that case is a failure of its own, and found where it is
        drawn.
        """
        if symptom.elsewhere:
            sides = ("", symptom.side)
            if any(s.property not in RELATIONS and s.side in sides for s in self.symptoms):
                return True
        return symptom in self.symptoms and any(
            all(facts[axis] in levels for axis, levels in extent.items()) for extent in self.extents
        )

    def wider(self, symptoms: Iterable[Symptom], extent: dict[str, Levels]) -> "Known":
        """This finding, seen in one more smallest case."""
        return Known(self.mark, self.symptoms.union(symptoms), (*self.extents, extent))


def mark_of(case: AnyCase, symptom: Symptom, verdict: Verdict) -> Mark:
    """The mark of a smallest case that failed with `symptom`; `verdict` is an explained one."""
    violation = next(each.violation for each in verdict.failed if each.name == symptom.property)
    sides = [each.side for each in symptoms(verdict) if each.property == symptom.property]
    name = symptom.property
    if name in STRAYS and violation is not None and violation.place is not None:
        # Outside of a buffer is no field.
        name, sides = STRAY, [side_of(violation.place.field or violation.place.buffer)]
    return Mark(
        name,
        tuple(sides),
        *path_of(case),
        _instead(case, violation) if violation and isinstance(case, Case) else (),
    )


def path_of(case: AnyCase) -> tuple[str, bool]:
    """The path of a kernel that a case takes, and whether elements are converted on it.

    A view builder has a path for each way to place layers.
    """
    if isinstance(case, ScriptCase):
        return "script", False
    if isinstance(case, PlanCase):
        return case.plan.placed, False
    if isinstance(case, OpCase):
        return family_of(case.scene).path(case.scene), False
    layer = case.scene.attention
    return code_path(layer.order), DTYPES[layer.cache_dtype].is_quantised


def _instead(case: Case, violation: Violation) -> tuple[str, ...]:
    place, origin = violation.place, violation.origin
    if place is None or origin is None or not (place.field and origin.field):
        return ()
    different = [axis for axis in ("head", "dim") if _differs(place, origin, axis)]
    if side_of(place.field) != side_of(origin.field):
        different.append("side")
    if _slot(case, place) != _slot(case, origin):
        different.append("token")
    return tuple(different) or ("value",)


def _differs(place: Place, origin: Place, axis: str) -> bool:
    return place.coordinate.get(axis) != origin.coordinate.get(axis)


def _slot(case: Case, place: Place) -> int | None:
    """The slot of a token in the cache, or the one that a row of an activation is paired with."""
    token = place.coordinate.get("token", 0)
    if "block" in place.coordinate:
        return place.coordinate["block"] * case.geometry.block_size + token
    step = case.steps[0]
    slots = (
        case.integers(step, "slot_mapping")
        if "slot_mapping" in step.tensors
        else touched(case, step)
    )
    return slots[token] if token < len(slots) else None


def symptoms(verdict: Verdict) -> tuple[Symptom, ...]:
    """How a case failed, causes first; consequences are left out."""
    failed = list(verdict.failed)
    for kinds in (
        [each for each in failed if each.name in CAUSES][:1],
        [each for each in failed if each.name not in RELATIONS],
        failed[:1],
    ):
        if kinds:
            found = [
                Symptom(each.name, side, bool(each.violation and each.violation.elsewhere))
                for each in kinds
                for side in _sides(each)
            ]
            return tuple(dict.fromkeys(found))
    return ()


def _sides(result: PropertyResult) -> tuple[str, ...]:
    violation = result.violation
    if violation is None:
        return ("",)
    if result.name == "crash":  # sizes and ids in a message differ from case to case
        return (re.sub(r"\d+", "#", violation.message)[:80],)
    names = violation.fields or ((violation.place.field,) if violation.place else ())
    return tuple(dict.fromkeys(side_of(name) for name in names)) or ("",)


def side_of(field: str) -> str:
    """Key or value, by the name of the field whose bytes were wrong."""
    return {"k": "key", "v": "value"}.get(field[:1], "")
