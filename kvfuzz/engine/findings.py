"""From a failing case to a finding: which is the smaller case, its seed, its replay line."""

import shlex
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.worker.entry import Description
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.ops.table import family_of
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.seed import Expected, Provenance, Seed
from kvfuzz.model.target import TargetSpec
from kvfuzz.model.verdict import Verdict


def size_of(case: AnyCase) -> tuple[int, ...]:
    """Smaller is simpler: blocks, heads, rows, then the sizes of a page; of a plan, its layers
    first; of a script, its actions.

    Comparable between cases of one family.
    """
    if isinstance(case, PlanCase):
        plan = case.plan
        return (len(plan.layers), plan.num_blocks, case.nbytes, len(msgspec.json.encode(case)))
    if isinstance(case, ScriptCase):
        tokens = sum(action.tokens for action in case.script.actions)
        return (len(case.script.actions), len(case.steps), tokens, case.nbytes)
    if isinstance(case, OpCase):
        return family_of(case.scene).size(case.scene)
    scene = case.scene
    g = scene.attention.geometry
    return (
        g.num_blocks,
        g.num_kv_heads,
        scene.batch.num_rows,
        g.head_size,
        g.block_size,
        len(msgspec.json.encode(scene)),
    )


def make_seed(case: AnyCase, property: str, verdict: Verdict, description: Description) -> Seed:
    """The seed of a case that fails `property`."""
    environment = description.environment
    return Seed(
        target=description.info.name,
        op=description.info.op,
        property=property,
        case=case,
        expected=Expected("failed", verdict.digest, verdict.launches),
        provenance=Provenance(
            kvfuzz=kvfuzz.__version__,
            triton=environment.triton,
            torch=environment.torch,
            lane=environment.lane,
            arch=environment.arch,
            content=description.info.content,
        ),
    )


def replay_command(path: Path, target: TargetSpec) -> str:
    """The command line that shows the finding again. The seed knows lane and arch itself."""
    parts = ["kvfuzz", "replay", str(path)]
    if ".py:" in target.name:
        parts += ["--target", target.name]
    for name, folder in target.sources.items():
        parts += ["--source", f"{name}={folder}"]
    return shlex.join(parts)
