"""Our decode attention against a softmax in fp64 over elements gathered by index arithmetic."""

import math

import pytest
import torch

from kvfuzz.cpu import CpuLane
from kvfuzz.kernels.builtin.paged_attention import paged_attention

FP8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


@pytest.fixture(scope="module", autouse=True)
def lane():
    lane = CpuLane()
    lane.activate()
    yield lane
    lane.deactivate()


# Element strides (block, token, head, dim) and offsets of K and V in one allocation, for `blocks`
# blocks of `n` tokens, `h` heads of `d`, where a page is `p = n * h * d` elements.
LAYOUTS = {
    "kv_first": lambda b, n, h, d, p: ((p, h * d, d, 1), 0, b * p),
    "hybrid": lambda b, n, h, d, p: ((2 * p, h * d, d, 1), 0, p),
    "hnd": lambda b, n, h, d, p: ((2 * p, d, n * d, 1), 0, p),
    "content_packed": lambda b, n, h, d, p: ((2 * p, 2 * d, 2 * n * d, 1), 0, d),
    "dim_major": lambda b, n, h, d, p: ((2 * p, 1, d * n, n), 0, p),
    "padded_pages": lambda b, n, h, d, p: ((2 * p + 48, h * d, d, 1), 16, p + 16),
}


class Decode:
    """One decode step: the cache as flat bytes, its views, and the block table."""

    def __init__(
        self,
        lengths,
        layout="kv_first",
        *,
        block_size=4,
        kv_heads=2,
        query_heads=4,
        head_size=16,
        cache_dtype=torch.float32,
        dtype=torch.float32,
        scales=(1.0, 1.0),
        dead=math.nan,
    ):
        random = torch.Generator().manual_seed(len(lengths) + head_size)
        width = -(-max(*lengths, 1) // block_size) + 2  # two columns that nobody uses
        blocks = len(lengths) * width + 1
        page = block_size * kv_heads * head_size
        strides, k_base, v_base = LAYOUTS[layout](blocks, block_size, kv_heads, head_size, page)
        self.strides, self.bases = strides, (k_base, v_base)
        self.flat = torch.full((blocks * (2 * page + 48) + 64,), dead).to(cache_dtype)
        shape = (blocks, block_size, kv_heads, head_size)
        self.caches = [self.flat.as_strided(shape, strides, base) for base in self.bases]
        ids = torch.randperm(blocks - 1, generator=random)[: len(lengths) * width] + 1
        # Columns past a sequence keep the blocks of whoever was there before.
        self.table = ids.reshape(len(lengths), width).to(torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.block_size, self.scales = block_size, scales
        for row, length in enumerate(lengths):
            for token in range(length):
                block, slot = int(self.table[row, token // block_size]), token % block_size
                for cache in self.caches:
                    values = torch.randn(kv_heads, head_size, generator=random)
                    cache[block, slot] = values.to(cache_dtype)
        self.query = torch.randn(len(lengths), query_heads, head_size, generator=random).to(dtype)
        self.output = torch.full_like(self.query, math.nan)

    def run(self):
        paged_attention(
            self.query,
            *self.caches,
            self.output,
            self.table,
            self.lengths,
            *[torch.tensor([scale]) for scale in self.scales],
            softmax_scale=self.query.shape[2] ** -0.5,
        )
        return self.output

    def expected(self):
        """In fp64, each element by its index in the allocation."""
        sequences, query_heads, head_size = self.query.shape
        group = query_heads // self.caches[0].shape[2]
        exact = self.flat.float().double()
        block_stride, token_stride, head_stride, dim_stride = self.strides
        dims = torch.arange(head_size) * dim_stride
        result = torch.zeros(sequences, query_heads, head_size, dtype=torch.float64)
        for row in range(sequences):
            position = torch.arange(int(self.lengths[row]))
            block = self.table[row].long()[position // self.block_size]
            token = block * block_stride + position % self.block_size * token_stride
            for head in range(query_heads):
                at = (token + head // group * head_stride)[:, None] + dims
                k, v = (
                    exact[base + at] * scale
                    for base, scale in zip(self.bases, self.scales, strict=True)
                )
                scores = k @ self.query[row, head].double() * head_size**-0.5
                result[row, head] = scores.softmax(0) @ v
        return result

    def check(self):
        ulp = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
        torch.testing.assert_close(
            self.run().double(), self.expected(), rtol=ulp[self.output.dtype], atol=4e-6
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stride_is_taken_from_the_view(layout):
    Decode([1, 4, 11], layout).check()


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_query_heads_share_the_head_of_their_group(query_heads, kv_heads):
    Decode([5, 9], query_heads=query_heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_sequences_end_anywhere_in_a_block(length):
    Decode([length, 1, length]).check()


def test_an_empty_sequence_gives_zeros():
    decode = Decode([0, 3])
    decode.check()
    assert not decode.output[0].any()


@pytest.mark.parametrize(("block_size", "head_size"), [(16, 80), (5, 24), (3, 1), (1, 16)])
def test_sizes_need_not_be_powers_of_two(block_size, head_size):
    Decode([1, 7, 18], "hybrid", block_size=block_size, head_size=head_size).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_queries_and_caches(dtype):
    Decode([2, 9], "content_packed", cache_dtype=dtype, dtype=dtype).check()


@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
def test_an_fp8_cache_is_read_with_its_scales(cache_dtype):
    Decode([1, 6, 9], "hybrid", cache_dtype=cache_dtype, scales=(0.7, 1.3)).check()


def test_large_scores_do_not_overflow():
    decode = Decode([9, 4])
    decode.query *= 300.0
    decode.flat.copy_(torch.where(decode.flat.isnan(), decode.flat, decode.flat.round()))
    torch.testing.assert_close(decode.run().double(), decode.expected(), rtol=1e-3, atol=1e-3)


def test_slots_without_tokens_and_stale_table_columns_are_never_read(lane):
    decode = Decode([1, 6, 4])
    with lane.observe() as access:
        decode.run()
    read = torch.from_numpy(access.read("tensor:key_cache_ptr")).view(-1, 4)
    assert not read[decode.flat.isnan()].any()
    assert read[~decode.flat.isnan()].all()
    assert access.strays == []
    table = torch.from_numpy(access.read("tensor:block_table_ptr")).view(3, -1, 4)[..., 0]
    assert table.sum(1).tolist() == [1, 2, 1]


def test_query_and_output_may_be_strided():
    decode = Decode([3, 5])
    room = torch.full((2, 16, 4, 2), math.nan)
    room[..., 0] = decode.query.transpose(1, 2)
    decode.query = room[..., 0].transpose(1, 2)
    decode.output = room[..., 1].transpose(1, 2)
    assert decode.output.stride() == (128, 2, 8)
    decode.check()


def test_heads_that_do_not_divide_into_groups_are_refused_before_any_launch():
    with pytest.raises(NotImplementedError, match=r"num_query_heads=3 must be a multiple of"):
        Decode([3], query_heads=3, kv_heads=2).run()


def test_no_sequences_launch_nothing(lane):
    decode = Decode([3])
    decode.query, decode.output = decode.query[:0], decode.output[:0]
    decode.lengths = decode.lengths[:0]
    with lane.observe() as access:
        decode.run()
    assert access.launches == []
