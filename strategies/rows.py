"""Rows: one level for every axis, drawn so that a case can show them all.

A scene begins with its row. Levels are drawn axis by axis, each from those that some complete row
of the domain still allows, so that next to nothing is rejected and any axis can be narrowed. The
first integers of a scene are its row, which is how covering rows and boundary rows are drawn.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import Domain, axes_of
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.plan_rules import PLAN_RULES
from kvfuzz.model.rules import RULES, Rule
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.script_rules import SCRIPT_RULES
from kvfuzz.model.vocabulary import Levels
from kvfuzz.strategies.choices import Choices
from kvfuzz.strategies.filtering import Filter, Table

Row = dict[str, str]
"""A level for every axis."""

NESTED = ("block_first", "block_head_first")
"""The nestings of layers that lie side by side in a block: they show with two layers or more."""

OFTEN: dict[str, dict[str, int]] = {
    "order": {"nhd": 2, "hnd": 2, "shuffle": 2},
    "nesting": {"layer_first": 3},
    "page": {"exact": 2},
    "value_size": {"same": 4},
    "granularity": {"tensor": 4},
    "scale": {"general": 2},
    "block_size": {"2": 2, "4": 2, "8": 2, "16": 4, "32": 2},
    "num_kv_heads": {"1": 3, "2": 3},
    "head_size": {"8": 3, "16": 3, "32": 3, "64": 2, "80": 2, "96": 2},
    "latent_size": {"16": 4, "32": 3, "64": 2},
    "blocks_used": {"2+": 5},
    "block_ids": {"shuffled": 4},
    "reach": {"near": 30},
    "first_offset": {"inside": 2},
    "table": {"wide": 2},
    "num_blocks": {"3+": 4},
    "tokens": {"4": 3, "16": 2},
    "num_tokens": {"3+": 4},
    "num_heads": {"2": 3, "3": 2},
    "form": {"mixed": 3},
    "softcap": {"none": 3},
    "sinks": {"none": 3},
    "alibi_slopes": {"none": 3},
    "numbers": {"spread": 4, "exact": 3, "flat": 2},
    "context": {"short": 40},
    "query": {"model": 4},
    "shared_by": {"1": 4},
    "queries_per_kv": {"1": 2, "2": 3, "4": 2},
}
"""How often a level is drawn where that is not once: what addressing bugs need to show (a second
block, shuffled ids, few heads), and small pages, since cases a second count. Far caches are rare,
because a bug that shows near is easier to read there."""


LARGE_CACHE = 1 << 18
"""Bytes of a cache from which on cases are costly."""
FEWEST_BLOCKS = {"split_2": 8, "split_4": 24, "split_12": 24}
"""Blocks of a cache in use, about, by the pattern of their ids."""


def is_costly(row: Row) -> bool:
    """Whether the cases of a row take several times as long as others: their caches are large, or
    reach far. Plans have no bytes."""
    if row.get("reach", "near") != "near" or row.get("context") == "long":
        return True
    if not {"block_size", "num_kv_heads", "head_size"} <= row.keys():
        return False
    if "latent_size" in row:
        width = int(row["latent_size"]) + int(row["rope_size"])
    else:
        width = 2 * int(row["num_kv_heads"]) * int(row["head_size"])
    page = int(row["block_size"]) * width * itemsize(row["cache_dtype"])
    layers = 2 if row["nesting"] in NESTED else 1
    blocks = FEWEST_BLOCKS.get(row["block_ids"], 4)
    return page * layers * blocks >= LARGE_CACHE


class Space:
    """All rows that `domain` allows for `op`.

    Raises UsageError where there is none.
    """

    def __init__(self, op: str, domain: Domain) -> None:
        self.op = op
        axes = axes_of(op)
        self.axes = tuple(axis.name for axis in axes)
        self.levels: tuple[tuple[str, ...], ...] = tuple(
            tuple(level for level in domain.levels(axis.name) if level in axis.levels_for(op))
            for axis in axes
        )
        self.first = [sum(map(len, self.levels[:axis])) for axis in range(len(self.levels))]
        """The number of the first level of each axis, where levels are numbered over all axes."""
        self._rules: list[list[Table]] = [[] for _ in axes]
        rules = rules_of(op)
        for rule in (*rules, *_forbidden(domain)):
            if not rule.ops or op in rule.ops:
                self._add(rule)
        self._filter = Filter(self.levels, [table for tables in self._rules for table in tables])
        self._about = [
            [table for tables in self._rules for table in tables if at in table[0]]
            for at in range(len(axes))
        ]
        self._relevant = [self._earlier_axes_that_matter(at) for at in range(len(axes))]
        self._completes: dict[tuple[int, ...], bool] = {}
        self._options: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}
        if not self.possible(()):
            narrowed = ", ".join(
                f"{axis.name}={'|'.join(levels)}"
                for axis, levels in zip(axes, self.levels, strict=True)
                if len(levels) < len(axis.levels_for(op))
            )
            raise UsageError(f"nothing to draw: no case shows {narrowed} at once ({domain.source})")

    def _add(self, rule: Rule) -> None:
        """Tabulate a rule under the axis after which it can be decided."""
        at = sorted(self.axes.index(axis) for axis in rule.axes)
        order = [at.index(self.axes.index(axis)) for axis in rule.axes]
        tables = [range(len(self.levels[axis])) for axis in at]
        allowed = {
            chosen
            for chosen in itertools.product(*tables)
            if rule.allows(*(self.levels[at[place]][chosen[place]] for place in order))
        }
        self._rules[at[-1]].append((tuple(at), allowed))

    def _earlier_axes_that_matter(self, at: int) -> tuple[int, ...]:
        later = (axes for rules in self._rules[at:] for axes, _ in rules)
        return tuple(sorted({axis for axes in later for axis in axes if axis < at}))

    def possible(self, row: Sequence[int]) -> tuple[int, ...]:
        """The levels of the next axis, as indices, with which `row` can be completed.

        `row` holds the indices of the levels of the axes before it.
        """
        return self.options(row)[0]

    def options(self, row: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        """The possible levels of the next axis, and how often each is drawn."""
        at = len(row)
        key = (at, *[row[axis] for axis in self._relevant[at]])
        known = self._options.get(key)
        if known is None:
            possible = tuple(
                level
                for level in range(len(self.levels[at]))
                if self._fits((*row, level)) and self._can_complete((*row, level))
            )
            often = OFTEN.get(self.axes[at], {})
            weights = [often.get(self.levels[at][level], 1) for level in possible]
            known = self._options[key] = (possible, weights)
        return known

    def allows(self, row: Sequence[int], at: int) -> bool:
        """Whether a whole row keeps every rule that is about axis `at`."""
        return all(
            tuple([row[axis] for axis in axes]) in allowed for axes, allowed in self._about[at]
        )

    def _fits(self, row: tuple[int, ...]) -> bool:
        """Whether the rules that the last level of `row` completes allow it."""
        return all(
            tuple([row[axis] for axis in axes]) in allowed
            for axes, allowed in self._rules[len(row) - 1]
        )

    def _can_complete(self, row: tuple[int, ...]) -> bool:
        at = len(row)
        if at == len(self.axes):
            return True
        key = (at, *[row[axis] for axis in self._relevant[at]])
        if key not in self._completes:
            self._completes[key] = any(
                self._fits((*row, level)) and self._can_complete((*row, level))
                for level in range(len(self.levels[at]))
            )
        return self._completes[key]

    def completed(
        self, wanted: Mapping[int, int], prefer: Callable[[list[int], tuple[int, ...]], list[int]]
    ) -> list[int] | None:
        """A row with the levels `wanted` (index of axis to index of level), or None.

        Elsewhere `prefer(row so far, possible levels)` orders the levels, and the first that leads
        to a row is taken.
        """
        left = self._filter.left(wanted)
        if left is None:
            return None
        early = self._decided_by_wanted(wanted)
        row: list[int] = []
        dead: set[tuple[int, ...]] = set()

        def fits(at: int, level: int) -> bool:
            chosen = {**wanted, at: level}
            return all(
                tuple([chosen[axis] if axis in chosen else row[axis] for axis in axes]) in allowed
                for axes, allowed in early[at]
            )

        def extend() -> bool:
            at = len(row)
            if at == len(self.axes):
                return True
            key = (at, *[row[axis] for axis in self._relevant[at]])
            if key in dead:
                return False
            possible = self.possible(row)
            options = [wanted[at]] if at in wanted else prefer(row, possible)
            for level in options:
                if level in left[at] and level in possible and fits(at, level):
                    row.append(level)
                    if extend():
                        return True
                    row.pop()
            dead.add(key)
            return False

        return row if extend() else None

    def _decided_by_wanted(self, wanted: Mapping[int, int]) -> list[list[Table]]:
        """By axis, the rules that it decides early, since their later axes are all wanted ones."""
        early: list[list[Table]] = [[] for _ in self.axes]
        for rules in self._rules:
            for axes, allowed in rules:
                open_axes = [axis for axis in axes if axis not in wanted]
                if open_axes and open_axes[-1] < axes[-1]:
                    early[open_axes[-1]].append((axes, allowed))
        return early

    def named(self, row: Sequence[int]) -> Row:
        """A row of indices as names of levels."""
        return {
            axis: levels[level]
            for axis, levels, level in zip(self.axes, self.levels, row, strict=True)
        }

    def integers(self, row: Mapping[str, str]) -> tuple[int, ...]:
        """The choices by which `drawn_row` draws `row`. Raises ValueError for what is no row."""
        indices: list[int] = []
        integers = []
        for axis, levels in zip(self.axes, self.levels, strict=True):
            possible, weights = self.options(indices)
            level = levels.index(row[axis]) if row[axis] in levels else -1
            if level not in possible:
                raise ValueError(f"{axis}={row[axis]} does not go with the levels before it")
            if len(possible) > 1:
                integers.append(sum(weights[: possible.index(level)]))
            indices.append(level)
        return tuple(integers)

    def drawn_row(self, choices: Choices) -> Row:
        """A row; the plainest level of each axis comes first."""
        row: list[int] = []
        for _ in self.axes:
            possible, weights = self.options(row)
            if len(possible) == 1:
                row.append(possible[0])
                continue
            rest = choices.integer(0, sum(weights) - 1)
            for level, weight in zip(possible, weights, strict=True):
                rest -= weight
                if rest < 0:
                    row.append(level)
                    break
        return self.named(row)


def rules_of(op: str) -> tuple[Rule, ...]:
    """Which levels of the axes of `op` go together."""
    if op == STATEFUL_OP:
        return SCRIPT_RULES
    if op in BY_OP:
        return BY_OP[op].rules
    return PLAN_RULES if op in PLAN_OPS else RULES


def _forbidden(domain: Domain) -> list[Rule]:
    """The combinations that a domain forbids, as rules."""
    return [
        Rule(tuple(combination), functools.partial(_outside, tuple(combination.values())))
        for combination in domain.forbidden
    ]


def _outside(forbidden: tuple[Levels, ...], *shown: str) -> bool:
    return not all(level in levels for level, levels in zip(shown, forbidden, strict=True))


@functools.lru_cache(maxsize=64)
def _space(op: str, domain: bytes) -> Space:
    return Space(op, msgspec.json.decode(domain, type=Domain))


def space(op: str, domain: Domain) -> Space:
    """The rows of `domain` for `op`, tabulated once."""
    return _space(op, msgspec.json.encode(domain))
