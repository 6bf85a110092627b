"""Judge a case: run its distinct variants once each, ask every property, explain what failed."""

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from kvfuzz.engine.worker.execute import execute
from kvfuzz.engine.worker.lanes import Lane, Manner, Seen
from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.case import Case, Program
from kvfuzz.model.held import held
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.target import Quantise
from kvfuzz.model.verdict import (
    PROPERTY_NAMES,
    WAITING,
    Place,
    PropertyResult,
    Verdict,
    Violation,
)
from kvfuzz.model.vocabulary import Levels
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, NotChecked, Property, Variant
from kvfuzz.oracles.stored_bytes import place_of
from kvfuzz.oracles.table import PROPERTIES, TURNS, by_turn

SLOWEST = 3
"""How many times as long as the longest run so far one more may take: some go by program."""


class Patience:
    """How long the variants of a case may take: a slow target is not to pass for one that hangs.

    What is waited for is the base run; that one may end late.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest = 0.0
        self._seconds = seconds

    def spent(self) -> str:
        """Why another run might not come to its end in time, or nothing."""
        if time.monotonic() + SLOWEST * self._longest <= self._end:
            return ""
        return (
            f"a run takes {self._longest:.1f} s, too long for one more within {self._seconds:g} s "
            "(--case-timeout)"
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around one run: how long it takes counts, if it comes to its end."""
        started = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - started)


class Judge:
    """One target with its partner on one lane; `where` is what its domain is narrowed to."""

    def __init__(
        self,
        target: Adapter,
        partner: Adapter | None,
        lane: Lane,
        where: Mapping[str, Levels] | None = None,
    ) -> None:
        self.target = target
        self._adapters: dict[str, Adapter] = {"target": target}
        if partner is not None:
            self._adapters["partner"] = partner
        self._partner = partner
        self.lane = lane
        self._patience = Patience(math.inf)
        self._where = Domain(allowed=dict(where or {}), source="--where")
        # Of a gather its partner converts what is stored; any other op says how it does itself.
        writer = partner if target.info.op == "gather_cache" else target
        self._quantise = writer.info.quantise if writer else Quantise()

    def verdict(
        self,
        case: Case | OpCase,
        *,
        in_turn: bool = False,
        explain: bool = False,
        patience_s: float = math.inf,
    ) -> Verdict:
        """The outcome of every property on `case`; of those that take turns, with `in_turn`, only
        of a few if none fails. `explain` adds whose byte was found, and the digest of a case that
        passes. What `patience_s` seconds leave no time for is not checked."""
        self._patience = Patience(patience_s)
        try:
            base, seen = self._run(Variant(case))
        except NotCheckedError as error:
            return self._undecided(str(error))
        if base.refused:
            return Verdict((), refused=base.refused)
        if base.unsupported:
            return self._undecided(base.unsupported)
        runs = {BASE: base}
        results = self._attributed(self._results(case, runs, in_turn))
        hazards = (
            [] if base.error else [found for each in self._asked for found in each.hazards(runs)]
        )
        if explain and any(map(_traceable, results)) and not self._patience.spent():
            results = self._with_origins(results, case, base)
        return Verdict(
            tuple(results),
            digest=_digest(base) if explain or any(map(_failed, results)) else "",
            launches=base.launches,
            hazards=tuple(hazards),
            exercised=seen.exercised(),
        )

    def _with_origins(
        self, results: list[PropertyResult], case: Case | OpCase, base: Run
    ) -> list[PropertyResult]:
        """The results with whose byte was found, where a run with origins comes to its end."""
        try:
            traced, seen = self._run(Variant(case), base=base, origins=True)
        except NotCheckedError:
            return results
        if traced.error != base.error or traced.unsupported:
            return results
        return [_explained(result, case, seen) for result in results]

    @property
    def _asked(self) -> list[Property]:
        """The properties that are about the target's op."""
        return [each for each in PROPERTIES if each.is_about(self.target.info.op)]

    def _undecided(self, why: str) -> Verdict:
        reason = f"lane {self.lane.name}: {why}"
        return Verdict(
            tuple(PropertyResult(each.name, "not_checked", reason) for each in self._asked)
        )

    def _run(
        self, variant: Variant, *, base: Run | None = None, origins: bool = False
    ) -> tuple[Run, Seen]:
        unchanged = _unchanged_buffers(base, variant.case) if base else {}
        with self._patience.timed():
            return execute(
                variant.case,
                self._adapters,
                self.lane,
                self._quantise,
                filled_before={**unchanged, **variant.images},
                manner=Manner(
                    variant.poison, variant.readers, variant.order, origins, far=base is None
                ),
                where=self._where,
            )

    def _results(
        self, case: Case | OpCase, runs: dict[str, Run], in_turn: bool
    ) -> list[PropertyResult]:
        """What there is to say of each property, in the order of the table; they are asked in it,
        too, but for turns, so that what there is patience for does not depend on whose turn it is.
        """
        found = {
            each.name: self._result(each, case, runs)
            for each in self._asked
            if not each.takes_turns
        }
        decided = 0
        turns = [each for each in self._asked if each.takes_turns]
        for each in by_turn(case) if in_turn else turns:
            if in_turn and decided == TURNS and not any(map(_failed, found.values())):
                found[each.name] = PropertyResult(each.name, "not_checked", WAITING)
            else:
                found[each.name] = self._result(each, case, runs)
                decided += found[each.name].outcome != "not_checked"
        return [found[name] for name in PROPERTY_NAMES if name in found]

    def _result(self, each: Property, case: Case | OpCase, runs: dict[str, Run]) -> PropertyResult:
        base = runs[BASE]
        if each.name != "crash" and base.error:
            return PropertyResult(each.name, "not_checked", "the target raised")
        if each.name == "roundtrip" and (reason := self._no_round_trip(case)):
            return PropertyResult(each.name, "not_checked", reason)
        wanted = each.variants(base)
        if isinstance(wanted, NotChecked):
            return PropertyResult(each.name, "not_checked", wanted.reason)
        for name, variant in wanted.items():
            if name not in runs:
                if reason := self._patience.spent():
                    return PropertyResult(each.name, "not_checked", reason)
                try:
                    runs[name], _ = self._run(variant, base=base)
                except NotCheckedError as error:
                    return PropertyResult(each.name, "not_checked", str(error))
            if runs[name].unsupported and not base.unsupported:
                return PropertyResult(each.name, "not_checked", runs[name].unsupported)
        found = each.judge(runs)
        if isinstance(found, NotChecked):
            return PropertyResult(each.name, "not_checked", found.reason)
        if isinstance(found, Violation):
            elsewhere = each.name != "roundtrip" and any(
                runs[name].missed
                for name in wanted
                if runs[name].case is not base.case and not runs[name].error
            )
            found = msgspec.structs.replace(found, elsewhere=elsewhere)
            return PropertyResult(each.name, "failed", violation=found)
        return PropertyResult(each.name, "passed")

    def _attributed(self, results: list[PropertyResult]) -> list[PropertyResult]:
        """Name the other half of a failed round trip, and say where the fault lies."""
        failed = [result for result in results if result.outcome == "failed"]
        if self._partner is None or not any(each.name == "roundtrip" for each in failed):
            return results
        note = f"the other half is {self._partner.info.name}"
        if len(failed) == 1:
            note += ", and it is at fault: alone, the target passes every other property"
        return [_noted(each, note) if each.name == "roundtrip" else each for each in results]

    def _no_round_trip(self, case: Case | OpCase) -> str:
        if self._partner is None:
            return "the target has no partner that executes the inverse op"
        shown = facts(case)
        # The partner sees the same cache and other activations, so only cache axes count.
        relevant = {axis: shown[axis] for axis in shown if axis not in ("rows", "padding")}
        refusal = self._partner.info.domain.refusal(relevant)
        return f"outside the domain of {self._partner.info.name}: {refusal}" if refusal else ""


