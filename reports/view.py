"""View models: a finding as plain rows, the same for every format.

Pure functions from verdicts and seeds. A format decides how rows look, never what is said.
"""

from collections.abc import Mapping

import msgspec

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.case import Case
from kvfuzz.model.events import Found
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.seed import Seed
from kvfuzz.model.verdict import PropertyResult, Verdict, Violation
from kvfuzz.model.vocabulary import Levels
from kvfuzz.reports import places
from kvfuzz.reports.cases import case_rows, launch_rows, layout_words
from kvfuzz.reports.ops import op_rows
from kvfuzz.reports.plans import plan_evidence, plan_rows
from kvfuzz.reports.scripts import script_rows
from kvfuzz.reports.text import Pairs
from kvfuzz.reports.words import where_words, words

SOURCED = ("oracle", "complete")
"""Properties whose expected value comes from the element that the op pairs with the place."""
TRACED = ("oracle", "frame")
"""Properties for which a worker looks up whose byte it found."""


class FindingView(msgspec.Struct, frozen=True):
    """A finding in the order in which it is read."""

    title: str
    subject: Pairs
    """Target, property, layer, layout."""
    evidence: Pairs
    """The first wrong byte: where, expected, got, whose."""
    others: Pairs
    """Other properties that failed on the same case."""
    case: Pairs
    launches: Pairs
    record: Pairs
    """The seed's file, and how the verdict compares with what it records."""
    replay: str


def finding_view(found: Found) -> FindingView:
    """The view of an event."""
    return view_of(
        found.seed,
        found.verdict,
        path=found.path,
        replay=found.replay,
        shrunk_from=found.shrunk_from_bytes,
        extent=found.extent,
    )


def view_of(
    seed: Seed,
    verdict: Verdict,
    *,
    path: str,
    replay: str,
    shrunk_from: int = 0,
    extent: Mapping[str, Levels] | None = None,
    recorded: Pairs | None = None,
) -> FindingView:
    """The view of a failed `verdict` on the case of `seed`."""
    failed = sorted(verdict.failed, key=lambda result: result.name != seed.property)
    first, *others = failed
    size = seed.case.nbytes
    about = ("case", f"{size:,} bytes in all buffers")
    if shrunk_from > size:
        about = (
            "smallest",
            f"{size:,} bytes in all buffers; what failed first had {shrunk_from:,}",
        )
    return FindingView(
        title=f"{first.name}: {_message(first)}",
        subject=subject_rows(seed, first),
        evidence=evidence_rows(seed, first),
        others=[(each.name, _message(each) + _extent(each)) for each in others],
        case=[about, *rows_of(seed.case), *extent_rows(extent)],
        launches=launch_rows(verdict.launches),
        record=[("seed", path), *(recorded or [])],
        replay=replay,
    )


def rows_of(case: AnyCase) -> Pairs:
    """A case of any family as a table."""
    if isinstance(case, ScriptCase):
        return script_rows(case)
    if isinstance(case, OpCase):
        return op_rows(case)
    return plan_rows(case) if isinstance(case, PlanCase) else case_rows(case)


def extent_rows(extent: Mapping[str, Levels] | None) -> Pairs:
    """Under which levels near its case a finding shows, where that was tried out."""
    if extent is None:
        return []
    return [("fails where", where_words(extent) or "every axis has any level")]


def _message(result: PropertyResult) -> str:
    return result.violation.message if result.violation else "failed"


def _extent(result: PropertyResult) -> str:
    violation = result.violation
    if violation is None or violation.place is None:
        return ""
    place = violation.place
    of = f", {violation.wrong:,} of {violation.judged:,} bytes" if violation.wrong else ""
    element = f": {places.element(place)} ({places.byte(place)})" if place.field else ""
    return element + of


