"""Scripts as their rows say: a cache in use, action after action, none of them impossible.

The block manager runs along, so that only what can follow is drawn. What a row asks for and did not
happen by itself happens at the end, in as few actions as it takes.
"""

from typing import TYPE_CHECKING

from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.manager import BlockManager
from kvfuzz.model.script import Action, Script, ScriptCase
from kvfuzz.model.script_axes import copies_level
from kvfuzz.model.script_lowering import lower_script
from kvfuzz.model.vocabulary import DIALECTS
from kvfuzz.strategies.choices import Choices, chance, fill_seed, number, pick
from kvfuzz.strategies.plans import drawn_plan
from kvfuzz.strategies.rows import Row, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FEW, MOST = 2, 14
"""Actions that are drawn, before those that the row still lacks."""
SEQUENCES = ("a", "b", "c", "d", "e")
SCALES = {
    "none": (FP32_ONE,),
    "unit": (FP32_ONE,),
    "power_of_two": (0x3F000000, 0x40800000),
    "general": (0x40490FDB, 0x3DCCCCCD),
}
"""A half and 4; the floats next to pi and to a tenth."""
BLOCKS, SPARE = 16, 8
"""Blocks for each group, of the device and of the host, and those that are left for an ending."""


def drawn_script_case(choices: Choices, within: Space) -> ScriptCase:
    """The script case that `choices` make; the first of them are its row."""
    row = within.drawn_row(choices)
    plan = _plan(choices, row)
    scales = _scales(choices, row["scaled_by"])
    blocks = BLOCKS * len(plan.groups)
    script = Script(
        plan,
        tuple(_actions(choices, row, plan, blocks)),
        row["written_in"],
        *scales,
        host_blocks=blocks,
        fill_seed=fill_seed(choices),
    )
    return lower_script(script)


def _shared(forks: int, copies: str) -> list[Action]:
    """What makes x shared, and some of those that share it write: each copies a block."""
    names = [f"v{number}" for number in range(forks if copies == "several" else 1)]
    return [*(Action("fork", ("x", name)) for name in names), Action("decode", tuple(names))]


def _scales(choices: Choices, kind: str) -> tuple[int, int]:
    """The scales of K and V: one of the kind that a row names, and one that is no harder."""
    levels = ("unit", "power_of_two", "general")
    easier = levels[: levels.index(kind) + 1] if kind in levels else (kind,)
    pair = (pick(choices, SCALES[kind]), pick(choices, SCALES[pick(choices, easier)]))
    return pair if chance(choices, 2) else (pair[1], pair[0])


def _plan(choices: Choices, row: Row) -> CachePlan:
    """The plan of a script's row, in the words of plans: what scripts do not ask is plain."""
    states = "1" if "mamba" in row["kinds"] else "none"
    plain = {
        "group_sizes": "even",
        "page_padding": "none",
        "sharers": "none",
        "states": states,
        "value_heads": "same",
        "element": str(DTYPES[row["stored_in"]].itemsize),
    }
    blocks = BLOCKS * (3 if row["groups"] == "3+" else int(row["groups"]))
    stored_in = row["stored_in"]
    return drawn_plan(
        choices,
        {**row, **plain},
        num_blocks=blocks,
        cache_dtype=stored_in,
        last_dtype=DIALECTS[stored_in] if row["dialects"] == "two" else stored_in,
    )


