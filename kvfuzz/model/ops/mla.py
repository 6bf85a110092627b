"""Decode over MLA's latent: one query token a sequence attends over pages of one row a token.

A row of the cache is a latent of R elements and P rotary ones. Keys are whole rows, values are the
first R elements of the same rows, and all query heads share them (multi-query attention over the
latent: DeepSeek V2, 2.1). With scores s_j = softmax_scale * (q . k_j) over all tokens j of the
query's sequence, capped as cap * tanh(s_j / cap) where there is a cap,

    output = sum_j exp(s_j) v_j / sum_j exp(s_j)        lse = log sum_j exp(s_j)

the second for those who merge results of parts of a context (context parallelism). An element of an
fp8 cache stands for code * k_scale, as a key and as a value.

    mla_decode    query `[S, Hq, R + P]`, kv_cache `[num_blocks, block_size, R + P]`,
                  output `[S, Hq, R]`, lse `[S, Hq]` (natural logarithm; fp32 or the model's dtype),
                  block_table `[S, width]` and seq_lens `[S]` i32, k_scale `[1]` fp32

The pages are those of `gather_mla` (`kvfuzz.model.ops.latent`), with block stride = layers x (page
+ padding) where several layers lie side by side in each block. No byte of them may change. Sources:
vLLM vllm/v1/attention/backends/mla/triton_mla.py, and decode_attention_fwd, which it calls.
"""

import msgspec

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.ops import latent
from kvfuzz.model.ops.attended import ATTENTION_VALUES, is_idle
from kvfuzz.model.ops.latent import LatentScene
from kvfuzz.model.ops.latent_axes import GATHER_MLA
from kvfuzz.model.plan import MOST_ROWS, Batch, require

MLA_OP = "mla_decode"
MOST_HEADS = 256
MOST_CAP = 1 << 16


class MlaScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mla_decode"):
    """Everything that decides a case of the op; pages are described as in `LatentScene`."""

    num_blocks: int
    block_size: int
    latent_size: int
    rope_size: int
    cache_dtype: str
    model_dtype: str
    """That of queries and of the output."""
    batch: Batch
    """Of each sequence one token, its last, is a query; of one without tokens, which pads a batch,
    results may become anything."""
    layers: int = 1
    layer: int = 0
    page_padding: int = 0
    scale: int = FP32_ONE
    num_query_heads: int = 1
    softmax_scale: int = FP32_ONE
    """Bit pattern of the fp32 that q . k is multiplied by."""
    softcap: int = 0
    """What scores are kept below; 0 is nothing."""
    lse_dtype: str = "fp32"
    """fp32, or the model's."""
    values: str = ATTENTION_VALUES[0]
    row_gap: int = 0
    """Elements between one row of the query, and of the output, and the next."""
    dense_output: bool = False
    """Whether the rows of the output are without."""
    spare_rows: int = 0
    """Rows that query, output and lse have behind those of the batch."""
    spare_entries: int = 0
    """Entries that metadata have behind those of the batch."""
    margin: int = 0
    """By how many tokens the longest sequence that the host knows of is longer than the longest of
    the batch: a captured batch is told of the longest that there may be."""
    fill_seed: int = 0

    @property
    def form(self) -> str:
        """The form of the pages."""
        return "mla"

    @property
    def pages(self) -> LatentScene:
        """The same pages and batch as a gather has them."""
        return LatentScene(
            op=GATHER_MLA,
            form=self.form,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            latent_size=self.latent_size,
            rope_size=self.rope_size,
            cache_dtype=self.cache_dtype,
            model_dtype=self.model_dtype,
            batch=self.batch,
            layers=self.layers,
            layer=self.layer,
            page_padding=self.page_padding,
            scale=self.scale,
            fill_seed=self.fill_seed,
        )

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.pages.block_stride


def check(scene: MlaScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    for name in ("row_gap", "spare_rows", "spare_entries", "margin"):
        value = getattr(scene, name)
        require(0 <= value <= MOST_ROWS, f"{name}={value}, expected 0 to {MOST_ROWS}")
    require(
        scene.values in ATTENTION_VALUES,
        f"values={scene.values!r}, expected one of {ATTENTION_VALUES}",
    )
    require(
        1 <= scene.num_query_heads <= MOST_HEADS and 0 <= scene.softcap <= MOST_CAP,
        f"num_query_heads={scene.num_query_heads} with softcap={scene.softcap}, expected 1 to "
        f"{MOST_HEADS} with 0 to {MOST_CAP}",
    )
    scale = DTYPES["fp32"].decode(scene.softmax_scale)
    require(0 < scale <= 1, f"softmax_scale={scale}, expected a number above 0, 1 at most")
    latent.check(scene.pages)
    require(
        scene.lse_dtype in ("fp32", scene.model_dtype),
        f"lse_dtype={scene.lse_dtype!r}, expected fp32 or {scene.model_dtype}",
    )
    require(
        all(each.length == 1 or is_idle(each) for each in scene.batch.sequences),
        f"{MLA_OP} with {[each.length for each in scene.batch.sequences]} query tokens: one each",
    )
    require(not scene.batch.padding, "padding rows are those of a write")