def subject_rows(seed: Seed, result: PropertyResult) -> Pairs:
    """What the finding is about."""
    rows: Pairs = [
        ("target", f"{seed.target} ({seed.op}), content {seed.provenance.content}"),
        ("lane", f"{seed.provenance.lane}, arch {seed.provenance.arch}"),
        ("must hold", words(result.name, seed.op).meaning),
    ]
    if not isinstance(seed.case, Case):
        return rows
    scene, place = seed.case.scene, result.violation.place if result.violation else None
    layer = place.layer if place and place.layer else scene.layer
    view = f"; {place.field or 'no element'} in buffer {place.buffer}" if place else ""
    rows.append(("layer", f"{layer}, layout {layout_words(scene)}{view}"))
    return rows


def evidence_rows(seed: Seed, result: PropertyResult) -> Pairs:
    """The first wrong byte, and where its value belongs."""
    violation = result.violation
    if violation is None or violation.place is None:
        return []
    case, place, said = seed.case, violation.place, words(result.name)
    if isinstance(case, PlanCase):
        return plan_evidence(result)
    rows: Pairs = [("first wrong", f"{places.element(place)} ({places.byte(place)})")]
    dtype = places.dtype_of(case, place)
    about = _Scene(case, result.name, violation) if isinstance(case, Case) else None
    if about:
        rows += about.meaning
    if violation.expected:
        rows.append((said.expected, places.number(violation.expected, dtype)))
        rows += about.source if about else []
    if violation.got:
        rows.append((said.got, places.number(violation.got, dtype)))
        rows += about.origin(seed.provenance.lane) if about else []
    if violation.wrong:
        rows.append(("wrong", f"{violation.wrong:,} of {violation.judged:,} {said.judged}"))
    return rows


class _Scene:
    """What a scene says about a wrong byte of its case, and about the byte that was found."""

    def __init__(self, case: Case, name: str, violation: Violation) -> None:
        self._case, self._name, self._violation = case, name, violation
        assert violation.place is not None  # noqa: S101  (there is a wrong byte)
        self._place = violation.place

    @property
    def meaning(self) -> Pairs:
        """What the element is to the batch."""
        meaning = places.meaning(self._case, self._place)
        return [("", meaning)] if meaning else []

    @property
    def source(self) -> Pairs:
        """Where the right value comes from."""
        case, source = self._case, places.counterpart(self._case, self._place)
        if self._name not in SOURCED or source is None:
            return []
        rows: Pairs = [("", f"the value of {places.element(source)} ({places.byte(source)})")]
        if places.dtype_of(case, source) != places.dtype_of(case, self._place):
            held = places.number(places.initial(case, source), places.dtype_of(case, source))
            rows.append(("", f"which holds {held}"))
        return rows

    def origin(self, lane: str) -> Pairs:
        """Where the byte that was found comes from."""
        lines = _origin_lines(self._case, lane, self._name, self._violation)
        return [("", line) for line in lines]


def _origin_lines(case: Case, lane: str, name: str, violation: Violation) -> list[str]:
    """Whose byte was found, and how far that is from the right one."""
    if violation.origin is None:
        if name not in TRACED:
            return []
        if violation.traced:
            return ["no byte of any buffer: it was computed, or is what a masked-off load left"]
        return [f"whose byte that is, lane {lane} did not record"]
    place, origin = violation.place, violation.origin
    lines = [f"that is the byte of {places.element(origin)} ({places.byte(origin)})"]
    if place is None or not origin.field:
        return lines
    if name == "oracle" and (source := places.counterpart(case, place)):
        apart = places.distance(case, origin, source)
        if apart == "the right element":
            lines.append("read from the right element: the conversion is wrong")
        else:
            meaning = places.meaning(case, origin)
            lines += [meaning, f"read {apart}"] if meaning else [f"read {apart}"]
    if name == "frame":
        if goal := places.counterpart(case, origin):
            lines.append(f"it belongs in {places.element(goal)} ({places.byte(goal)})")
            lines.append(f"written {places.distance(case, place, goal)}")
        elif meaning := places.meaning(case, origin):
            lines.append(meaning)
    return lines
