"""The cases of shared_kv_attention that vLLM's own test has, as scenes: 18 by name.

vLLM compares the backend of AITER with a reference for a layer that shares another layer's cache
(`test_aiter_fa_shared_kv_matches_reference`, added by #55887): caches in NHD, with and without a
window, and in SHUFFLE; of the model's dtype and fp8; prompts, extended contexts, and both behind a
decode. Sizes, scales and sequences are those of that test.
"""

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.attention import SHARED, AttentionScene
from kvfuzz.model.plan import CACHE, AttentionLayer, Batch, Plan, Sequence

BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, QUERIES_PER_KV = 16, 2, 64, 2
MODEL_DTYPE = "bf16"
LAYOUTS: dict[str, tuple[str, str, int]] = {
    "nhd": ("content_packed", "hnd", 0),
    "nhd_window_16": ("content_packed", "hnd", 16),
    "shuffle": ("kv_first", "shuffle", 0),
}
"""By vLLM's word for a cache: layout and order in ours, and the window. NHD is the order of the
view there, whose heads lie outside of tokens in memory."""
CACHES = ("auto", "fp8")
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill": ((0, 32), (0, 24)),
    "extend": ((48, 32), (32, 24)),
    "mixed": ((47, 1), (48, 32), (0, 24)),
}
"""Of each sequence, tokens of context and new ones."""
SCALES: dict[str, tuple[float, float]] = {
    "nhd": (0.5, 0.25),
    "nhd_window_16": (0.5, 0.25),
    "shuffle": (1.0, 1.0),
}
"""Of K and V in an fp8 cache."""


def shared_kv_matrix(fp8: str = "e4m3fnuz") -> dict[str, AttentionScene]:
    """The scenes by name, `layout/cache/batch`; `fp8` is the platform's e4m3 format."""
    return {
        f"{layout}/{cache}/{batch}": _scene(layout, fp8 if cache == "fp8" else MODEL_DTYPE, batch)
        for layout in LAYOUTS
        for cache in CACHES
        for batch in BATCHES
    }


def _scene(name: str, cache_dtype: str, batch: str) -> AttentionScene:
    layout, order, window = LAYOUTS[name]
    sequences, used = _sequences(batch)
    geometry = Geometry(used + 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    layer = AttentionLayer("layer.0", CACHE, layout, order, geometry, cache_dtype)
    fp32, scales = DTYPES["fp32"], SCALES[name] if cache_dtype != MODEL_DTYPE else (1.0, 1.0)
    return AttentionScene(
        op=SHARED,
        layer=layer.name,
        plan=Plan((layer,)),
        batch=Batch(sequences, table_width=max(len(each.block_ids) for each in sequences)),
        model_dtype=MODEL_DTYPE,
        k_scale=fp32.encode(scales[0]),
        v_scale=fp32.encode(scales[1]),
        softmax_scale=fp32.encode(HEAD_SIZE**-0.5),
        queries_per_kv=QUERIES_PER_KV,
        window=window,
    )


def _sequences(batch: str) -> tuple[tuple[Sequence, ...], int]:
    """The sequences, whose blocks lie in no order, and how many blocks they have; two are nobody's,
    the first and the last."""
    needed = [-(-(context + new) // BLOCK_SIZE) for context, new in BATCHES[batch]]
    used = sum(needed)
    free = list(range(used, 0, -2)) + list(range(used - 1, 0, -2))
    found = []
    for (context, new), count in zip(BATCHES[batch], needed, strict=True):
        ids, free = free[:count], free[count:]
        found.append(Sequence(tuple(ids), context, new))
    return tuple(found), used
