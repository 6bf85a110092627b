"""What the properties that relate two runs share: how the second one ended, and comparing results.

A relation finds what no reference has to know, and names it poorly: one of two runs is wrong. So a
second case is the plainer of the two wherever there is a choice (the layout before it in a table,
ids from 0 on, a row alone): what only the harder case shows is then found where that case is drawn,
by the property that says what is wrong with it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfuzz.model.axes import Domain, axes_of
from kvfuzz.model.case import Program
from kvfuzz.model.held import held
from kvfuzz.model.verdict import Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.memory import Elements
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import Judgement, NotChecked
from kvfuzz.oracles.stored_bytes import first_violation, place_of, unwritten


def excluded(base: Run, case: Program) -> NotChecked | None:
    """Why `case` is not to be run for `base`: it is outside the domain or `--where`."""
    if refusal := outside(base.target.domain, case):
        return NotChecked(f"the case to compare with is outside the domain: {refusal}")
    if refusal := outside(base.where, case):
        return NotChecked(f"the case to compare with is outside --where: {refusal}")
    return None


def outside(domain: Domain, case: Program) -> str | None:
    """Why `case` is outside `domain`, or None. Facts that no rule asks for are not read."""
    axes = {axis.name: axis for axis in axes_of(case.steps[0].op)}
    asked = {
        name
        for name, levels in domain.allowed.items()
        if name in axes and set(levels) != set(axes[name].levels)
    }
    asked.update(name for combination in domain.forbidden for name in combination)
    return domain.refusal({name: axes[name].level_of(case) for name in axes if name in asked})


def ended(run: Run, manner: str) -> Judgement:
    """What there is to say of a run that did not end as the base run did, or None.

    `manner` says what was different, as the start of a sentence.
    """
    if run.refused:
        return NotChecked(f"{manner} the target refuses the case: {run.refused}")
    if run.unsupported:
        return NotChecked(run.unsupported)
    return Violation(f"{manner} the target raises {run.error}") if run.error else None


def same_results(
    base: Run,
    other: Mapping[str, Tensor],
    judged: Mapping[str, Tensor],
    message: str,
    *,
    same_case: bool = True,
) -> Violation | None:
    """The violation of the first byte in which the images `other` differ from the base run's.

    `judged` is a mask of the bytes to compare by buffer. A NaN that a conversion was to make is a
    class, as in `Expectation.canonical`. Where the other case is not the same, numbers may be
    added up in another order, by another launch plan or, in the cpu lane, by the matrix product
    behind NumPy, which goes by how operands lie in memory: those within their bound are equal
    (`Expectation.settled`).
    """
    if all(image.same(base.after[name], other[name]) for name in judged):
        return None
    wrong = {}
    equal = base.expectation.canonical if same_case else base.expectation.settled
    for name, mask in judged.items():
        mine, theirs = (equal(name, each) for each in (base.after[name], other[name]))
        wrong[name] = mask & (mine != theirs)
    return first_violation(base, wrong, judged, message, other)


def sided(base: Run) -> str:
    """The end of a message that says which of two runs is wrong, where the references do."""
    return "" if base.missed else "; here it is right"


def changed_elsewhere(run: Run, may: Sequence[Elements], message: str) -> Violation | None:
    """The violation of the first byte that `run` changed beside the elements `may`."""
    for name in dict.fromkeys(each.field.buffer for each in may):
        changed = run.after[name] != run.before[name]
        for each in may:
            if each.field.buffer == name:
                image.mark(changed, each.at, each.field.dtype, to=False)
        if image.is_any(changed):
            byte = held(run.case, name).address(int(torch.nonzero(changed)[0]))
            place = place_of(run.case, name, byte)
            return Violation(message, place, wrong=int(changed.count_nonzero()))
    return None


def carry(source: Tensor, start: Elements, goal: Elements, target: Tensor) -> None:
    """Copy elements from where `start` has them in `source` to where `goal` has them in `target`.

    `start` and `goal` are the same elements in the same order, in two places.
    """
    image.copy(source, start.at, target, goal.at, goal.field.dtype)


def same_elements(
    base: Run, other: Run, mine: Sequence[Elements], theirs: Sequence[Elements], message: str
) -> Violation | None:
    """The violation of the first result element in which two runs differ.

    `mine` are elements that the base run writes, `theirs` the same ones where the other run does,
    and all that it may change. A byte that it changes beside them is a violation, too, where the
    base run changes none.
    """
    pairs = list(zip(mine, theirs, strict=True))
    if not all(image.same(_codes(base, here), _codes(other, there)) for here, there in pairs):
        images = {each.field.buffer: base.after[each.field.buffer].clone() for each in mine}
        judged = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in images.items()}
        for here, there in pairs:
            name = here.field.buffer
            carry(other.after[there.field.buffer], there, here, images[name])
            image.mark(judged[name], here.at, here.field.dtype)
        # What is not written at all is `complete`'s to find.
        judged = {name: mask & ~unwritten(base, name) for name, mask in judged.items()}
        if found := same_results(base, images, judged, message + sided(base), same_case=False):
            return found
    found = changed_elsewhere(other, theirs, f"{message}: one beside the results")
    if found is None or changed_elsewhere(base, base.writes, ""):
        return None
    return found


def _codes(run: Run, elements: Elements) -> Tensor:
    return image.read(run.after[elements.field.buffer], elements.at, elements.field.dtype)
