"""Prove plans on one target: each proved, refuted by a case that replay confirms, or undecided."""

from collections.abc import Iterable, Iterator

import msgspec

from kvfuzz.engine.findings import make_seed
from kvfuzz.engine.minimize import minimum
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import Description
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.proof import Proof, TensorsFile
from kvfuzz.model.seed import Seed
from kvfuzz.model.verdict import Verdict
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

REDUCE_S = 5.0
"""Seconds for making a counterexample small."""


class Subject(msgspec.Struct, frozen=True):
    """What is to be proved: a plan, or views that an engine printed."""

    name: str
    case: PlanCase | TensorsFile | str
    """Why there is no plan, where that is a text."""


class Proved(msgspec.Struct, frozen=True):
    """What came of one subject; a refuted plan has a seed and the verdict on its case."""

    subject: Subject
    proof: Proof
    seed: Seed | None = None
    verdict: Verdict | None = None


def drawn_plans(domain: Domain, count: int, *, random_seed: int = 0) -> Iterator[Subject]:
    """`count` plans of a view builder's domain, for every combination of levels alike."""
    within = space("cache_views", domain)
    for number in range(count):
        case = drawn_case(Drawn(random_seed * 1_000_003 + number), within)
        if isinstance(case, PlanCase):
            yield Subject(f"drawn plan {number}", case)


def proved(
    worker: Worker,
    description: Description,
    subjects: Iterable[Subject],
    *,
    every_count: bool = True,
) -> Iterator[Proved]:
    """Prove one subject after the other.

    A counterexample that does not fail when its bytes are counted decides nothing: the builder does
    something else at that number of blocks than where it was asked, or kvfuzz is wrong.
    """
    domain = description.info.domain
    for subject in subjects:
        if isinstance(subject.case, str):
            yield Proved(subject, Proof(undecided=subject.case))
            continue
        if isinstance(subject.case, TensorsFile):
            yield Proved(subject, worker.prove_tensors(subject.case))
            continue
        refusal = domain.refusal(facts(subject.case))
        if refusal is not None:
            said = f"outside the domain of {description.info.name}: {refusal}"
            yield Proved(subject, Proof(undecided=said))
            continue
        proof = worker.prove(subject.case, every_count=every_count)
        if proof.counterexample is None:
            yield Proved(subject, proof)
            continue
        verdict = worker.check(proof.counterexample)
        name = proof.refuted[0].property
        if name not in [each.name for each in verdict.failed]:
            said = (
                f"{name} is refuted ({proof.refuted[0].said}), and counting the bytes of that case "
                f"finds {', '.join(each.name for each in verdict.failed) or 'nothing'}: the views "
                "are another function of the block count there, or kvfuzz is wrong"
            )
            yield Proved(subject, Proof(undecided=said))
            continue
        smaller, verdict = minimum(
            proof.counterexample,
            verdict,
            worker.check,
            name=name,
            domain=domain,
            budget_s=REDUCE_S,
        )
        yield Proved(subject, proof, make_seed(smaller.case, name, verdict, description), verdict)
