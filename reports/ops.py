"""A case of an op on other things than K and V pages, as a table: its levels, its arguments."""

from kvfuzz.model.axes import facts
from kvfuzz.model.fill import IntegerFill
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.reports.cases import view_rows
from kvfuzz.reports.text import Pairs

LEVELS_A_ROW = 4
MOST_NUMBERS = 40


def op_rows(case: OpCase) -> Pairs:
    """The levels of its axes, its scalars, then every tensor, metadata with their numbers."""
    levels = [f"{axis} {level}" for axis, level in facts(case).items()]
    rows: Pairs = [("op", case.op)]
    rows += [
        ("situation" if not at else "", ", ".join(levels[at : at + LEVELS_A_ROW]))
        for at in range(0, len(levels), LEVELS_A_ROW)
    ]
    scalars = [f"{name}={value}" for name, value in case.steps[0].scalars.items()]
    if scalars:
        rows.append(("scalars", ", ".join(scalars)))
    for name, dtype, view in view_rows(case):
        rows.append((name, f"{dtype}, {view}"))
        fill = case.buffer(case.tensor(case.steps[0].tensors[name]).buffer).fill
        if isinstance(fill, IntegerFill):
            rows.append(("", _shortened(fill.values)))
    return rows


def _shortened(values: tuple[int, ...]) -> str:
    more = f", ... ({len(values)} in all)" if len(values) > MOST_NUMBERS else ""
    return ", ".join(map(str, values[:MOST_NUMBERS])) + more


def op_sizes(case: OpCase) -> dict[str, str]:
    """What is told of a case that was made smaller."""
    return {**facts(case), "bytes": f"{case.nbytes:,}"}
