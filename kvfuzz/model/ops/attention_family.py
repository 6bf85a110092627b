"""Scenes of attention as a family: how they become simpler, and which of two is smaller."""

import msgspec

from kvfuzz.model import layer_passes
from kvfuzz.model.case import Program
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.ops.attended import ATTENTION_VALUES
from kvfuzz.model.ops.attention import ATTENTION_OPS, AttentionScene, check
from kvfuzz.model.ops.attention_axes import ATTENTION_AXES, ATTENTION_RULES
from kvfuzz.model.ops.attention_parts import parts
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.plain import Plainer, attribute
from kvfuzz.model.search import Steps
from kvfuzz.model.vocabulary import code_path

OWN: tuple[Plainer, ...] = (
    attribute("scene", "window")._replace(
        values=lambda scene: (each for each in (0, 1, 2, 4, 8) if each < scene.window)
    ),
    attribute("scene", "softcap", 0, 1),
    attribute("scene", "sinks", False),
    attribute("scene", "alibi", False),
    attribute("scene", "sharers", 1, 2),
    attribute("scene", "dense_output", False),
    attribute("scene", "query_quantised", False),
    attribute("scene", "q_scale", FP32_ONE),
    attribute("scene", "queries_per_kv", 1, 2),
    attribute("scene", "softmax_scale", FP32_ONE),
    attribute("scene", "values", *ATTENTION_VALUES),
)


def lower(scene: AttentionScene) -> Program:
    """The program of `scene`. Raises UsageError where the scene is impossible."""
    check(scene)
    made = parts(scene)
    steps = (made.step, *made.following)
    return Program(made.buffers, made.fields, made.tensors, steps, made.unused)


def simpler(scene: AttentionScene) -> Steps[AttentionScene]:
    """Candidates simpler than `scene`, pass after pass."""
    return layer_passes.simplifications(scene, lower, OWN)


def _size(scene: AttentionScene) -> tuple[int, ...]:
    g = scene.attention.geometry
    return (
        g.num_blocks,
        scene.num_query_heads,
        scene.batch.num_rows,
        g.head_size,
        g.block_size,
        len(msgspec.json.encode(scene)),
    )


FAMILY = OpFamily(
    ops=ATTENTION_OPS,
    axes=ATTENTION_AXES,
    rules=ATTENTION_RULES,
    op=lambda scene: scene.op,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: code_path(scene.attention.order),
)
