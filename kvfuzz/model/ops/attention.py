"""Attention over the K and V pages of one layer: each query sees the tokens of its own sequence.

A sequence of a batch has `start` tokens in the cache that were computed before, its context, and
`length` query tokens behind them, whose K and V are in the cache, too. Query i of those stands at
position p = start + i and sees the positions j <= p, with a window of w those with j > p - w. With
scores s_j = scale * (q . k_j), capped as cap * tanh(s_j / cap), plus slope * (j - p) for ALiBi,

    output = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))

without a sink the denominator has the sum alone. `queries_per_kv` neighbouring query heads share a
head of the cache. An element of a quantised cache stands for code * scale, and so does one of a
quantised query, which is of the format of the cache.

    paged_attention     one query token a sequence: decode; of a sequence without tokens, which pads
                        a batch, the output may become anything
    unified_attention   any number of query tokens a sequence, none included
    shared_kv_attention the same, through engine's layers that have no K and V of their own (key and
                        value are None) and attend over their target layer's cache: a step each

The step binds key_cache, value_cache, k_scale, v_scale as a gather does, query `[T, Hq, D]`, output
`[T, Hq, Dv]`, block_table `[S, width]`, seq_lens `[S]`, query_start_loc `[S + 1]` (not for decode),
sinks and alibi_slopes `[Hq]` fp32 where there are some, q_scale `[1]` fp32 of a quantised query. No
byte of a cache may change.
"""

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.layer_scene import (
    LayerScene,
    check_blocks,
    check_cache,
    check_counts,
    check_many_scales,
)
from kvfuzz.model.ops.attended import ATTENTION_VALUES, is_idle
from kvfuzz.model.plan import require
from kvfuzz.model.vocabulary import Levels

PAGED, UNIFIED, SHARED = "paged_attention", "unified_attention", "shared_kv_attention"
ATTENTION_OPS: Levels = (PAGED, UNIFIED, SHARED)
MOST_QUERIES_PER_KV = 128
MOST_CAP = 1 << 16
MOST_HEADS = 1 << 12
MOST_SHARERS = 3


class AttentionScene(LayerScene, frozen=True, forbid_unknown_fields=True, tag="attention"):
    """Everything that decides a case of attention."""

    softmax_scale: int = FP32_ONE
    """Bit pattern of the fp32 that q . k is multiplied by."""
    queries_per_kv: int = 1
    window: int = 0
    """Tokens that a query sees, itself included; 0 is all."""
    softcap: int = 0
    """What scores are kept below; 0 is nothing."""
    sinks: bool = False
    alibi: bool = False
    query_quantised: bool = False
    """Whether queries are of the cache's format, and not of the model's."""
    q_scale: int = FP32_ONE
    """Bit pattern of the fp32 that a quantised query is multiplied by."""
    sharers: int = 1
    """Layers that attend one after the other, each with queries of its own."""
    values: str = ATTENTION_VALUES[0]
    row_gap: int = 0
    """Elements between one row of the query, and of the output, and the next."""
    dense_output: bool = False
    """Whether the rows of the output are without: queries are cut out of what was projected."""
    spare_rows: int = 0
    """Rows that query and output have behind those of the batch: an engine pads batches."""
    spare_entries: int = 0
    """Entries that metadata have behind those of the batch."""
    fill_seed: int = 0

    @property
    def num_query_heads(self) -> int:
        """Query heads."""
        return self.queries_per_kv * self.attention.geometry.num_kv_heads

    @property
    def num_rows(self) -> int:
        """Rows of queries: in a decode one for each sequence, be it idle or not."""
        sequences = self.batch.sequences
        return len(sequences) if self.op == PAGED else self.batch.num_tokens

    @property
    def query_dtype(self) -> str:
        """The format of queries."""
        return self.attention.cache_dtype if self.query_quantised else self.model_dtype


def check(scene: AttentionScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(scene.op in ATTENTION_OPS, f"op={scene.op!r}, expected one of {ATTENTION_OPS}")
    require(
        scene.values in ATTENTION_VALUES,
        f"values={scene.values!r}, expected one of {ATTENTION_VALUES}",
    )
    check_counts(scene, "row_gap", "spare_rows", "spare_entries", "window")
    require(
        1 <= scene.queries_per_kv <= MOST_QUERIES_PER_KV and 0 <= scene.softcap <= MOST_CAP,
        f"queries_per_kv={scene.queries_per_kv} with softcap={scene.softcap}, expected 1 to "
        f"{MOST_QUERIES_PER_KV} with 0 to {MOST_CAP}",
    )
    scale = DTYPES["fp32"].decode(scene.softmax_scale)
    require(0 < scale <= 1, f"softmax_scale={scale}, expected a number above 0, 1 at most")
    check_cache(scene)
    check_many_scales(scene)
    check_blocks(scene)
    require(
        scene.attention.granularity.startswith("token_head")
        or not DTYPES[scene.attention.cache_dtype].is_integer,
        f"cache_dtype={scene.attention.cache_dtype}, expected a scale for each head of a token",
    )
    require(
        scene.num_query_heads <= MOST_HEADS,
        f"{scene.num_query_heads} query heads, expected {MOST_HEADS} at most",
    )
    sequences = scene.batch.sequences
    require(
        scene.op != PAGED or all(each.length == 1 or is_idle(each) for each in sequences),
        f"{PAGED} with {[each.length for each in sequences]} query tokens: one each",
    )
    require(not (scene.sinks and scene.alibi), "sinks with ALiBi, which no model has")
    require(
        1 <= scene.sharers <= (MOST_SHARERS if scene.op == SHARED else 1),
        f"sharers={scene.sharers} of {scene.op}, expected 1, or to {MOST_SHARERS} of {SHARED}",
    )
    _check_query(scene)
    require(not scene.batch.padding, "padding rows are those of a write")


def _check_query(scene: AttentionScene) -> None:
    """Engines quantise queries where K and V of fp8 have one scale each."""
    layer, scale = scene.attention, DTYPES["fp32"].decode(scene.q_scale)
    require(0 < scale < float("inf"), f"q_scale=0x{scene.q_scale:08x}, expected a positive fp32")
    dtype = DTYPES[layer.cache_dtype]
    is_fp8 = dtype.is_quantised and not dtype.is_integer and layer.granularity == "tensor"
    require(
        is_fp8 or not scene.query_quantised,
        f"query_quantised with cache_dtype={layer.cache_dtype}, granularity={layer.granularity}: "
        "expected an fp8 cache with a scale for each tensor",
    )
