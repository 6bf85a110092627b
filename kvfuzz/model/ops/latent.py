"""Caches of one row a token: MLA's latent, DeepSeek's sparse pages, and their indexer's keys.

Ops, each on the pages of one layer, with block stride = layers x (page + padding) where
several layers lie side by side in each block:

    concat_and_cache_mla      kv_c `[T, R]` and k_pe `[T, P]` by slot_mapping `[T]` into kv_cache
    gather_mla                rows of kv_cache back to out `[T, R + P]`
    indexer_quant_and_cache   k `[T, D]` by slot_mapping into codes and one computed scale a token
    gather_indexer            codes to k `[T, D]` and scales to k_scale `[T]`, as they are
    quantize_and_insert_k_cache   k `[T, 512]` of DeepSeek V4 by slot_mapping

A page of `mla` holds rows of the model's dtype or of fp8: stored = x / scale, read = stored *
scale, with one `scale` `[1]`. In one of fp8_ds_mla each quarter of the latent has an fp32 scale of
its own, in the indexer's each token has: a scale is the absmax of its group over a number that the
target declares (`Quantise`), with `scale_fmt` ue8m0 the next power of two. One of fp8_ds_mla_v4 has
seven groups of 64 codes, whose scales are such powers, stored as their exponent plus 127 in a byte,
and an eighth byte of zero. A gather is told of by
block_table `[B, width]`, cu_seqlens_kv `[B + 1]`, token_to_batch `[T]` and, but for the indexer's,
seq_starts `[B]`, all i32. Sources: vLLM csrc/cache_kernels.cu and
vllm/v1/attention/ops/rocm_aiter_mla_sparse.py, vllm/models/deepseek_v4/common/ops/cache_utils.py.
"""

from typing import Any

import msgspec

from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.layout import Field, Geometry
from kvfuzz.model.ops.latent_axes import (
    BF16_FORMS,
    E4M3,
    FORMS_OF,
    GATHER_INDEX,
    MODEL_DTYPES,
    SIZES_OF,
    TILE,
)
from kvfuzz.model.pages import fp8_ds_mla, fp8_ds_mla_v4, indexer, mla
from kvfuzz.model.plan import CACHE, Batch, check_batch, require
from kvfuzz.model.scene import VALUES

GROUP = 128
"""Elements of the latent that share a scale in fp8_ds_mla."""
TOKEN_BYTES = {"fp8_ds_mla": 656, "fp8_ds_mla_v4": 584}
"""Bytes of a token, by form whose rows are of one size."""
V4_GROUP, V4_UNIT = 64, 576
"""Elements that share a scale in fp8_ds_mla_v4; its pages are multiples of so many bytes."""
MOST_LAYERS = 8
MOST_PADDING = 1 << 20


class LatentScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="latent"):
    """Everything that decides a case of these ops."""

    op: str
    form: str
    num_blocks: int
    block_size: int
    latent_size: int
    """Elements of a token's first part: R, or D of the indexer."""
    rope_size: int
    """Elements of its second part: P, or 0."""
    cache_dtype: str
    model_dtype: str
    """That of what is written, or of what a gather makes; gather_indexer has none."""
    batch: Batch
    layers: int = 1
    """Layers whose pages lie side by side in each block."""
    layer: int = 0
    """Which of them the op works on."""
    page_padding: int = 0
    """Bytes between the end of a page and the next."""
    scale: int = FP32_ONE
    """Bit pattern of the scale of a page that has one for all."""
    ue8m0: bool = False
    """Whether a computed scale is rounded up to a power of two."""
    values: str = VALUES[0]
    """What a write that converts stores, as in `kvfuzz.model.scene.Scene`."""
    row_gap: int = 0
    """Elements between the end of one row that is written, or made, and the next; a block table
    has something between its rows, too."""
    fill_seed: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that a page has for each token."""
        if self.form == "mla":
            return (self.latent_size + self.rope_size) * itemsize(self.cache_dtype)
        return TOKEN_BYTES.get(self.form, self.latent_size + 4)

    @property
    def page_pitch(self) -> int:
        """Bytes from the page of one layer to that of the next."""
        return self.block_size * self.token_bytes + self.page_padding

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.layers * self.page_pitch

    @property
    def geometry(self) -> Geometry:
        """The sizes of the cache, its rows being one head."""
        return Geometry(self.num_blocks, self.block_size, 1, self.latent_size + self.rope_size)

    @property
    def converts(self) -> bool:
        """Whether elements change their format on the way."""
        return self.op != GATHER_INDEX and self.cache_dtype != self.model_dtype

    @property
    def group(self) -> int:
        """Elements that share a computed scale; 0 where none is computed."""
        groups = {"mla": 0, "fp8_ds_mla": GROUP, "fp8_ds_mla_v4": V4_GROUP}
        return groups.get(self.form, self.latent_size)

    @property
    def tile(self) -> int:
        """Tokens of a tile of the indexer."""
        return TILE if self.form == "tiled" else 1


def page_fields(scene: LatentScene, layer: int) -> tuple[Field, ...]:
    """The parts of one layer's pages: `cached_latent` and so on of the layer that the op works on,
    `layer.1.latent` and so on of others."""
    blocks, size = scene.num_blocks, scene.block_size
    at: Any = {
        "buffer": CACHE,
        "layer": f"layer.{layer}",
        "block_stride": scene.block_stride,
    }
    dtype, latent = scene.cache_dtype, scene.latent_size
    if scene.form == "mla":
        found = mla(blocks, size, dtype, **at, latent=latent, rope=scene.rope_size)
    elif scene.form == "fp8_ds_mla":
        found = fp8_ds_mla(blocks, size, dtype, **at)
    elif scene.form == "fp8_ds_mla_v4":
        found = fp8_ds_mla_v4(blocks, size, dtype, **at)
    else:
        found = indexer(blocks, size, latent, dtype, **at, tile=scene.tile)
    prefix = "cached_" if layer == scene.layer else f"layer.{layer}."
    base = layer * scene.page_pitch
    return tuple(
        msgspec.structs.replace(field, name=prefix + field.name, base=base + field.base)
        for field in found
    )


def check(scene: LatentScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(scene.op in FORMS_OF, f"op={scene.op!r}, expected one of {', '.join(FORMS_OF)}")
    forms = FORMS_OF[scene.op]
    require(scene.form in forms, f"form={scene.form!r} of {scene.op}, expected one of {forms}")
    require(scene.values in VALUES, f"values={scene.values!r}, expected one of {VALUES}")
    for name in ("num_blocks", "block_size", "latent_size", "layers"):
        require(getattr(scene, name) >= 1, f"{name}={getattr(scene, name)}, expected 1 or more")
    require(
        0 <= scene.layer < scene.layers <= MOST_LAYERS,
        f"layer={scene.layer} of {scene.layers}, expected at most {MOST_LAYERS}",
    )
    _check_formats(scene)
    _check_sizes(scene)
    check_batch(scene.batch, scene.geometry)


def _check_formats(scene: LatentScene) -> None:
    cache, model = scene.cache_dtype, scene.model_dtype
    require(
        cache in DTYPES and model in MODEL_DTYPES,
        f"cache_dtype={cache!r} with model_dtype={model!r}",
    )
    if scene.form == "mla":
        fits = DTYPES[cache].is_quantised or cache == model
    else:
        fits = cache in E4M3 and (scene.form not in BF16_FORMS or model == "bf16")
    require(fits, f"cache_dtype={cache} with model_dtype={model} in a page of {scene.form}")
    value = DTYPES["fp32"].decode(scene.scale)
    require(0 < value < float("inf"), f"scale=0x{scene.scale:08x}, expected a positive fp32")


def _check_sizes(scene: LatentScene) -> None:
    latent, rope = scene.latent_size, scene.rope_size
    if scene.form in BF16_FORMS:
        latents, ropes = SIZES_OF[scene.form]
        require((str(latent), str(rope)) == (*latents, *ropes), f"a row of {latent} + {rope}")
    elif scene.form == "mla":
        require(rope >= 1, f"rope_size={rope}, expected 1 or more")
    else:
        require(
            rope == 0 and latent % TILE == 0 and scene.block_size % scene.tile == 0,
            f"{scene.form} pages of {scene.block_size} tokens of {latent} + {rope} elements",
        )
    unit = itemsize(scene.cache_dtype) if scene.form == "mla" else 4
    require(
        0 <= scene.page_padding <= MOST_PADDING and scene.page_padding % unit == 0,
        f"page_padding={scene.page_padding}, expected a multiple of {unit} bytes",
    )
    require(
        scene.form != "fp8_ds_mla_v4" or scene.page_pitch % V4_UNIT == 0,
        f"page_padding={scene.page_padding}, expected pages of a multiple of {V4_UNIT} bytes",
    )
    require(
        scene.row_gap >= 0 and scene.row_gap % (scene.group or 1) == 0,
        f"row_gap={scene.row_gap}, expected a multiple of {scene.group or 1} elements",
    )