class _Story:
    """A script in the making."""

    def __init__(self, row: Row, plan: CachePlan, host_blocks: int) -> None:
        self.manager = BlockManager(plan, host_blocks)
        self.actions: list[Action] = []
        self._row = row
        self._size = max(self.manager.sizes.values())
        self._copied: set[str] = {"none"}

    def does(self, action: Action, *, spare: int = SPARE) -> bool:
        """Whether an action can follow, leaves blocks for an ending and is one that the row allows;
        then it is done."""
        blocks = spare * len(self.manager.plan.groups)
        if self._is_unwanted(action) or not self.manager.allows(action, spare=blocks):
            return False
        if action.rule in ("extend", "decode"):
            self._copied.add(copies_level(self.manager.copied(action)))
        self.manager.apply(action)
        self.actions.append(action)
        return True

    def _is_unwanted(self, action: Action) -> bool:
        rules = {
            "fork": "forks",
            "rollback": "rollbacks",
            "swap_out": "swaps",
            "zero": "zeros",
            "free": "frees",
            "extend": "extends",
            "read": "gathers",
        }
        axis = rules.get(action.rule)
        if axis is not None and self._row[axis] == "none":
            return True
        if action.rule == "decode" and len(action.sequences) > 1 and self._row["batches"] == "none":
            return True
        if action.rule not in ("extend", "decode"):
            return False
        levels = ("none", "some", "several")
        copies = copies_level(self.manager.copied(action))
        return levels.index(copies) > levels.index(self._row["copies"])

    @property
    def written(self) -> list[str]:
        """The sequences with tokens on the device."""
        held = self.manager.held
        return [name for name, each in held.items() if each.length and not each.is_swapped]

    @property
    def unused(self) -> list[str]:
        """Names of sequences that are not there."""
        return [name for name in SEQUENCES if name not in self.manager.held]

    def length(self, choices: Choices) -> int:
        """Tokens of a write: few, up to a block, or past it."""
        return number(choices, 1, self._size + self._size // 2 + 1)

    def lacks(self) -> list[str]:
        """The axes whose row says `some` and that nothing shows yet."""
        rules = [action.rule for action in self.actions]
        shown = {
            "forks": "fork" in rules,
            "copies": self._row["copies"] in self._copied,
            "rollbacks": "rollback" in rules,
            "swaps": "swap_out" in rules,
            "zeros": "zero" in rules,
            "frees": "free" in rules,
            "extends": "extend" in rules,
            "batches": any(len(a.sequences) > 1 for a in self.actions if a.rule == "decode"),
            "gathers": "read" in rules,
        }
        wanted = [axis for axis in shown if self._row[axis] != "none"]
        return [axis for axis in wanted if not shown[axis]]


def _actions(choices: Choices, row: Row, plan: CachePlan, host_blocks: int) -> list[Action]:
    story = _Story(row, plan, host_blocks)
    story.does(Action("prefill", ("a",), story.length(choices)))
    for _ in range(number(choices, FEW, MOST) - 1):
        story.does(_next(choices, story))
    for action in _ending(story.lacks(), row["copies"]):
        story.does(action, spare=0)
    return story.actions


def _next(choices: Choices, story: _Story) -> Action:
    """Some action, which may turn out to be impossible."""
    written, unused = story.written, story.unused
    if not written:
        name = pick(choices, unused or list(story.manager.held))
        return Action("prefill", (name,), story.length(choices))
    name = pick(choices, written)
    swapped = [each for each, held in story.manager.held.items() if held.is_swapped]
    makers: list[Callable[[], Action]] = [
        lambda: Action("decode", (name,)),
        lambda: Action("decode", tuple(written)),
        lambda: Action("decode", tuple(written)),
        lambda: Action("extend", (name,), story.length(choices)),
        lambda: Action("read", tuple(written) if chance(choices, 2) else (name,)),
        lambda: Action("rollback", (name,), number(choices, 1, 5)),
        lambda: Action("free", (name,)),
        lambda: Action("zero", (name,)),
        lambda: Action("swap_out", (name,)),
        lambda: Action("allocate", (name,), number(choices, 1, 9)),
    ]
    if unused:
        makers += [lambda: Action("fork", (name, unused[0]))] * 3
        makers.append(lambda: Action("prefill", (unused[0],), story.length(choices)))
    if swapped:
        makers += [lambda: Action("swap_in", (pick(choices, swapped),))] * 4
    return pick(choices, makers)()


def _ending(lacking: "Sequence[str]", copies: str) -> list[Action]:
    """The fewest actions that show what is lacking, with sequences of their own; those that need
    blocks which nobody shares come before the fork."""
    shown: dict[str, list[Action]] = {
        "extends": [Action("extend", ("x",), 1)],
        "batches": [Action("prefill", ("y",), 1), Action("decode", ("x", "y"))],
        "gathers": [Action("read", ("x",))],
        "rollbacks": [Action("rollback", ("x",), 1)],
        "zeros": [Action("prefill", ("z",), 1), Action("zero", ("z",))],
        "frees": [Action("prefill", ("w",), 1), Action("free", ("w",))],
        "forks": [Action("fork", ("x", "v"))],
        "copies": _shared(3, copies),
        "swaps": [Action("swap_out", ("x",))],
    }
    needed = [action for axis, actions in shown.items() if axis in lacking for action in actions]
    # With all that is added to it, and one token taken back, x ends inside of a block of 4.
    tokens = 2 if "rollbacks" in lacking else 1
    return [Action("prefill", ("x",), tokens), *needed] if needed else []