def _failed(result: PropertyResult) -> bool:
    return result.outcome == "failed"


def _traceable(result: PropertyResult) -> bool:
    """Whether a failure is about a byte that came from somewhere."""
    found = result.violation
    return found is not None and found.place is not None and result.name in ("oracle", "frame")


def _explained(result: PropertyResult, case: Program, seen: Seen) -> PropertyResult:
    violation = result.violation
    if violation is None or violation.place is None or not _traceable(result):
        return result
    origin = _origin(case, seen, violation.place.buffer, violation.place.byte)
    traced = seen.origin_of is not None
    explained = msgspec.structs.replace(violation, origin=origin, traced=traced)
    return msgspec.structs.replace(result, violation=explained)


def _noted(result: PropertyResult, note: str) -> PropertyResult:
    violation = result.violation
    if violation is None:
        return result
    said = msgspec.structs.replace(violation, message=f"{violation.message}; {note}")
    return msgspec.structs.replace(result, violation=said)


def _unchanged_buffers(base: Run, case: Program) -> dict[str, Tensor]:
    """The images of `base` for buffers that `case` declares in the same words."""
    same = set(base.case.buffers).intersection(case.buffers)
    names = [buffer.name for buffer in same]
    return {name: base.before[name] for name in names if held(base.case, name) == held(case, name)}


def _origin(case: Program, seen: Seen, buffer: str, byte: int) -> Place | None:
    origin = None if seen.origin_of is None else seen.origin_of(buffer, byte)
    return None if origin is None else place_of(case, *origin)


def _digest(run: Run) -> str:
    return digest_of(
        {name: run.expectation.classed(name, after) for name, after in run.after.items()}
    )


def digest_of(images: Mapping[str, Tensor]) -> str:
    """The first 16 hex digits of the SHA-256 of all images, by name."""
    digest = hashlib.sha256()
    for name in sorted(images):
        digest.update(name.encode() + b"\0")
        digest.update(images[name].to(torch.device("cpu")).numpy().data)
    return digest.hexdigest()[:16]
