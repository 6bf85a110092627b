"""vLLM's kernels for pages of one row a token: the sparse indexer's cache, and DeepSeek V4's.

What a function accepts is read off its own source and off the backend that calls it: whether codes
lie in tiles, which blocks and heads there are, and whether layers lie side by side in a block.
"""

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter, Call
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.kernels.vllm_backends import content_of_module, function_of, returned
from kvfuzz.model.axes import Domain
from kvfuzz.model.ops.latent_axes import GATHER_INDEX, INDEX, INSERT_V4, LATENT_SIZES
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.vocabulary import BLOCK_SIZES, PAGES, Levels

SPARSE = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
V4 = "vllm/models/deepseek_v4/common/ops/cache_utils.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
INTERFACE = "vllm/v1/kv_cache_interface.py"

QUANTISE = Quantise(
    "x/s",
    f"{SPARSE}: _indexer_k_quant_and_cache_kernel",
    scale_floor=0.0,
    absmax_floor=1e-4,
    largest={"e4m3fnuz": 224.0},
)


def index_writer(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:indexer_quant_and_cache. Raises NotCheckedError where a tree has no such
    function, or `arch` is none of ROCm's."""
    module, function = _function(tree, arch, "indexer_k_quant_and_cache_triton")
    source = inspect.getsource(function)
    # A tree that does not reinterpret bytes itself was handed codes.
    takes_bytes = re.search(r"head_dim\]\s*\.view\(", source) is not None

    def call(tensors: Tensors, scalars: Scalars) -> None:
        cache = tensors["kv_cache"]
        if not takes_bytes:
            cache = cache.view(TORCH_DTYPES[str(scalars["cache_dtype"])])
        function(
            tensors["k"],
            cache,
            tensors["slot_mapping"],
            int(scalars["quant_block_size"]),
            scalars["scale_fmt"] or None,
        )

    # Rows of k follow each other, which has the dtype of the model.
    allowed = _allowed(tree, arch) | {"model_dtype": ("bf16", "fp16"), "rows": ("dense",)}
    forms = _forms(source)
    return _adapter("indexer_quant_and_cache", INDEX, call, allowed, forms, module)


def index_gather(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:gather_indexer. Raises as `index_writer` does."""
    module, function = _function(tree, arch, "cp_gather_indexer_k_quant_cache_triton")
    takes_layout = "cache_layout" in inspect.signature(function).parameters

    def call(tensors: Tensors, scalars: Scalars) -> None:
        layout = {}
        if takes_layout and scalars["block_tile_size"] == 1:
            layout["cache_layout"] = "NORMAL"
        function(
            tensors["kv_cache"],
            tensors["k"],
            tensors["k_scale"],
            tensors["block_table"],
            tensors["cu_seqlens_kv"],
            token_to_seq=tensors["token_to_batch"],
            **layout,
        )

    forms = () if takes_layout else _forms(inspect.getsource(function))
    allowed = _allowed(tree, arch) | {"rows": ("dense",)}
    return _adapter("gather_indexer", GATHER_INDEX, call, allowed, forms, module)


def v4_writer(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:quantize_and_insert_k_cache. Raises as `index_writer` does."""
    module, function = _function(tree, arch, "quantize_and_insert_k_cache", V4)
    knows_fnuz = "use_fnuz" in inspect.signature(function).parameters
    fnuz = knows_fnuz and dialect_of(arch) == "e4m3fnuz"
    domain = Domain(
        allowed={
            "cache_dtype": ("e4m3fn", "e4m3fnuz") if fnuz else ("e4m3fn",),
            # 256 tokens, or those that are left of them after compression by 4 or 128.
            "block_size": ("2", "64", "128"),
            "rows": ("dense",),
        },
        source=f"{V4}: quantize_and_insert_k_cache, and the block sizes that it is warmed up for",
    )
    name, content = "quantize_and_insert_k_cache", content_of_module(module)
    how = msgspec.structs.replace(QUANTISE, source=f"{V4}: quantize_and_insert_k_kernel")
    info = TargetInfo(f"vllm:{name}", INSERT_V4, domain, how, "", content)
    return Adapter(info, bind(function, INSERT_V4), (AssertionError,))


def _forms(source: str) -> tuple[dict[str, Levels], ...]:
    """What a function that chooses the form by the block size never sees: rows in a larger block,
    or, where it knows no tiles, tiles."""
    if re.search(r'"NORMAL" if block_size == 1 else "SHUFFLE"', source):
        larger = tuple(str(size) for size in BLOCK_SIZES if size > 1)
        return ({"page_form": ("flat",), "block_size": larger},)
    return ({"page_form": ("tiled",)},)


def _allowed(tree: SourceTree, arch: str) -> dict[str, Levels]:
    packs = "block_stride" in _text(tree, INTERFACE)
    return {
        "cache_dtype": (dialect_of(arch),),
        "block_size": _block_sizes(_text(tree, INDEXER)),
        "latent_size": _head_sizes(_text(tree, INDEXER)),
        "nesting": ("layer_first", "block_first") if packs else ("layer_first",),
        "page": PAGES if packs else ("exact",),
    }


def _block_sizes(backend: str) -> Levels:
    """Those of kernels on ROCm: `[1, MultipleOf(16)] if current_platform.is_rocm() else ...`."""
    said = returned(backend, "get_supported_kernel_block_sizes").partition(" if ")[0]
    multiples = [int(unit) for unit in re.findall(r"MultipleOf\((\d+)\)", said)]
    exact = [int(size) for size in re.findall(r"(?<!\()\b(\d+)\b", said)]
    return tuple(
        str(size)
        for size in BLOCK_SIZES
        if size in exact or any(size % unit == 0 for unit in multiples)
    )


def _head_sizes(backend: str) -> Levels:
    sizes = re.findall(r"\d+", returned(backend, "get_supported_head_sizes"))
    return tuple(size for size in LATENT_SIZES if size in sizes)


def _adapter(
    name: str,
    op: str,
    call: Call,
    allowed: dict[str, Levels],
    forbidden: tuple[dict[str, Levels], ...],
    module: ModuleType,
) -> Adapter:
    domain = Domain(
        allowed=allowed,
        forbidden=forbidden,
        source=f"{SPARSE}: {name}; {INDEXER}: get_supported_kernel_block_sizes, "
        f"get_supported_head_sizes; {INTERFACE}: KVCacheTensor",
    )
    return Adapter(
        TargetInfo(f"vllm:{name}", op, domain, QUANTISE, "", content_of_module(module)), call
    )


def _function(
    tree: SourceTree, arch: str, name: str, file: str = SPARSE
) -> tuple[ModuleType, Callable[..., Any]]:
    # Elsewhere Triton's quotients are off by some ulps, and with them the scales.
    if not arch.startswith("gfx"):
        raise NotCheckedError(f"{file}: on ROCm alone, and the arch is {arch}")
    module = tree.load(file)
    return module, function_of(module, name)


def _text(tree: SourceTree, file: str) -> str:
    path = tree.root / file
    if not path.is_file():
        raise NotCheckedError(f"{tree.root} has no {file}")
    return path.read_text()
