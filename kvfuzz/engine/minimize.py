"""Minimise a saved seed: its case reduced, for as long as it fails as the seed says."""

from collections.abc import Callable

import msgspec

from kvfuzz.engine.findings import make_seed
from kvfuzz.engine.known import path_of, side_of
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.reduce import Reduction, key_of, reduced
from kvfuzz.engine.replay import described
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import NotCheckedError
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import Domain
from kvfuzz.model.seed import Seed
from kvfuzz.model.verdict import PropertyResult, Verdict


class Alike(msgspec.Struct, frozen=True):
    """How a case fails: what a smaller one must share with it."""

    property: str
    side: str
    """`key` or `value` where the first wrong byte is of one of them, else empty."""
    with_it: frozenset[str]
    """Everything that failed: nothing else may come before `property` in its place."""

    def shown_by(self, verdict: Verdict) -> bool:
        """Whether a verdict fails the same property on the same side, named as the finding is."""
        for result in verdict.failed:
            if result.name == self.property:
                return not self.side or _side(result) == self.side
            if result.name not in self.with_it:
                return False
        return False


def alike_of(verdict: Verdict, name: str = "") -> Alike | None:
    """What is alike to a failing verdict: of the property `name`, or of the first that failed.

    None where that did not fail.
    """
    for result in verdict.failed:
        if name in ("", result.name):
            failed = frozenset(each.name for each in verdict.failed)
            return Alike(result.name, _side(result), failed)
    return None


def _side(result: PropertyResult) -> str:
    place = result.violation.place if result.violation else None
    return side_of(place.field) if place else ""


class Minimized(msgspec.Struct, frozen=True):
    """A seed, and the seed of its reduced case; the same one where nothing could go."""

    before: Seed
    after: Seed
    reduction: Reduction

    @property
    def is_smaller(self) -> bool:
        """Whether the case became another one."""
        return self.after.case != self.before.case


def minimize(
    seed: Seed, config: WorkerConfig, *, budget_s: float, case_timeout_s: float = 60.0
) -> Minimized:
    """Reduce the case of `seed` on the target of `config`, for `budget_s` seconds about.

    The new seed is about the same property, and about the target that it was reduced on. Raises
    NotCheckedError where the seed's property does not fail, and UsageError for a target of another
    op.
    """
    with Worker(config, case_timeout_s=case_timeout_s) as worker:
        description = described(worker, config, seed)
        verdict = worker.check(seed.case)
        if alike_of(verdict, seed.property) is None:
            raise NotCheckedError(_why_not(seed, verdict, description.info.name))
        reduction, verdict = minimum(
            seed.case,
            verdict,
            worker.check,
            name=seed.property,
            domain=description.info.domain,
            budget_s=budget_s,
        )
        if reduction.case == seed.case:
            return Minimized(seed, seed, reduction)
        after = make_seed(reduction.case, seed.property, verdict, description)
    came_from = "; ".join(filter(None, (seed.provenance.note, f"minimised from {seed.id}")))
    provenance = msgspec.structs.replace(after.provenance, note=came_from)
    after = msgspec.structs.replace(after, provenance=provenance)
    return Minimized(seed, after, reduction)


def minimum(
    case: AnyCase,
    verdict: Verdict,
    check: Callable[[AnyCase], Verdict],
    *,
    name: str = "",
    domain: Domain,
    budget_s: float,
) -> tuple[Reduction, Verdict]:
    """Reduce the finding that `verdict` on `case` is, of the property `name` or the first failed.

    It keeps to its path: a kernel may be broken on its plain path as well, by another bug.
    Returns the verdict on the reduced case with it. Raises ValueError where the property did not
    fail.
    """
    alike = alike_of(verdict, name)
    if alike is None:
        raise ValueError(f"{name or 'no property'} failed, of {verdict.results}")
    path = path_of(case)
    verdicts = {key_of(case): verdict}

    def still_fails(smaller: AnyCase) -> bool:
        seen = check(smaller)
        verdicts[key_of(smaller)] = seen
        return alike.shown_by(seen) and path_of(smaller) == path

    reduction = reduced(case, still_fails, domain=domain, budget_s=budget_s)
    return reduction, verdicts[key_of(reduction.case)]


def _why_not(seed: Seed, verdict: Verdict, target: str) -> str:
    """Why there is nothing to minimise, in one line."""
    if verdict.refused:
        return f"the target refused the case: {verdict.refused}"
    for result in verdict.results:
        if result.name == seed.property and result.outcome == "not_checked":
            return f"{seed.property} was not checked: {result.reason}"
    failed = ", ".join(result.name for result in verdict.failed)
    other = f", and {failed} fails in its place: kvfuzz replay shows it" if failed else ""
    return f"{seed.property} holds for {target}{other}; there is nothing to minimise"
