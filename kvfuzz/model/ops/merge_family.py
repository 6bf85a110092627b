"""Merges as the engine asks about them: how they become simpler, and which of two is smaller."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvfuzz.model.ops.activations import Gaps
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.merge import EMPTY, MERGE_OP, Lse, MergeScene, check, parts
from kvfuzz.model.ops.merge_axes import MERGE_AXES, MERGE_RULES
from kvfuzz.model.search import (
    Steps,
    fewer_items,
    first_of,
    lower_number,
    plainer_value,
    until_stable,
)
from kvfuzz.model.vocabulary import HEAD_COUNTS, HEAD_SIZES

GAPS = (Gaps(), Gaps(head=1), Gaps(row=1))
LSES = (Lse(), Lse(gap=1), Lse(by_token=True))


def _each_token(scene: MergeScene) -> Steps[MergeScene]:
    """Tokens with less that is empty, a token at a time."""
    for index, now in enumerate(scene.empty):
        plainer = EMPTY[: EMPTY.index(now)]
        candidates = [_with_token(scene, index, each) for each in plainer]
        scene = yield from first_of(scene, candidates)
    return scene


def _with_token(scene: MergeScene, index: int, empty: str) -> MergeScene:
    changed = (*scene.empty[:index], empty, *scene.empty[index + 1 :])
    return msgspec.structs.replace(scene, empty=changed)


def _same_heads(scene: MergeScene) -> Steps[MergeScene]:
    """The suffix with the gaps of the prefix."""
    return first_of(scene, [msgspec.structs.replace(scene, suffix=scene.prefix)])


_PASSES: tuple[Callable[[Any], Steps[Any]], ...] = (
    fewer_items("empty", least=1),
    plainer_value("with_context", None, *range(4)),
    _each_token,
    plainer_value("num_heads", *HEAD_COUNTS),
    plainer_value("head_size", *HEAD_SIZES),
    *(plainer_value(name, *GAPS) for name in ("prefix", "suffix", "output")),
    _same_heads,
    *(plainer_value(name, *LSES) for name in ("prefix_lse", "suffix_lse")),
    plainer_value("output_lse", None, *LSES),
    plainer_value("plus_infinity", False),
    plainer_value("far", False),
    plainer_value("model_dtype", "fp32", "bf16", "fp16"),
    lower_number("spare_rows"),
    plainer_value("fill_seed", *range(8)),
)


def simpler(scene: MergeScene) -> Steps[MergeScene]:
    """Candidates simpler than `scene`, pass after pass."""
    return until_stable(scene, _PASSES)


def _size(scene: MergeScene) -> tuple[int, ...]:
    lses = (scene.prefix_lse, scene.suffix_lse, scene.output_lse or Lse())
    unusual = (
        *(each.by_token for each in lses),
        scene.output_lse is not None,
        scene.with_context is not None,
        scene.plus_infinity,
        scene.far,
    )
    encoded = len(msgspec.json.encode(scene))
    return (scene.num_tokens, scene.num_heads, scene.head_size, sum(unusual), encoded)


FAMILY = OpFamily(
    ops=(MERGE_OP,),
    axes=MERGE_AXES,
    rules=MERGE_RULES,
    op=lambda scene: MERGE_OP,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: "all" if scene.with_context is None else "some",
)
