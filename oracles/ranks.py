"""partition: over all ranks of context parallelism, every token of a batch has one owner.

The same batch is mapped on each rank. A token's slot must be padding on all ranks but one, and no
two tokens of a rank may share a slot. Neither needs a formula: an engine whose ranks disagree
loses tokens or keeps them twice, whatever its kernel reads (vLLM 51031: owners by the manager's
block, slots by the kernel's).
"""

import torch
from torch import Tensor

from kvfuzz.model.ops.op_case import OpCase, lower_op
from kvfuzz.model.ops.slots import NO_ROW, SlotScene, at_rank
from kvfuzz.model.verdict import Place, Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import ended
from kvfuzz.oracles.stored_bytes import place_of


def _scene(base: Run) -> SlotScene:
    case = base.case
    if not isinstance(case, OpCase) or not isinstance(case.scene, SlotScene):
        raise TypeError(f"a run of {type(case).__name__}: it maps no slots")
    return case.scene


def _name(rank: int) -> str:
    return f"rank_{rank}"


def rank_variants(base: Run) -> Wanted:
    """The batch on every other rank."""
    scene = _scene(base)
    if scene.cp_size == 1:
        return NotChecked("there is one rank")
    return {
        _name(rank): Variant(lower_op(at_rank(scene, rank)))
        for rank in range(scene.cp_size)
        if rank != scene.cp_rank
    }


def partition(runs: Runs) -> Judgement:
    """Every token of a request that owns blocks has a slot on one rank, and that for itself."""
    base = runs[BASE]
    scene = _scene(base)
    on_rank = []
    for rank in range(scene.cp_size):
        run = base if rank == scene.cp_rank else runs[_name(rank)]
        if found := ended(run, f"on rank {rank}"):
            return found
        on_rank.append(_slots(run))
    slots = torch.stack(on_rank)
    owners = (slots >= 0).sum(0)
    wanted = _has_owner(scene).to(owners.device)
    wrong = torch.nonzero(owners != wanted).flatten()
    if len(wrong):
        token = int(wrong[0])
        who = torch.nonzero(slots[:, token] >= 0).flatten().tolist()
        found_on = f"ranks {', '.join(map(str, who))}" if who else "no rank"
        due = "one rank" if wanted[token] else "none"
        message = f"token {token} of the batch has a slot on {found_on}, and is due on {due}"
        return Violation(message, _place(base, token), wrong=len(wrong), judged=len(wanted))
    for rank, mine in enumerate(slots):
        held = torch.sort(mine[mine >= 0]).values
        twice = torch.nonzero(held[1:] == held[:-1]).flatten()
        if len(twice):
            slot = int(held[twice[0]])
            one, other = torch.nonzero(mine == slot).flatten()[:2].tolist()
            message = (
                f"tokens {one} and {other} of the batch have the same slot {slot} on rank {rank}"
            )
            return Violation(message, _place(base, other), wrong=len(twice), judged=len(held))
    return None


def _slots(run: Run) -> Tensor:
    """What a run made of each token."""
    field = run.case.bound_field(run.case.steps[0], "slot_mapping")
    tokens = torch.arange(_scene(run).num_tokens, device=run.device)
    return image.read(
        run.after[field.buffer], image.positions(run.case, field, token=tokens), field.dtype
    )


def _has_owner(scene: SlotScene) -> Tensor:
    """By token, whether its request owns blocks; int64."""
    counts = torch.tensor([each.length for each in scene.requests])
    owns = torch.tensor([int(each.row != NO_ROW) for each in scene.requests])
    return owns.repeat_interleave(counts)


def _place(run: Run, token: int) -> Place:
    field = run.case.bound_field(run.case.steps[0], "slot_mapping")
    return place_of(run.case, field.buffer, field.byte({"token": token}))
