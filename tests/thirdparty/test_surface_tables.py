"""Kernels that turn block tables into slots, pages and rows: every element."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

V2 = "vllm/v1/worker/gpu/block_table.py"
V1 = "vllm/v1/worker/block_table.py"
MLA = "vllm/v1/attention/backends/mla/rocm_aiter_mla.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
PAD = -1


def int32(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.int32)


def int64(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.int64)


class Groups:
    """Two groups' block tables of six requests, of unequal widths and block sizes."""

    block_sizes = (16, 12)

    def __init__(self, surface, name, widths=(8, 12)):
        self.widths = widths
        ids = [surface.random.permutation(90)[: 6 * width] for width in self.widths]
        self.tables = [row.reshape(6, width) for row, width in zip(ids, self.widths, strict=True)]
        self.buffers = [surface.given(f"{name}.{i}", int32(t)) for i, t in enumerate(self.tables)]
        addresses = [buffer.address for _, buffer in self.buffers]
        self.pointers = surface.tensor(f"{name}.ptrs", int64(addresses)).view(torch.uint64)


def block_table(surface, release):
    """The module of the block tables, whose pointer helper moved to a file of its own."""
    if release >= "0.24":
        surface.load(release, "vllm/v1/worker/gpu/buffer_utils.py")
    return surface.load(release, V2)


def batch(surface, lengths):
    """Query starts and positions of a batch, each request from another position on."""
    starts = np.cumsum((0, *lengths))
    positions = np.concatenate([7 * i + np.arange(n) for i, n in enumerate(lengths)])
    return starts, positions, surface.tensor("pos", int64(positions))


@pytest.mark.parametrize(
    ("ranks", "release"),
    [(1, "0.13.0"), *((n, r) for n in (1, 2) for r in ("0.18.0", "0.19.0", "0.24.0", "0.33.0"))],
    ids=lambda v: v if isinstance(v, str) else f"compute_slot_mappings-cp{v}",
)
def test_slot_mappings(surface, release, ranks):
    module = block_table(surface, release)
    groups = Groups(surface, "table")
    lengths, longest, rank, interleave = (5, 0, 33, 1), 50, 1 % ranks, 4
    starts, positions, pos = batch(surface, lengths)
    # The second request is padding from 0.33 on.
    states = [4, -1 if release >= "0.33" else 0, 0, 5]
    if release == "0.13.0":
        states = [0, 1, 2, 3]
    out = surface.bytes("slot_mappings", 8 * (2 * longest + 4))
    mapping = out.view(torch.int64, (2, longest))
    tables = (
        groups.pointers,
        surface.tensor("strides", int64(groups.widths)),
        surface.tensor("block_sizes", int32(groups.block_sizes)),
    )
    starts_given = surface.tensor("starts", int32(starts))
    kernel = module._compute_slot_mappings_kernel[(2, 5)]
    sharded = (True, True)
    if release == "0.13.0":
        total = int(starts[-1])
        kernel(
            total, longest, starts_given, pos, *tables, mapping, longest, PAD_ID=PAD, BLOCK_SIZE=16
        )
    else:
        flags = ()
        if release >= "0.33":
            sharded = (True, False)
            flags = (
                surface.tensor("enabled", torch.tensor((True, True))),
                surface.tensor("sharded", torch.tensor(sharded)),
            )
        given = surface.tensor("idx_mapping", int32(states))
        kernel(
            longest, given, starts_given, pos, *tables, *flags, mapping, longest, rank,
            CP_SIZE=ranks, CP_INTERLEAVE=interleave, PAD_ID=PAD, TRITON_BLOCK_SIZE=16,
        )  # fmt: skip
    for group, (table, size) in enumerate(zip(groups.tables, groups.block_sizes, strict=True)):
        slots = np.full(longest, PAD)
        for request, state in enumerate(states):
            if state < 0:
                continue
            for t in range(starts[request], starts[request + 1]):
                parts = ranks if sharded[group] else 1
                slots[t] = slot_of(int(positions[t]), table[state], size, parts, rank, interleave)
        out.expect(8 * group * longest, slots)
    surface.check()


def slot_of(position, row, size, ranks, rank, interleave):
    """The slot of a token, or PAD: runs of `interleave` tokens go round the ranks."""
    block, within = divmod(position, size * ranks)
    run, inside = divmod(within, interleave)
    if run % ranks != rank % ranks:
        return PAD
    return int(row[block]) * size + run // ranks * interleave + inside


