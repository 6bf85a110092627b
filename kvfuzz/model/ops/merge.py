"""merge_attn_states: attention over one part of a sequence and over another make that over both.

An engine attends to the cached context of a request and to its new tokens, or to chunks of a long
context, one after the other. Each part, prefix and suffix, has for each head of each token a result
o and the log-sum-exp l of its scores, so that

    output = (exp(lp) op + exp(ls) os) / (exp(lp) + exp(ls))
    output_lse = log(exp(lp) + exp(ls))

(Ye et al., "FlashInfer", 2025, 2.2). A part without keys is empty: its l is -inf, or +inf, which is
how FlashAttention 2 says it, and whatever its o holds counts for nothing. Two empty parts make
zeros, and -inf. From token `prefill_tokens_with_context` on tokens have no prefix: they are those
of the suffix, bit for bit, and nothing of the prefix is read.

The step binds prefix_output, suffix_output and output `[T, H, D]` of the model's dtype, prefix_lse,
suffix_lse and, where it is wanted, output_lse `[H, T]` fp32, each with strides of its own, and the
scalar where some tokens have no prefix.
"""

import math

import msgspec

from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import LARGE, ByteFill, Fill, FloatFill, IntegerFill, word
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops.activations import Gaps, row_elements, rows_of_heads
from kvfuzz.model.ops.metadata import Metadata
from kvfuzz.model.parts import Parts
from kvfuzz.model.plan import MOST_ROWS, require
from kvfuzz.model.vocabulary import Levels

MERGE_OP = "merge_attn_states"
WITH_CONTEXT = "prefill_tokens_with_context"
PREFIX, SUFFIX = "prefix", "suffix"
EMPTY: Levels = ("none", PREFIX, SUFFIX, "both")
"""Which parts of a token have no keys."""
MOST_HEADS, MOST_SIZE = 256, 1024
BINADES = (-3, 1)
"""Of the results of parts."""
LOWEST, RANGE, NEAR = -16.0, 64.0, 4.0
"""The log-sum-exps of a prefix are from LOWEST on, over so much; a suffix's is NEAR it, so that
both parts count, or FAR from it."""
FAR = 100.0
"""From where on exp(-difference) is a subnormal of fp32, or nothing."""


