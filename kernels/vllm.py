"""vLLM's Triton cache kernels out of a source tree: `--source vllm=DIR`.

Everything is read off the tree: what a function accepts from its own source, what the engine
hands it from the backend beside it. No release number is known here.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels import (
    vllm_copies,
    vllm_latent,
    vllm_merge,
    vllm_mla,
    vllm_quant,
    vllm_rocm_attn,
    vllm_shared_kv,
    vllm_slots,
    vllm_unified,
)
from kvfuzz.kernels.adapter import Adapter, Call
from kvfuzz.kernels.contract_table import CONVENTIONAL
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.fp8 import dialect_of, scales_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import (
    AITER_FA,
    BLOCKS_OF_16,
    FLASH,
    POWERS_OF_TWO,
    TRITON_ATTN,
    content_of_module,
    function_of,
    is_packed,
    kernel_adapter,
    layouts_of,
    text_of,
)
from kvfuzz.kernels.vllm_pages import pages_of
from kvfuzz.kernels.vllm_stubs import known
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import Quantise, TargetSpec
from kvfuzz.model.vocabulary import Levels, conflict

PACKED_AS_SHUFFLE: dict[str, Levels] = {"layout": ("content_packed",), "order": ("shuffle",)}
"""K and V tiles would overlap; engines give a SHUFFLE cache two head slots instead (#44455)."""


def adapter(spec: TargetSpec, *, arch: str) -> Adapter:
    """The adapter of `spec.name`, from the tree that `spec.sources` gives for vllm.

    Raises NotCheckedError without a tree, or with one that lacks the file or the function.
    """
    makers: Mapping[str, Callable[[SourceTree, str], Adapter]] = {
        "vllm:cp_mha_gather_cache": _gather,
        "vllm:reshape_and_cache": _writer,
        "vllm:reshape_and_cache_flash": _flash,
        "vllm:reshape_and_cache_shuffle": _shuffle,
        "vllm:per_token_head_quant": vllm_quant.per_token_head,
        "vllm:slot_mapping_v1": vllm_slots.v1,
        "vllm:slot_mapping_v2": vllm_slots.v2,
        "vllm:swap_blocks": vllm_copies.swap,
        "vllm:zero_blocks": vllm_copies.zero,
        "vllm:copy_states": vllm_copies.states,
        "vllm:merge_attn_states": vllm_merge.merge,
        "vllm:indexer_quant_and_cache": vllm_latent.index_writer,
        "vllm:gather_indexer": vllm_latent.index_gather,
        "vllm:quantize_and_insert_k_cache": vllm_latent.v4_writer,
        "vllm:unified_attention": vllm_unified.unified,
        "vllm:unified_attention_descriptors": vllm_unified.descriptors,
        "vllm:unified_attention_diffkv": vllm_unified.diffkv,
        "vllm:paged_attention_2d": vllm_rocm_attn.paged,
        "vllm:chunked_prefill_paged_decode": vllm_rocm_attn.chunked,
        "vllm:shared_kv_attention": vllm_shared_kv.shared_kv,
        "vllm:decode_attention": vllm_mla.decode,
    }
    if "vllm" not in spec.sources:
        raise NotCheckedError(
            f"{spec.name} needs --source vllm=DIR, a folder that contains vllm/: a checkout, "
            "or an unpacked release (pip download --no-deps --no-binary vllm vllm==VERSION)"
        )
    root = Path(spec.sources["vllm"])
    tree = SourceTree("vllm", root, known=known(arch), also=("aiter",))
    return makers[spec.name](tree, arch)


def _gather(tree: SourceTree, arch: str) -> Adapter:
    module = tree.load(AITER_FA)
    function = function_of(module, "cp_mha_gather_cache")
    backend, own = text_of(module), inspect.getsource(function)
    has_writer = any((tree.root / file).is_file() for file in FLASH)
    pages = pages_of(tree.root, backend)
    allowed = _aiter_fa(backend, arch, order=_gather_orders(backend, own)) | pages.allowed
    # The output is the backend's own workspace; the function has no strides for it.
    allowed["rows"] = ("dense",)
    if _calls_never_dequantise(backend):
        allowed["cache_dtype"] = ("bf16", "fp16")
    domain = Domain(
        allowed=allowed,
        forbidden=(PACKED_AS_SHUFFLE, *pages.forbidden),
        source=f"{AITER_FA}: cp_mha_gather_cache, get_kv_cache_shape, _split_kv_cache",
    )
    return kernel_adapter(
        "vllm:cp_mha_gather_cache",
        "gather_cache",
        _strided_as_nhd(bind(function, "gather_cache")),
        domain=domain,
        partner="vllm:reshape_and_cache" if has_writer else "builtin:reshape_and_cache",
        content=content_of_module(module),
    )


def _shuffle(tree: SourceTree, arch: str) -> Adapter:
    module = tree.load(AITER_FA)
    function = function_of(module, "reshape_and_cache_shuffle_triton")
    pages = pages_of(tree.root, text_of(module))
    allowed = _aiter_fa(text_of(module), arch, order=("shuffle",)) | pages.allowed
    nestings = pages.levels("nesting")
    allowed["nesting"] = tuple(
        each for each in nestings if conflict({"order": "shuffle", "nesting": each}) is None
    )
    domain = Domain(
        allowed=allowed | {"scale": scales_of(arch)},
        forbidden=pages.forbidden,
        source=f"{AITER_FA}: reshape_and_cache_shuffle_triton, get_kv_cache_shape",
    )
    return kernel_adapter(
        "vllm:reshape_and_cache_shuffle",
        "reshape_and_cache",
        bind(function, "reshape_and_cache"),
        domain=domain,
        quantise=Quantise("x/s", f"{AITER_FA}: reshape_and_cache_shuffle_kernel"),
        partner="vllm:cp_mha_gather_cache",
        content=content_of_module(module),
    )


def _flash(tree: SourceTree, arch: str) -> Adapter:
    module = tree.load(*FLASH)
    function = function_of(module, "triton_reshape_and_cache_flash")
    where = Path(str(module.__file__)).relative_to(tree.root)
    # Before it took a head stride, the function asserted that heads lie side by side.
    dense_heads = "head_stride == head_size" in inspect.getsource(function)
    path = tree.root / TRITON_ATTN
    backend = path.read_text() if path.is_file() else ""
    packed = not backend or is_packed(backend)
    pages = pages_of(tree.root, backend)
    domain = Domain(
        allowed=CONVENTIONAL
        | pages.allowed
        | {
            "order": ("nhd",) if dense_heads else ("nhd", "hnd"),
            "layout": layouts_of(
                ("kv_first", "blocks_first", "hybrid"), packed and not dense_heads
            ),
            "block_size": BLOCKS_OF_16,
            # Every fp8 spelling, e5m2 included, is stored as the platform's fp8_dtype().
            "cache_dtype": ("fp32", "bf16", "fp16", dialect_of(arch)),
            "scale": scales_of(arch),
        },
        forbidden=pages.forbidden,
        source=f"{where}: triton_reshape_and_cache_flash; {TRITON_ATTN}: get_kv_cache_shape, "
        "get_supported_kernel_block_sizes",
    )
    return kernel_adapter(
        "vllm:reshape_and_cache_flash",
        "reshape_and_cache",
        bind(function, "reshape_and_cache"),
        domain=domain,
        quantise=Quantise("x/s", f"{where}: reshape_and_cache_kernel_flash"),
        # The gather of the same tree takes a part of this domain only.
        partner="builtin:gather_cache",
        content=content_of_module(module),
    )


def _writer(tree: SourceTree, arch: str) -> Adapter:
    """The writer that fits a step's format, as the engine picks it: the gather's inverse."""
    flash = _flash(tree, arch)
    domain = flash.info.domain
    writers = {"NHD": flash.call, "HND": flash.call}
    module = tree.load(AITER_FA)
    if hasattr(module, "reshape_and_cache_shuffle_triton"):
        shuffle = _shuffle(tree, arch)
        writers["SHUFFLE"] = shuffle.call
        flash_only = {
            axis: tuple(level for level in domain.levels(axis) if level not in allowed)
            for axis, allowed in shuffle.info.domain.allowed.items()
            if axis != "order"
        }
        domain = Domain(
            allowed=domain.allowed | {"order": (*domain.levels("order"), "shuffle")},
            forbidden=(
                *domain.forbidden,
                *(
                    {axis: levels, "order": ("shuffle",)}
                    for axis, levels in flash_only.items()
                    if levels
                ),
            ),
            source=f"{domain.source}; {shuffle.info.domain.source}",
        )

    def call(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | str]) -> None:
        writers[str(scalars["kv_cache_layout"])](tensors, scalars)

    return kernel_adapter(
        "vllm:reshape_and_cache",
        "reshape_and_cache",
        call,
        domain=domain,
        quantise=flash.info.quantise,
        partner="builtin:gather_cache",
        content=flash.info.content,
    )