@pytest.mark.parametrize("release", ["0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize("ranks", [1, 2], ids="compute_slot_mapping-v1-cp{}".format)
def test_slot_mapping(surface, release, ranks):
    module = surface.load(release, V1)
    size, longest, interleave, rank = 16, 50, 4, ranks - 1
    starts, positions, pos = batch(surface, (5, 0, 33, 1))
    table = surface.random.permutation(90)[:48].reshape(6, 8)
    out = surface.bytes("slot_mapping", 8 * (longest + 4))
    own = release >= "0.33"
    kernel = module.ComputeSlotMappingKernel.kernel if own else module._compute_slot_mapping_kernel
    kernel[(5,)](
        len(positions),
        longest,
        surface.tensor("starts", int32(starts)),
        pos,
        surface.tensor("table", int32(table)),
        8,
        slot_mapping_ptr=out.view(torch.int64, (longest,)),
        TOTAL_CP_WORLD_SIZE=ranks,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=interleave,
        PAD_ID=PAD,
        BLOCK_SIZE=16,
        **{"KV_CACHE_BLOCK_SIZE" if own else "block_size": size},
    )
    slots = np.full(longest, PAD)
    for request in range(4):
        for t in range(starts[request], starts[request + 1]):
            slots[t] = slot_of(int(positions[t]), table[request], size, ranks, rank, interleave)
    out.expect(0, slots)
    surface.check()


@pytest.mark.parametrize(
    "release",
    ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"],
    ids="gather_block_tables-{}".format,
)
def test_gather_block_tables(surface, release):
    module = block_table(surface, release)
    # 0.18 and 0.19 clear the padding rows of all groups to the width of the first one.
    widths = (8, 8) if release in ("0.18.0", "0.19.0") else (8, 12)
    source, target = (Groups(surface, name, widths) for name in ("src", "dst"))
    states, counts = (4, 0, 5), surface.random.integers(0, 8, (2, 6))
    arguments = [
        surface.tensor("mapping", int32(states)),
        source.pointers,
        target.pointers,
        surface.tensor("strides", int64(source.widths)),
        surface.tensor("num_blocks", int32(counts)),
        6,
    ]
    rows = 3 if release < "0.18" else 5
    window, computed = (0, 40), (0, 0, 0, 0, 77, 10)
    if release >= "0.18":
        arguments.append(3)
    if release in ("0.18.0", "0.19.0"):
        arguments.append(widths[0])
    flags = {}
    if release >= "0.33":
        arguments += [
            surface.tensor("computed", int32(computed)),
            surface.tensor("reach", int32(window)),
            surface.tensor("block_sizes", int32(source.block_sizes)),
        ]
        flags["MASK_SLIDING_WINDOW"] = True
    module._gather_block_tables_kernel[(2, rows)](*arguments, BLOCK_SIZE=4, **flags)
    for group, width in enumerate(source.widths):
        buffer = target.buffers[group][1]
        for i, state in enumerate(states):
            row = source.tables[group][state, : counts[group, state]].copy()
            if release >= "0.33" and window[group]:
                # Blocks wholly before the window's reach are the null block.
                first = max(computed[state] - window[group], 0) // source.block_sizes[group]
                row[:first] = 0
            buffer.expect(4 * i * width, row.astype(np.int32))
        if release >= "0.18":
            buffer.expect(4 * 3 * width, np.zeros(2 * width, np.int32))
    surface.check()


@pytest.mark.parametrize(
    ("file", "release"),
    [
        *((FLASHINFER, release) for release in ("0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0")),
        *((MLA, release) for release in ("0.18.0", "0.19.0")),
    ],
    ids=lambda v: v if v[0] == "0" else f"copy_page_indices-{v.rpartition('/')[2][:-3]}",
)
def test_copy_page_indices(surface, release, file):
    module = surface.load(release, file)
    counts, table = (9, 0, 1, 5), surface.random.permutation(99)[:48].reshape(4, 12)
    starts = np.cumsum((0, *counts))
    out = surface.bytes("page_indices", 4 * (int(starts[-1]) + 8))
    module._copy_page_indices_kernel[(4,)](
        out.view(torch.int32, (int(starts[-1]),)),
        surface.tensor("block_table", int32(table)),
        12,
        surface.tensor("starts", int32(starts)),
        BLOCK_SIZE=4,
    )
    for row, start, count in zip(table, starts[:-1], counts, strict=True):
        out.expect(4 * start, row[:count].astype(np.int32))
    surface.check()


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"], ids="expand_page_indices-{}".format)
def test_expand_page_indices(surface, release):
    module = surface.load(release, MLA)
    lengths, size = (37, 0, 1, 16), 8
    # From 0.33 on a request's list may be longer than it is: the tail repeats its first page.
    listed = lengths if release < "0.33" else (40, 0, 2, 16)
    table = surface.random.permutation(99)[:40].reshape(4, 10)
    starts = np.cumsum((0, *listed))
    out = surface.bytes("page_indices", 4 * (int(starts[-1]) + 8))
    arguments = (
        surface.tensor("starts", int32(starts)),
        surface.tensor("lengths", int32(lengths)),
    )
    given = out.view(torch.int32, (int(starts[-1]),))
    if release < "0.33":
        block_table = surface.tensor("block_table", int32(table))
        module._expand_page_indices_kernel[(4,)](
            given, block_table, 10, *arguments, KERNEL_BLOCK_SIZE=size, BLOCK_SIZE=16
        )
    else:
        # Columns lie apart in memory.
        block_table = surface.tensor("block_table", int32(table.T)).T
        module._expand_page_indices_kernel[(4, 3)](
            given, block_table, 1, 4, *arguments, KERNEL_BLOCK_SIZE=size, BLOCK_SIZE=16,
            CLAMP_TAIL=True,
        )  # fmt: skip
    for row, start, length, count in zip(table, starts[:-1], lengths, listed, strict=True):
        tokens = [t if t < length else 0 for t in range(count)]
        slots = np.array([row[t // size] * size + t % size for t in tokens], np.int32)
        out.expect(4 * start, slots)
    surface.check()
