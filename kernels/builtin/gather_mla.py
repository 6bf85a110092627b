"""gather_mla: copy runs of cached tokens out of MLA's cache into dense rows.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:gather_mla`. vLLM calls
it cp_gather_cache and gather_and_maybe_dequant_cache. Shapes:

    kv_cache          `[num_blocks, block_size, W]`; blocks and rows may lie apart
    out               `[T, W]`, what is written
    block_table       `[num_sequences, width]` int32
    seq_starts        `[num_sequences]` int32, position of the first token to gather
    cu_seqlens_kv     `[num_sequences + 1]` int32, where its rows start in the output
    token_to_batch    `[T]` int32, the sequence of each output row
    scale             `[1]` float32; an fp8 element is read as float32(byte) * scale
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)

FEWEST_LANES = 128
"""Small rows share a compilation."""

SIZES = (
    "block_table_stride",
    "block_stride",
    "token_stride",
    "out_stride",
    "block_size",
    "row_size",
)
"""What the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=SIZES)
def gather_mla_kernel(
    kv_cache_ptr,
    out_ptr,
    block_table_ptr,
    seq_starts_ptr,
    cu_seqlens_kv_ptr,
    token_to_batch_ptr,
    scale_ptr,
    block_table_stride: tl.int64,
    block_stride: tl.int64,
    token_stride: tl.int64,
    out_stride: tl.int64,
    block_size,
    row_size,
    PADDED_SIZE: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program copies one token. Strides count elements."""
    row = tl.program_id(0)
    dim = tl.arange(0, PADDED_SIZE)
    inside = dim < row_size

    sequence = tl.load(token_to_batch_ptr + row)
    start = tl.load(seq_starts_ptr + sequence)
    position = start + row - tl.load(cu_seqlens_kv_ptr + sequence)
    entry = sequence * block_table_stride + position // block_size
    # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
    block = tl.load(block_table_ptr + entry).to(tl.int64)
    token = position % block_size

    x = tl.load(kv_cache_ptr + block * block_stride + token * token_stride + dim, mask=inside)
    if DEQUANT:
        x = x.to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + row * out_stride + dim, x.to(out_ptr.dtype.element_ty), mask=inside)


def gather_mla(
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_starts: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    token_to_batch: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Fill `out` from the cache."""
    num_tokens, row_size = out.shape
    if num_tokens == 0:
        return
    gather_mla_kernel[(num_tokens,)](
        kv_cache,
        out,
        block_table,
        seq_starts,
        cu_seqlens_kv,
        token_to_batch,
        scale,
        block_table.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        out.stride(0),
        kv_cache.shape[1],
        row_size,
        PADDED_SIZE=triton.next_power_of_2(max(row_size, FEWEST_LANES)),
        DEQUANT=kv_cache.dtype in FP8,
    )
