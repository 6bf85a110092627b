"""The block manager of a script: which blocks each sequence holds, and what an action does to them.

Blocks are handed out from a last-in-first-out list, so that freed ones come again at once, with
what is in them. A block id belongs to one group at a time. Pure bookkeeping: effects say which
tokens and blocks are touched, and `kvfuzz.model.script_lowering` makes steps of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.script import Action

Pair = tuple[int, int]


class Run(NamedTuple):
    """Tokens `start` to `start + length` of a sequence that holds `blocks` in a group."""

    blocks: tuple[int, ...]
    start: int
    length: int


class Effect(NamedTuple):
    """What happens to the blocks of one group: runs of tokens, or blocks, by `kind`."""

    kind: Literal["write", "read", "copy", "swap_out", "swap_in", "zero"]
    group: int
    runs: tuple[Run, ...] = ()
    pairs: tuple[Pair, ...] = ()
    """(from, to) of blocks that are copied; the target of a swap counts in the other pool."""
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class Held:
    """What a sequence holds: by attention group its blocks in order, by state group one block."""

    blocks: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    length: int = 0
    is_swapped: bool = False
    host: dict[int, list[int]] = field(default_factory=dict)


class BlockManager:
    """The blocks of a plan, and of the host, and who holds them."""

    def __init__(self, plan: CachePlan, host_blocks: int) -> None:
        self.plan = plan
        self.sizes = {
            number: plan.layer(group[0]).block_size
            for number, group in enumerate(plan.groups)
            if plan.layer(group[0]).is_attention
        }
        """Tokens of a block, by attention group."""
        self._state_groups = [n for n in range(len(plan.groups)) if n not in self.sizes]
        self.free = list(range(plan.num_blocks))[::-1]
        self._host_free = list(range(host_blocks))[::-1]
        self._references: dict[int, int] = {}
        self.held: dict[str, Held] = {}
        self.used_before: set[int] = set()
        """Blocks that some sequence has had and given back."""
        self.shown: set[str] = set()
        """What has happened so far that not every script shows: copy, reuse, ..."""

    def apply(self, action: Action) -> list[Effect]:
        """Do an action; its effects in order.

        Raises UsageError where it cannot be done after the actions so far, and changes nothing.
        """
        before = self._saved()
        try:
            effects: list[Effect] = getattr(self, f"_{action.rule}")(action)
        except UsageError:
            self._restore(before)
            raise
        return effects

    def allows(self, action: Action, *, spare: int = 0) -> bool:
        """Whether an action can be done now, and leaves `spare` blocks free on either side."""
        before = self._saved()
        try:
            self.apply(action)
        except UsageError:
            return False
        left = min(len(self.free), len(self._host_free))
        self._restore(before)
        return left >= spare

    def copied(self, action: Action) -> int:
        """The most kernel blocks that a step of an action would copy; 0 for an impossible one."""
        before = self._saved()
        try:
            effects = self.apply(action)
        except UsageError:
            return 0
        self._restore(before)
        ratios = [self.plan.layer(group[0]).ratio for group in self.plan.groups]
        copies = [len(e.pairs) * ratios[e.group] for e in effects if e.kind == "copy"]
        return max(copies, default=0)

    # Actions

    def _allocate(self, action: Action) -> list[Effect]:
        name = action.sequences[0]
        held = self.held.setdefault(name, Held())
        self._refuse(held.is_swapped, f"{name} is swapped out")
        self._grow(held, held.length + action.tokens)
        return []

    def _prefill(self, action: Action) -> list[Effect]:
        name = action.sequences[0]
        held = self.held.setdefault(name, Held())
        self._refuse(held.length > 0, f"{name} has tokens already: extend it")
        return self._write([name], action.tokens)

    def _extend(self, action: Action) -> list[Effect]:
        self._refuse(self._known(action.sequences[0]).length == 0, "nothing to extend: prefill")
        return self._write(action.sequences, action.tokens)

    def _decode(self, action: Action) -> list[Effect]:
        for name in action.sequences:
            self._refuse(self._known(name).length == 0, f"{name} has no tokens: prefill it")
        return self._write(action.sequences, 1)

    def _fork(self, action: Action) -> list[Effect]:
        parent, child = action.sequences
        held = self._known(parent)
        self._refuse(held.is_swapped, f"{parent} is swapped out")
        self._refuse(child in self.held, f"{child} exists already")
        for blocks in held.blocks.values():
            for block in blocks:
                self._references[block] += 1
        states = {group: self._taken() for group in held.states}
        self.held[child] = Held({g: list(b) for g, b in held.blocks.items()}, states, held.length)
        return []

    def _read(self, action: Action) -> list[Effect]:
        for name in action.sequences:
            held = self._known(name)
            self._refuse(held.is_swapped or held.length == 0, f"nothing to read of {name}")
        return [
            Effect("read", group, tuple(self._run(name, group) for name in action.sequences))
            for group in self.sizes
        ]

    def _run(self, name: str, group: int) -> Run:
        held = self.held[name]
        return Run(tuple(held.blocks[group]), 0, held.length)

    def _rollback(self, action: Action) -> list[Effect]:
        held = self._known(action.sequences[0])
        self._refuse(held.is_swapped, f"{action.sequences[0]} is swapped out")
        self._refuse(action.tokens > held.length, f"only {held.length} tokens to roll back")
        held.length -= action.tokens
        for group, blocks in held.blocks.items():
            kept = -(-held.length // self.sizes[group])
            while len(blocks) > kept:
                self._given_back(blocks.pop())
        return []

    def _swap_out(self, action: Action) -> list[Effect]:
        held = self._known(action.sequences[0])
        self._refuse(held.is_swapped, "swapped out already")
        self._refuse(not any(held.blocks.values()), "no blocks to swap out")
        effects = []
        for group, blocks in held.blocks.items():
            pairs = []
            for block in blocks:
                self._refuse(not self._host_free, "no host block is free: raise host_blocks")
                pairs.append((block, self._host_free.pop()))
            held.host[group] = [there for _, there in pairs]
            effects.append(Effect("swap_out", group, pairs=tuple(pairs)))
        for blocks in held.blocks.values():
            while blocks:
                self._given_back(blocks.pop())
        held.is_swapped = True
        return effects

    def _swap_in(self, action: Action) -> list[Effect]:
        held = self._known(action.sequences[0])
        self._refuse(not held.is_swapped, "not swapped out")
        effects = []
        for group, there in held.host.items():
            here = [self._taken() for _ in there]
            held.blocks[group] = here
            effects.append(Effect("swap_in", group, pairs=tuple(zip(there, here, strict=True))))
            self._host_free += there[::-1]
        held.host, held.is_swapped = {}, False
        return effects

    def _zero(self, action: Action) -> list[Effect]:
        held = self._known(action.sequences[0])
        self._refuse(held.is_swapped, "swapped out")
        owned = [block for blocks in held.blocks.values() for block in blocks]
        self._refuse(not owned, "no blocks to clear")
        self._refuse(any(self._references[block] > 1 for block in owned), "a block is shared")
        held.length = 0
        return [
            Effect("zero", group, blocks=tuple(blocks))
            for group, blocks in held.blocks.items()
            if blocks
        ]

    def _free(self, action: Action) -> list[Effect]:
        held = self._known(action.sequences[0])
        for blocks in held.blocks.values():
            while blocks:
                self._given_back(blocks.pop())
        for block in held.states.values():
            self._given_back(block)
        for there in held.host.values():
            self._host_free += there[::-1]
        del self.held[action.sequences[0]]
        return []

    # What they are made of

    def _write(self, names: Sequence[str], tokens: int) -> list[Effect]:
        copies: dict[int, list[Pair]] = {group: [] for group in self.sizes}
        runs: dict[int, list[Run]] = {group: [] for group in self.sizes}
        for name in names:
            held = self._known(name)
            self._refuse(held.is_swapped, f"{name} is swapped out")
            self._grow(held, held.length + tokens)
            for group, blocks in held.blocks.items():
                for number in self._written(group, held.length, tokens):
                    if self._references[blocks[number]] > 1:
                        new = self._taken()
                        copies[group].append((blocks[number], new))
                        self._references[blocks[number]] -= 1
                        blocks[number] = new
                        self.shown.add("copy")
                runs[group].append(Run(tuple(blocks), held.length, tokens))
            held.length += tokens
        effects = [
            Effect("copy", group, pairs=tuple(pairs)) for group, pairs in copies.items() if pairs
        ]
        return effects + [Effect("write", group, tuple(each)) for group, each in runs.items()]

    def _written(self, group: int, start: int, tokens: int) -> range:
        """The numbers of the blocks that tokens `start` to `start + tokens` are in."""
        size = self.sizes[group]
        return range(start // size, (start + tokens - 1) // size + 1)

    def _grow(self, held: Held, length: int) -> None:
        """Blocks for `length` tokens in every attention group, and one for each state."""
        for group, size in self.sizes.items():
            blocks = held.blocks.setdefault(group, [])
            while len(blocks) * size < length:
                blocks.append(self._taken())
        for group in self._state_groups:
            if group not in held.states:
                held.states[group] = self._taken()

    def _taken(self) -> int:
        self._refuse(not self.free, "no block is free")
        block = self.free.pop()
        self._references[block] = 1
        if block in self.used_before:
            self.shown.add("reuse")
        return block

    def _given_back(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            del self._references[block]
            self.free.append(block)
            self.used_before.add(block)

    def _known(self, name: str) -> Held:
        self._refuse(name not in self.held, f"there is no sequence {name}")
        return self.held[name]

    @staticmethod
    def _refuse(condition: bool, why: str) -> None:
        if condition:
            raise UsageError(f"impossible script: {why}")

    def _saved(self) -> tuple[object, ...]:
        held = {
            name: Held(
                {g: list(b) for g, b in each.blocks.items()},
                dict(each.states),
                each.length,
                each.is_swapped,
                {g: list(b) for g, b in each.host.items()},
            )
            for name, each in self.held.items()
        }
        return (
            list(self.free),
            list(self._host_free),
            dict(self._references),
            held,
            set(self.used_before),
            set(self.shown),
        )

    def _restore(self, saved: tuple[object, ...]) -> None:
        names = ("free", "_host_free", "_references", "held", "used_before", "shown")
        for name, value in zip(names, saved, strict=True):
            setattr(self, name, value)
