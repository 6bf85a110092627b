"""vLLM's Triton cache kernels out of a source tree: `--source vllm=DIR`.

Everything is read off the tree: what a function accepts from its own source, what the engine
hands it from the backend beside it. No release number is known here.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels import vllm_latent, vllm_slots
from kvfuzz.kernels.adapter import Adapter, Call, content_of
from kvfuzz.kernels.contracts import CONVENTIONAL, bind
from kvfuzz.kernels.fp8 import dialect_of, scales_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_pages import pages_of
from kvfuzz.kernels.vllm_stubs import known
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec
from kvfuzz.model.vocabulary import BLOCK_SIZES, HEAD_SIZES, Levels, conflict

AITER_FA = "vllm/v1/attention/backends/rocm_aiter_fa.py"
TRITON_ATTN = "vllm/v1/attention/backends/triton_attn.py"
FLASH = (
    "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
    "vllm/attention/ops/triton_reshape_and_cache_flash.py",
)

BLOCKS_OF_16: Levels = tuple(str(n) for n in BLOCK_SIZES if n % 16 == 0)
"""Both backends refuse other block sizes (get_kv_cache_shape, get_supported_kernel_block_sizes)."""
POWERS_OF_TWO: Levels = tuple(str(d) for d in HEAD_SIZES if d & (d - 1) == 0)
"""What tl.arange(0, head_size) can be."""

REFUSALS = (AssertionError, NotImplementedError)
"""The functions assert on what they do not support."""

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
        "vllm:slot_mapping_v1": vllm_slots.v1,
        "vllm:slot_mapping_v2": vllm_slots.v2,
        "vllm:indexer_quant_and_cache": vllm_latent.index_writer,
        "vllm:gather_indexer": vllm_latent.index_gather,
        "vllm:quantize_and_insert_k_cache": vllm_latent.v4_writer,
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
    function = _function(module, "cp_mha_gather_cache")
    backend, own = _text(module), inspect.getsource(function)
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
    return _adapter(
        "vllm:cp_mha_gather_cache",
        "gather_cache",
        _strided_as_nhd(bind(function, "gather_cache")),
        domain=domain,
        partner="vllm:reshape_and_cache" if has_writer else "builtin:reshape_and_cache",
        content=_content(module),
    )


def _shuffle(tree: SourceTree, arch: str) -> Adapter:
    module = tree.load(AITER_FA)
    function = _function(module, "reshape_and_cache_shuffle_triton")
    pages = pages_of(tree.root, _text(module))
    allowed = _aiter_fa(_text(module), arch, order=("shuffle",)) | pages.allowed
    nestings = pages.levels("nesting")
    allowed["nesting"] = tuple(
        each for each in nestings if conflict({"order": "shuffle", "nesting": each}) is None
    )
    domain = Domain(
        allowed=allowed | {"scale": scales_of(arch)},
        forbidden=pages.forbidden,
        source=f"{AITER_FA}: reshape_and_cache_shuffle_triton, get_kv_cache_shape",
    )
    return _adapter(
        "vllm:reshape_and_cache_shuffle",
        "reshape_and_cache",
        bind(function, "reshape_and_cache"),
        domain=domain,
        quantise=Quantise("x/s", f"{AITER_FA}: reshape_and_cache_shuffle_kernel"),
        partner="vllm:cp_mha_gather_cache",
        content=_content(module),
    )


def _flash(tree: SourceTree, arch: str) -> Adapter:
    module = tree.load(*FLASH)
    function = _function(module, "triton_reshape_and_cache_flash")
    where = Path(str(module.__file__)).relative_to(tree.root)
    # Before it took a head stride, the function asserted that heads lie side by side.
    dense_heads = "head_stride == head_size" in inspect.getsource(function)
    path = tree.root / TRITON_ATTN
    backend = path.read_text() if path.is_file() else ""
    packed = not backend or _is_packed(backend)
    pages = pages_of(tree.root, backend)
    domain = Domain(
        allowed=CONVENTIONAL
        | pages.allowed
        | {
            "order": ("nhd",) if dense_heads else ("nhd", "hnd"),
            "layout": _layouts(("kv_first", "blocks_first", "hybrid"), packed and not dense_heads),
            "block_size": BLOCKS_OF_16,
            # Every fp8 spelling, e5m2 included, is stored as the platform's fp8_dtype().
            "cache_dtype": ("fp32", "bf16", "fp16", dialect_of(arch)),
            "scale": scales_of(arch),
        },
        forbidden=pages.forbidden,
        source=f"{where}: triton_reshape_and_cache_flash; {TRITON_ATTN}: get_kv_cache_shape, "
        "get_supported_kernel_block_sizes",
    )
    return _adapter(
        "vllm:reshape_and_cache_flash",
        "reshape_and_cache",
        bind(function, "reshape_and_cache"),
        domain=domain,
        quantise=Quantise("x/s", f"{where}: reshape_and_cache_kernel_flash"),
        # The gather of the same tree takes a part of this domain only.
        partner="builtin:gather_cache",
        content=_content(module),
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

    return _adapter(
        "vllm:reshape_and_cache",
        "reshape_and_cache",
        call,
        domain=domain,
        quantise=flash.info.quantise,
        partner="builtin:gather_cache",
        content=flash.info.content,
    )


def _adapter(
    name: str,
    op: str,
    call: Call,
    *,
    domain: Domain,
    partner: str,
    content: str,
    quantise: Quantise | None = None,
) -> Adapter:
    info = TargetInfo(name, op, domain, quantise or Quantise(), partner, content)
    return Adapter(info, call, REFUSALS)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise NotCheckedError(f"{module.__file__} has no function {name}: absent in this tree")
    return function


def _text(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def _content(module: ModuleType) -> str:
    return content_of(Path(str(module.__file__)).read_bytes())


def _strided_as_nhd(call: Call) -> Call:
    """HND caches are handed over as NHD views: SHUFFLE alone is a format of its own."""

    def as_nhd(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | str]) -> None:
        layout = "SHUFFLE" if scalars["kv_cache_layout"] == "SHUFFLE" else "NHD"
        call(tensors, {**scalars, "kv_cache_layout": layout})

    return as_nhd


def _is_packed(backend: str) -> bool:
    """Whether a backend takes K and V out of one content dimension (#44455)."""
    return re.search(r"transpose\(1, 2\)\s*\.split\(", backend) is not None


def _layouts(layouts: Levels, packed: bool) -> Levels:
    return (*layouts, "content_packed") if packed else layouts


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
        "layout": _layouts(layouts, strided and _is_packed(backend)),
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
        *(("hnd",) if _is_packed(backend) else ()),
        *(("shuffle",) if "SHUFFLE" in function else ()),
    )


def _calls_never_dequantise(backend: str) -> bool:
    """Whether every call passes dequant=False, so that fp8 caches never come through here."""
    passed = re.findall(r"\bdequant=([^,\n]+)", backend)
    return bool(passed) and set(passed) == {"False"}