def _strided_as_nhd(call: Call) -> Call:
    """HND caches are handed over as NHD views: SHUFFLE alone is a format of its own."""

    def as_nhd(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | str]) -> None:
        layout = "SHUFFLE" if scalars["kv_cache_layout"] == "SHUFFLE" else "NHD"
        call(tensors, {**scalars, "kv_cache_layout": layout})

    return as_nhd


def _aiter_fa(backend: str, arch: str, *, order: Levels) -> dict[str, Levels]:
    """The allowed levels that both AITER kernels share.

    A K/V-first backend meets its own shape and the hybrid interleave of it. From #43660 the
    shape is blocks-first, and K/V-first storage remains through restriding (#47685) and, later,
    through the layout LHBNC.
    """
    kv_first = re.search(r"return \(2, num_blocks,", backend) is not None
    layouts = ("kv_first", "hybrid") if kv_first else ("kv_first", "blocks_first", "hybrid")
    strided = any(level != "shuffle" for level in order)
    return CONVENTIONAL | {
        "order": order,
        "layout": layouts_of(layouts, strided and is_packed(backend)),
        "block_size": BLOCKS_OF_16,
        "head_size": POWERS_OF_TWO,
        "model_dtype": ("bf16", "fp16"),
        # forward() views every fp8 cache, fp8_e5m2 too, as the platform's fp8_dtype().
        "cache_dtype": ("bf16", "fp16", dialect_of(arch)),
    }


def _gather_orders(backend: str, function: str) -> Levels:
    """NHD always; HND where packed caches are HND views; SHUFFLE where the function knows it."""
    return (
        "nhd",
        *(("hnd",) if is_packed(backend) else ()),
        *(("shuffle",) if "SHUFFLE" in function else ()),
    )


def _calls_never_dequantise(backend: str) -> bool:
    """Whether every call passes dequant=False, so that fp8 caches never come through here."""
    passed = re.findall(r"\bdequant=([^,\n]+)", backend)
    return bool(passed) and set(passed) == {"False"}
