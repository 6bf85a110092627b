"""What minimising a seed did, as text: what the case was, what it is now, how to see it fail."""

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import facts
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.seed import Seed
from kvfuzz.reports.ops import op_sizes
from kvfuzz.reports.plans import reduced_sizes
from kvfuzz.reports.text import columns, count, printable

ENDED_BY: dict[str, str] = {
    "minimal": "nothing more can go",
    "time": "the budget is spent: again, it may go on",
    "runs": "the number of runs is reached: again, it may go on",
}


def reduction_lines(
    before: Seed, after: Seed, *, name: str, path: str, runs: int, ended_by: str, command: str
) -> list[str]:
    """The sizes and facts that changed, then the replay line of the seed at `path`."""
    how = f"{count(runs, 'run')}, {ENDED_BY[ended_by]}"
    if before.case == after.case:
        kept = "already minimal" if ended_by == "minimal" else "no smaller case found"
        return [printable(f"{kept}: {name} ({how})"), "", command]
    was, now = _described(before.case), _described(after.case)
    changed = [(what, was[what], "->", now[what]) for what in was if was[what] != now[what]]
    return [
        printable(f"minimised: {name} -> {path}"),
        "",
        *columns([*changed, ("property", f"{after.property} fails as before ({how})")]),
        "",
        command,
    ]


def _described(case: AnyCase) -> dict[str, str]:
    if isinstance(case, PlanCase):
        return {**reduced_sizes(case), **facts(case), "bytes": f"{case.nbytes:,}"}
    if isinstance(case, ScriptCase):
        actions = {"actions": str(len(case.script.actions)), "steps": str(len(case.steps))}
        return {**actions, **facts(case), "bytes": f"{case.nbytes:,}"}
    if isinstance(case, OpCase):
        return op_sizes(case)
    scene = case.scene
    return {
        "steps": str(len(case.steps)),
        "layers": str(len(scene.plan.layers)),
        "num_sequences": str(len(scene.batch.sequences)),
        "num_rows": str(scene.batch.num_rows),
        "num_blocks": f"{case.geometry.num_blocks:,}",
        **facts(case),
        "table_width": str(scene.batch.table_width),
        "fill_seed": str(scene.fill_seed),
        "bytes": f"{case.nbytes:,}",
    }