class Lse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How log-sum-exps `[H, T]` lie: heads of tokens, or tokens of heads; of more tokens."""

    by_token: bool = False
    gap: int = 0
    """Tokens behind those that are handed over."""


class MergeScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="merge"):
    """Everything that decides a merge."""

    empty: tuple[str, ...]
    """By token, which of its parts are empty; a token without a prefix has nothing empty."""
    num_heads: int
    head_size: int
    model_dtype: str
    prefix: Gaps = Gaps()
    suffix: Gaps = Gaps()
    output: Gaps = Gaps()
    prefix_lse: Lse = Lse()
    suffix_lse: Lse = Lse()
    output_lse: Lse | None = None
    with_context: int | None = None
    """Tokens that have a prefix, where a target is told; None is all."""
    plus_infinity: bool = False
    """Whether empty parts are told by +inf."""
    far: bool = False
    """Whether some tokens have parts of which one weighs nothing."""
    spare_rows: int = 0
    """Rows behind the batch, of results: an engine pads batches."""
    fill_seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.empty)

    @property
    def context(self) -> int:
        """Tokens that have a prefix."""
        return self.num_tokens if self.with_context is None else self.with_context


def check(scene: MergeScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(
        1 <= scene.num_tokens <= MOST_ROWS and {*scene.empty} <= {*EMPTY},
        f"{scene.num_tokens} tokens, expected 1 to {MOST_ROWS}, each one of {EMPTY}",
    )
    require(
        1 <= scene.num_heads <= MOST_HEADS and 1 <= scene.head_size <= MOST_SIZE,
        f"{scene.num_heads} heads of {scene.head_size}, expected 1 to {MOST_HEADS} of up to "
        f"{MOST_SIZE}",
    )
    require(
        scene.model_dtype in DTYPES and not DTYPES[scene.model_dtype].is_quantised,
        f"model_dtype={scene.model_dtype!r}, expected fp32, bf16 or fp16",
    )
    require(
        0 <= scene.context <= scene.num_tokens and {*scene.empty[scene.context :]} <= {"none"},
        f"with_context={scene.with_context} of {scene.num_tokens} tokens, of which those without a "
        f"prefix have a suffix: {scene.empty}",
    )
    require(
        not scene.far or "none" in scene.empty[: scene.context],
        "parts that are far apart, and no token with both",
    )
    for gaps in (scene.prefix, scene.suffix, scene.output):
        elements = row_elements(scene.num_heads, scene.head_size, gaps)
        nbytes = elements * (scene.num_tokens + scene.spare_rows) * itemsize(scene.model_dtype)
        require(
            min(gaps.head, gaps.row, scene.spare_rows) >= 0 and nbytes < LARGE,
            f"{gaps} with spare_rows={scene.spare_rows}: {nbytes} bytes, expected 0 or more each, "
            f"and less than {LARGE} bytes",
        )
    for lse in (scene.prefix_lse, scene.suffix_lse, scene.output_lse or Lse()):
        require(0 <= lse.gap <= MOST_ROWS, f"{lse}, expected a gap of 0 to {MOST_ROWS}")


def parts(scene: MergeScene) -> Parts:
    """What a possible scene adds up to."""
    dtype = DTYPES[scene.model_dtype]
    low, high = (each + dtype.bias for each in BINADES)
    numbers = FloatFill(scene.fill_seed, dtype.name, low, high)
    own = [
        _rows(scene, f"{PREFIX}_output", scene.prefix, numbers),
        _lse(scene, f"{PREFIX}_lse", scene.prefix_lse, PREFIX),
        _rows(scene, f"{SUFFIX}_output", scene.suffix, numbers),
        _lse(scene, f"{SUFFIX}_lse", scene.suffix_lse, SUFFIX),
        _rows(scene, "output", scene.output, ByteFill(scene.fill_seed)),
    ]
    if scene.output_lse is not None:
        own.append(_lse(scene, "output_lse", scene.output_lse, ""))
    bound = {each.view.name: each.view.name for each in own}
    told = {} if scene.with_context is None else {WITH_CONTEXT: scene.with_context}
    return Parts(
        tuple(each.buffer for each in own),
        tuple(each.field for each in own),
        tuple(each.view for each in own),
        Step(MERGE_OP, bound, bound, {**told}),
    )


def _rows(scene: MergeScene, name: str, gaps: Gaps, fill: Fill) -> Metadata:
    shape = (scene.num_tokens, scene.num_heads, scene.head_size)
    return rows_of_heads(name, scene.model_dtype, shape, fill, gaps, scene.spare_rows)


def _lse(scene: MergeScene, name: str, lse: Lse, part: str) -> Metadata:
    """The log-sum-exps of a part, written out, or of the result, which are bytes before it."""
    heads, tokens, size = scene.num_heads, scene.num_tokens + lse.gap, itemsize("fp32")
    fill: Fill = ByteFill(scene.fill_seed)
    if part:
        fill = IntegerFill("fp32", _numbers(scene, lse, part))
    head, token = (size, size * heads) if lse.by_token else (size * tokens, size)
    terms = (Term("token", token), Term("head", head))
    extents = {"token": tokens, "head": heads}
    return Metadata(
        Buffer(name, size * heads * tokens, fill),
        Field(name, name, "fp32", 0, terms, extents),  # type: ignore[arg-type]
        TensorView(name, name, "fp32", (heads, scene.num_tokens), (head, token)),
    )


def _numbers(scene: MergeScene, lse: Lse, part: str) -> tuple[int, ...]:
    """The bit patterns of the log-sum-exps of a part, in the order in which they lie."""
    heads, tokens = range(scene.num_heads), range(scene.num_tokens + lse.gap)
    if lse.by_token:
        return tuple(_number(scene, part, token, head) for token in tokens for head in heads)
    return tuple(_number(scene, part, token, head) for head in heads for token in tokens)


def _number(scene: MergeScene, part: str, token: int, head: int) -> int:
    """A log-sum-exp; what lies behind the batch is as if nothing were empty."""
    fp32 = DTYPES["fp32"]
    if token < scene.num_tokens and scene.empty[token] in (part, "both"):
        return fp32.encode(math.inf if scene.plus_infinity else -math.inf)
    drawn = word(scene.fill_seed, "lse", token * scene.num_heads + head)
    number = LOWEST + RANGE * _share(drawn)
    if part == SUFFIX:
        apart = NEAR * _share(drawn >> 20)
        is_far = token == _first_far(scene) or (scene.far and drawn >> 40 & 1)
        apart += FAR * (1 + _share(drawn >> 41)) if is_far else 0.0
        number += -apart if drawn >> 63 else apart
    return fp32.encode(number)


def _share(drawn: int) -> float:
    """A number from 0 to below 1, of 20 bits."""
    return (drawn % (1 << 20)) / (1 << 20)


def _first_far(scene: MergeScene) -> int:
    """The first token with both parts, of a scene that is to have some far apart; else none."""
    return scene.empty.index("none") if scene.far else -1
