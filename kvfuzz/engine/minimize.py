"""Minimise a saved seed: its case reduced, for as long as it fails as the seed says."""

import msgspec

from kvfuzz.engine.findings import make_seed
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.reduce import Reduction, minimum, symptom_of
from kvfuzz.engine.replay import described
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import NotCheckedError
from kvfuzz.model.seed import Seed
from kvfuzz.model.verdict import Verdict


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
        symptom = symptom_of(verdict, seed.property)
        if symptom is None:
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
        after = make_seed(reduction.case, verdict, description)
    came_from = "; ".join(filter(None, (seed.provenance.note, f"minimised from {seed.id}")))
    provenance = msgspec.structs.replace(after.provenance, note=came_from)
    after = msgspec.structs.replace(after, property=seed.property, provenance=provenance)
    return Minimized(seed, after, reduction)


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
