"""What a proof says, as text: one line for each plan, and one for all."""

from collections.abc import Sequence

from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.proof import Proof, TensorsFile
from kvfuzz.reports.text import count, paragraph


def proof_lines(name: str, subject: PlanCase | TensorsFile | str, proof: Proof) -> list[str]:
    """What was decided about one subject."""
    if proof.undecided:
        return paragraph(f"not decided  {name}: {proof.undecided}")
    about = "every number of blocks" if proof.every_count else _own_count(subject)
    if not proof.refuted:
        held = ", ".join(each.property for each in proof.claims)
        return paragraph(f"proved       {name}: {held}, for {about} ({proof.seconds:.2f} s)")
    lines = []
    for each in proof.refuted:
        lines += paragraph(f"refuted      {name}: {each.property}: {each.said}")
    return lines


def _own_count(subject: PlanCase | TensorsFile | str) -> str:
    if isinstance(subject, str):
        return "no number of blocks"
    number = subject.plan.num_blocks if isinstance(subject, PlanCase) else subject.num_blocks
    return f"{count(number, 'block')} alone"


def summary_line(proofs: Sequence[Proof], target: str) -> str:
    """How many subjects came out which way; `target` is empty where no plan was asked of it."""
    refuted = sum(bool(each.refuted) for each in proofs)
    undecided = sum(bool(each.undecided) for each in proofs)
    parts = [f"{len(proofs) - refuted - undecided:,} proved"]
    parts += [f"{refuted:,} refuted"] if refuted else []
    parts += [f"{undecided:,} not decided"] if undecided else []
    seconds = sum(each.seconds for each in proofs)
    about = f"{count(len(proofs), 'plan')} on {target}" if target else "tensors of an engine"
    return f"{about}: {', '.join(parts)}, {seconds:.2f} s of proof"
