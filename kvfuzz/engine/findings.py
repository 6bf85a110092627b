"""From a failing case to a finding: what makes two the same, its seed, its replay line."""

import shlex
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.worker.entry import Description
from kvfuzz.model.case import Case
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.scene import Scene
from kvfuzz.model.seed import Expected, Provenance, Seed
from kvfuzz.model.target import TargetSpec
from kvfuzz.model.verdict import Verdict

Signature = tuple[str, str, str]


def signature(case: Case, verdict: Verdict) -> Signature:
    """What makes two failing cases the same finding: property, code path, and conversion.

    A kernel has one path for SHUFFLE and one for strided pages, and converts or copies.
    """
    path = "shuffle" if case.scene.attention.order == "shuffle" else "strided"
    conversion = "converts" if DTYPES[case.scene.attention.cache_dtype].is_fp8 else "copies"
    return verdict.failed[0].name, path, conversion


def size_of(scene: Scene) -> tuple[int, ...]:
    """Smaller is simpler: blocks, heads, rows, then the sizes of a page."""
    g = scene.attention.geometry
    return (
        g.num_blocks,
        g.num_kv_heads,
        scene.batch.num_rows,
        g.head_size,
        g.block_size,
        len(msgspec.json.encode(scene)),
    )


def make_seed(case: Case, verdict: Verdict, description: Description) -> Seed:
    """The seed of a failing case, named after its first failing property."""
    environment = description.environment
    return Seed(
        target=description.info.name,
        op=description.info.op,
        property=verdict.failed[0].name,
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
