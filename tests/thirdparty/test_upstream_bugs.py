"""Bugs of vLLM releases that the lane's access rules bring to light, beside what is right there.

Their ops are no targets yet, so they are no seeds; each names the release, the line and the input.
"""

import pytest
import torch

pytestmark = pytest.mark.thirdparty

HF3FS = "vllm/distributed/kv_transfer/kv_connector/v1/hf3fs/utils/gather_scatter_helper.py"
BLOCK_TABLE = "vllm/v1/worker/gpu/block_table.py"
BF16 = torch.bfloat16.itemsize


@pytest.fixture
def raw_lane(unwatched_surface):
    """The lane below the tables, for memory that is too large to fill."""
    return unwatched_surface._lane


def _hf3fs(raw_lane, surface, num_blocks):
    """Scatter one token into the last of `num_blocks` blocks of 32,768 elements (0.33.0)."""
    module = surface.load("0.33.0", HF3FS)
    heads, block_size, content = 8, 16, 256
    stride = heads * block_size * content
    memory = raw_lane.allocate("layer", num_blocks * stride * BF16)
    source = raw_lane.allocate("source", heads * content * BF16).view(torch.bfloat16)
    source.fill_(1.5)
    pointers = raw_lane.allocate("pointers", 8).view(torch.int64)
    pointers[0] = memory.data_ptr()
    token = (num_blocks - 1) * block_size + 3
    with raw_lane.observe() as access:
        module.scatter_kv_caches(
            pointers,
            num_blocks * block_size,
            source.view(1, heads, 1, content),
            [token],
            block_size,
            heads,
            content,
            (stride, content, heads * content, 1),
        )
    layer = memory.view(torch.bfloat16).view(num_blocks, block_size, heads, content)
    return access, layer[-1, 3]


def test_hf3fs_scatter_of_0_33_0_computes_block_offsets_in_32_bits(raw_lane, unwatched_surface):
    """block_idx * block_stride wraps from 2**31 elements on: 65,537 blocks of these, 4 GiB."""
    access, stored = _hf3fs(raw_lane, unwatched_surface, num_blocks=65_546)
    overflow = access.overflows[0]
    assert (overflow.reached, overflow.file) == ("address", "gather_scatter_helper.py")
    assert overflow.offset - overflow.exact == -(1 << 32) * BF16
    assert not stored.any()


def test_hf3fs_scatter_of_0_33_0_is_right_below_2_31_elements(raw_lane, unwatched_surface):
    access, stored = _hf3fs(raw_lane, unwatched_surface, num_blocks=65_536)
    assert (access.overflows, access.strays, access.found_races) == ([], [], [])
    assert (stored == 1.5).all()


@pytest.mark.parametrize(("release", "strays"), [("0.19.0", 48), ("0.24.0", 0)])
def test_block_tables_are_zeroed_by_the_width_of_the_first_group(
    unwatched_surface, raw_lane, release, strays
):
    """Groups of widths 32 and 8: to 0.19.0 padding rows of the second are cleared 32 wide."""
    surface = unwatched_surface
    if release >= "0.24":
        surface.load(release, "vllm/v1/worker/gpu/buffer_utils.py")
    module = surface.load(release, BLOCK_TABLE)
    widths, rows = (32, 8), 4
    tables = [
        [raw_lane.allocate(f"{name}{width}", 4 * rows * width) for width in widths]
        for name in ("source", "gathered")
    ]
    pointers = [
        surface.tensor(name, torch.tensor([each.data_ptr() for each in group])).view(torch.uint64)
        for name, group in zip(("sources", "targets"), tables, strict=True)
    ]
    strides = surface.tensor("strides", torch.tensor(widths))
    used = surface.tensor("used", torch.ones(2, rows, dtype=torch.int32))
    requests = surface.tensor("requests", torch.tensor([0], dtype=torch.int32))
    width = (widths[0],) if release < "0.24" else ()
    with raw_lane.observe() as access:
        module._gather_block_tables_kernel[(2, rows)](
            requests, *pointers, strides, used, rows, 1, *width, BLOCK_SIZE=1024
        )
    assert sum(each.count for each in access.strays if each.kind == "write") == strays
