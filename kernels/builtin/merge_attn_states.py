"""merge_attn_states: attention over a prefix and attention over the rest make that over both.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:merge_attn_states`.
Shapes (any strides, those of each tensor its own):

    prefix_output, suffix_output, output   `[num_tokens, num_heads, head_size]`
    prefix_lse, suffix_lse                 `[num_heads, num_tokens]` float32, log-sum-exps of scores
    output_lse                             the same, or None where nobody asks

A part without keys has the log-sum-exp -inf, or +inf, and its output is not read. From token
`prefill_tokens_with_context` on there is no prefix: those rows are copied.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

SIZES = (
    "prefix_row_stride",
    "prefix_head_stride",
    "prefix_dim_stride",
    "suffix_row_stride",
    "suffix_head_stride",
    "suffix_dim_stride",
    "output_row_stride",
    "output_head_stride",
    "output_dim_stride",
    "prefix_lse_head_stride",
    "prefix_lse_token_stride",
    "suffix_lse_head_stride",
    "suffix_lse_token_stride",
    "output_lse_head_stride",
    "output_lse_token_stride",
    "head_size",
    "num_tokens_with_context",
    "has_output_lse",
)
"""What the kernel is not compiled anew for: strides and sizes, of which each batch has its own."""


@triton.jit(do_not_specialize=SIZES)
def merge_attn_states_kernel(
    prefix_output_ptr,
    prefix_lse_ptr,
    suffix_output_ptr,
    suffix_lse_ptr,
    output_ptr,
    output_lse_ptr,
    prefix_row_stride: tl.int64,
    prefix_head_stride: tl.int64,
    prefix_dim_stride: tl.int64,
    suffix_row_stride: tl.int64,
    suffix_head_stride: tl.int64,
    suffix_dim_stride: tl.int64,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
    prefix_lse_head_stride: tl.int64,
    prefix_lse_token_stride: tl.int64,
    suffix_lse_head_stride: tl.int64,
    suffix_lse_token_stride: tl.int64,
    output_lse_head_stride: tl.int64,
    output_lse_token_stride: tl.int64,
    head_size,
    num_tokens_with_context,
    has_output_lse,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """One program merges one head of one token. Strides count elements."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size
    has_context = token < num_tokens_with_context

    # A token without context has an empty prefix, and a suffix of which nobody need know how much
    # it weighs.
    prefix_lse_at = head * prefix_lse_head_stride + token * prefix_lse_token_stride
    suffix_lse_at = head * suffix_lse_head_stride + token * suffix_lse_token_stride
    prefix_lse = tl.load(prefix_lse_ptr + prefix_lse_at, mask=has_context, other=float("-inf"))
    asked = has_context | (has_output_lse > 0)
    suffix_lse = tl.load(suffix_lse_ptr + suffix_lse_at, mask=asked, other=0.0)
    if has_context:
        # FlashAttention 2 says +inf of a part without keys.
        prefix_lse = tl.where(prefix_lse == float("inf"), float("-inf"), prefix_lse)
        suffix_lse = tl.where(suffix_lse == float("inf"), float("-inf"), suffix_lse)
    has_prefix = prefix_lse > float("-inf")
    has_suffix = (suffix_lse > float("-inf")) | (has_context == 0)

    # The larger of two weights is one, so that none overflows. Two empty parts have no larger one.
    largest = tl.maximum(prefix_lse, suffix_lse)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    prefix_weight = tl.exp(prefix_lse - base)
    suffix_weight = tl.exp(suffix_lse - base)
    total = prefix_weight + suffix_weight
    divisor = tl.where(total > 0, total, 1.0)

    # The output of an empty part is whatever was there before, NaN perhaps: it is not read.
    prefix_at = token * prefix_row_stride + head * prefix_head_stride + dim * prefix_dim_stride
    suffix_at = token * suffix_row_stride + head * suffix_head_stride + dim * suffix_dim_stride
    prefix = tl.load(prefix_output_ptr + prefix_at, mask=inside & has_prefix, other=0.0)
    suffix = tl.load(suffix_output_ptr + suffix_at, mask=inside & has_suffix, other=0.0)
    merged = prefix.to(tl.float32) * (prefix_weight / divisor)
    merged += suffix.to(tl.float32) * (suffix_weight / divisor)
    result = tl.where(has_context, merged.to(output_ptr.dtype.element_ty), suffix)
    output_at = token * output_row_stride + head * output_head_stride + dim * output_dim_stride
    tl.store(output_ptr + output_at, result, mask=inside)

    if has_output_lse:
        merged_lse = tl.where(total > 0, tl.log(divisor) + base, float("-inf"))
        lse = tl.where(has_context, merged_lse, suffix_lse)
        output_lse_at = head * output_lse_head_stride + token * output_lse_token_stride
        tl.store(output_lse_ptr + output_lse_at, lse)


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    """Fill `output`, and `output_lse` if there is one, with what attention over both parts gives.

    Of `prefill_tokens_with_context` tokens, all where it is None, there is a prefix.
    """
    num_tokens, num_heads, head_size = output.shape
    if num_tokens == 0:
        return
    with_context = num_tokens
    if prefill_tokens_with_context is not None:
        with_context = prefill_tokens_with_context
    merge_attn_states_kernel[(num_tokens, num_heads)](
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        output,
        # Where nobody asks some pointer stands for it: nothing is written there.
        suffix_lse if output_lse is None else output_lse,
        *prefix_output.stride(),
        *suffix_output.stride(),
        *output.stride(),
        *prefix_lse.stride(),
        *suffix_lse.stride(),
        *(suffix_lse if output_lse is None else output_lse).stride(),
        head_size,
        with_context,
        int(output_lse is not None),
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
    )
