"""Kernels that move or clear blocks by absolute addresses: every byte of source and destination."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

HF3FS = "vllm/distributed/kv_transfer/kv_connector/v1/hf3fs/utils/gather_scatter_helper.py"
MAMBA_OPS = "vllm/model_executor/layers/mamba/ops"


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def moves(surface, sizes, gap):
    """Two buffers and jobs from one to the other, in no order: addresses, and (source, target)."""
    span = max(sizes) + gap
    buffers = [surface.bytes(name, span * len(sizes) + gap) for name in ("src", "dst")]
    orders = [surface.random.permutation(len(sizes)) for _ in buffers]
    jobs = [tuple(int(order[i]) * span + gap for order in orders) for i in range(len(sizes))]
    addresses = [
        surface.tensor(f"{name}_addrs", int64(*(buffer.address + job[side] for job in jobs)))
        for side, (name, buffer) in enumerate(zip(("src", "dst"), buffers, strict=True))
    ]
    return buffers, jobs, addresses


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"], ids="swap_blocks-{}".format)
def test_swap_blocks(surface, release):
    module = surface.load(release, "vllm/v1/kv_offload/cpu/swap_blocks_triton.py")
    # Its caller passes multiples of eight bytes.
    sizes = (8, 64, 72, 256, 520, 0, 136, 1024, 40, 512, 504, 8, 264)
    (source, target), jobs, addresses = moves(surface, sizes, gap=24)
    count = surface.tensor("sizes", int64(*sizes))
    module._swap_blocks_kernel[(5,)](*addresses, count, len(sizes), BYTES_PER_CHUNK=256)
    for (at, to), size in zip(jobs, sizes, strict=True):
        target.expect(to, source.mirror[at : at + size])
    surface.check()


@pytest.mark.parametrize(
    "release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"], ids="mamba_batch_memcpy-{}".format
)
def test_batch_memcpy(surface, release):
    module = surface.load(release, "vllm/v1/worker/mamba_utils.py")
    sizes = (1, 1023, 0, 1024, 1025, 3001, 77)
    (source, target), jobs, addresses = moves(surface, sizes, gap=5)
    module.batch_memcpy(*addresses, surface.tensor("sizes", int64(*sizes)))
    for (at, to), size in zip(jobs, sizes, strict=True):
        target.expect(to, source.mirror[at : at + size])
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"], ids="mamba_batch_memcpy-overlapping-{}".format)
def test_batch_memcpy_to_the_left_in_place(surface, release):
    module = surface.load(release, "vllm/v1/worker/mamba_utils.py")
    buffer, size, shift = surface.bytes("state", 4000), 3001, 77
    addresses = [
        surface.tensor(name, int64(buffer.address + 9 + by))
        for name, by in (("src", shift), ("dst", 0))
    ]
    module.batch_memcpy(*addresses, surface.tensor("sizes", int64(size)))
    buffer.expect(9, buffer.mirror[9 + shift : 9 + shift + size].copy())
    surface.check()


@pytest.mark.parametrize(
    "release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"], ids="zero_kv_blocks-{}".format
)
def test_zero_kv_blocks(surface, release):
    module = surface.load(release, "vllm/v1/worker/utils.py")
    blocks, ids = 6, (4, 1, 3)
    # Words of a page and from page to page: one of each per segment from 0.33 on.
    pages = ((48, 48), (48, 48)) if release < "0.33" else ((48, 60), (37, 37), (130, 144))
    buffers = [
        surface.bytes(f"segment.{i}", 4 * (stride * blocks + 8))
        for i, (_, stride) in enumerate(pages)
    ]
    addresses = surface.tensor("seg_addrs", int64(*(buffer.address + 16 for buffer in buffers)))
    block_ids = surface.tensor("block_ids", int64(*ids))
    if release < "0.33":
        module._zero_kv_blocks_kernel[(len(ids) * 2 * 3 + 2,)](
            addresses, block_ids, len(ids), N_SEGS=2, PAGE_SIZE_EL=48, BLOCK_SIZE=16
        )
    else:
        module._zero_kv_blocks_kernel[(len(ids), len(pages), 3)](
            addresses.view(torch.uint64),
            surface.tensor("strides", int64(*(stride for _, stride in pages))),
            surface.tensor("sizes", int64(*(size for size, _ in pages))),
            block_ids,
            BLOCK_SIZE=64,
        )
    for buffer, (size, stride) in zip(buffers, pages, strict=True):
        for block in ids:
            buffer.expect(16 + 4 * block * stride, bytes(4 * size))
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"], ids="mamba_scatter_states-{}".format)
def test_scatter_states(surface, release):
    module = surface.load(release, f"{MAMBA_OPS}/scatter_states.py")
    size, page, rows = 75, 96, (4, 0, 2)
    states, source = surface.bytes("states", 2 * 6 * page), surface.bytes("src", 2 * 3 * (size + 5))
    module._scatter_states_kernel[(3, len(rows))](
        states.view(torch.bfloat16, (6, size), (page, 1)),
        source.view(torch.bfloat16, (3, size), (size + 5, 1)),
        surface.tensor("indices", int32(4, 99, 0, 99, 2, 99)),
        page,
        size + 5,
        2,
        row_size=size,
        BLOCK_SIZE=32,
        launch_pdl=False,
    )
    for i, row in enumerate(rows):
        at = 2 * i * (size + 5)
        states.expect(2 * row * page, source.mirror[at : at + 2 * size])
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"], ids="mamba_gather_initial_states-{}".format)
def test_gather_initial_states(surface, release):
    module = surface.load(release, f"{MAMBA_OPS}/gather_initial_states.py")
    size, page, rows, filled = 75, 96, (4, -1, 2), (True, False, True)
    states, out = surface.bytes("states", 2 * 6 * page), surface.bytes("out", 2 * (3 * size + 8))
    module._gather_initial_states_kernel[(3, len(rows))](
        states.view(torch.bfloat16, (6, size), (page, 1)),
        surface.tensor("indices", int32(*rows)),
        surface.tensor("has_initial_state", torch.tensor(filled)),
        out.view(torch.bfloat16, (3, size)),
        page,
        1,
        1,
        row_size=size,
        BLOCK_SIZE=32,
        launch_pdl=False,
    )
    for i, row in enumerate(rows):
        state = states.mirror[2 * row * page : 2 * (row * page + size)]
        out.expect(2 * i * size, state if filled[i] else bytes(2 * size))
    surface.check()


TOKENS, TAKEN = 40, (33, 7, 8, 44, 38, 0)
"""The token beyond the last one must be left alone."""


def existing():
    return [(i, token) for i, token in enumerate(TAKEN) if token < TOKENS]


def layers(surface, nbytes):
    """Three layers of a cache, each in memory of its own, and their addresses."""
    buffers = [surface.bytes(f"layer.{i}", nbytes + 32) for i in range(3)]
    pointers = surface.tensor("ptrs", int64(*(buffer.address + 16 for buffer in buffers)))
    return buffers, pointers


@pytest.mark.parametrize("release", ["0.24.0"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("op", ["gather", "scatter"], ids="hf3fs_{}".format)
def test_hf3fs_flat(surface, release, kind, op):
    """Caches `[tokens, hidden]`, or `[2, tokens, hidden]` with K and V."""
    module = surface.load(release, HF3FS)
    sides, hidden = (1 if kind == "mla" else 2), 150
    buffers, pointers = layers(surface, 2 * sides * TOKENS * hidden)
    shape = (3, len(TAKEN), hidden) if kind == "mla" else (3, 2, len(TAKEN), hidden)
    dense = surface.bytes("dense", 2 * (int(np.prod(shape)) + 8))
    run = module.gather_kv_caches if op == "gather" else module.scatter_kv_caches
    run(pointers, TOKENS, dense.view(torch.bfloat16, shape), list(TAKEN), kind == "mla")
    for layer, buffer in enumerate(buffers):
        for side in range(sides):
            for i, token in existing():
                paged = 16 + 2 * (side * TOKENS + token) * hidden
                row = 2 * ((layer * sides + side) * len(TAKEN) + i) * hidden
                copy(op, buffer, paged, dense, row, 2 * hidden)
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("op", ["gather", "scatter"], ids="hf3fs_{}".format)
def test_hf3fs_strided(surface, release, layout, op):
    """Caches `[blocks, heads, states, content]` with any strides."""
    module = surface.load(release, HF3FS)
    heads, content, per_block = 3, 50, 8
    head, token = (content, heads * content) if layout == "nhd" else (per_block * content, content)
    block = heads * per_block * content + 14
    buffers, pointers = layers(surface, 2 * block * (TOKENS // per_block))
    shape = (3, heads, len(TAKEN), content)
    dense = surface.bytes("dense", 2 * (int(np.prod(shape)) + 8))
    run = module.gather_kv_caches if op == "gather" else module.scatter_kv_caches
    strides = (block, head, token, 1)
    run(
        pointers, TOKENS, dense.view(torch.bfloat16, shape), list(TAKEN), per_block, heads, content,
        strides,
    )  # fmt: skip
    for layer, buffer in enumerate(buffers):
        for h in range(heads):
            for i, place in existing():
                element = place // per_block * block + place % per_block * token + h * head
                row = 2 * ((layer * heads + h) * len(TAKEN) + i) * content
                copy(op, buffer, 16 + 2 * element, dense, row, 2 * content)
    surface.check()


def copy(op, paged, at, dense, row, size):
    """What a gather or a scatter does with one run of bytes."""
    if op == "gather":
        dense.expect(row, paged.mirror[at : at + size])
    else:
        paged.expect(at, dense.mirror[row : row + size])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.uint8],
    ids=lambda dtype: f"conch-copy_blocks-{str(dtype)[6:]}",
)
def test_conch_copy_blocks(surface, dtype):
    from conch.ops.vllm.copy_blocks import copy_blocks

    blocks, page, stride, pairs = 7, 1500, 1520, ((5, 0), (2, 6), (5, 1))
    size = dtype.itemsize
    sides = [
        [surface.bytes(f"{side}.{i}", blocks * stride * size) for i in range(2)]
        for side in ("key", "value")
    ]
    caches = [
        [buffer.view(dtype, (blocks, page), (stride, 1)) for buffer in side] for side in sides
    ]
    copy_blocks(*caches, surface.tensor("block_mapping", torch.tensor(pairs)))
    for buffer in (*sides[0], *sides[1]):
        for source, target in pairs:
            at = source * stride * size
            buffer.expect(target * stride * size, buffer.mirror[at : at + page * size])
    surface.check()
