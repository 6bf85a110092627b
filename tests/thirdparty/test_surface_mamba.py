"""The fused copies of Mamba states between blocks: every byte of every state and counter."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

MAMBA = "vllm/v1/worker/mamba_utils.py"
BLOCKS, COLUMNS, TOKENS_PER_BLOCK = 40, 6, 8
WIDTH, DIM, TEMPORAL = 5, 19, 111


class States:
    """Two groups of a convolution state and a temporal state; 4 requests of 6 blocks each.

    Every state lies in pages that are larger than it, 4 bytes off a multiple of 8, so copies meet
    equal and unequal alignments.
    """

    def __init__(self, surface, *, dim_first):
        self.dim_first = dim_first
        self.tables = [surface.random.permutation(BLOCKS)[:24].reshape(4, 6) for _ in range(2)]
        rows = [
            surface.tensor(f"table.{i}", torch.from_numpy(table).to(torch.int32))
            for i, table in enumerate(self.tables)
        ]
        # Element size, elements of a token (or of the state), convolution width, group.
        self.kinds = [(2, DIM, WIDTH, 0), (4, TEMPORAL, 0, 0), (4, DIM, WIDTH, 1), (2, 77, 0, 1)]
        self.pages = [
            size * inner * (width or 1) // 8 * 8 + 20 for size, inner, width, _ in self.kinds
        ]
        self.buffers = [
            surface.bytes(f"state.{i}", 16 + BLOCKS * page) for i, page in enumerate(self.pages)
        ]
        sizes, inner, widths, groups = zip(*self.kinds, strict=True)
        row_strides = [size * WIDTH for size in sizes]
        columns = {
            "block_table_ptrs_ptr": ([table.data_ptr() for table in rows], torch.int64),
            "state_base_addrs_ptr": ([buffer.address + 8 for buffer in self.buffers], torch.int64),
            "state_block_strides_ptr": (self.pages, torch.int64),
            "state_elem_sizes_ptr": (sizes, torch.int32),
            "state_inner_sizes_ptr": (inner, torch.int64),
            "state_conv_widths_ptr": (widths, torch.int32),
            "state_group_indices_ptr": (groups, torch.int32),
            "state_dim_row_count_ptr": ([DIM] * 4, torch.int32),
            "state_dim_row_stride_ptr": (row_strides, torch.int64),
        }
        self.arguments = {
            name: surface.tensor(name, torch.tensor(values, dtype=dtype))
            for name, (values, dtype) in columns.items()
        } | {
            "block_table_stride_req": COLUMNS,
            "COPY_BLOCK_SIZE": 16,
            "CONV_STATE_DIM_FIRST": dim_first,
        }

    def expect_copy(self, request, source, target, shift):
        """States move from one column to another, by `shift` accepted tokens."""
        for buffer, page, kind in zip(self.buffers, self.pages, self.kinds, strict=True):
            size, inner, width, group = kind
            table = self.tables[group][request]
            target_at = 8 + int(table[target]) * page
            if not width:
                at = 8 + int(table[source + shift]) * page
                buffer.expect(target_at, buffer.mirror[at : at + size * inner].copy())
                continue
            at = 8 + int(table[source]) * page
            window = buffer.mirror[at : at + size * inner * width].copy()
            there = buffer.mirror[target_at : target_at + size * inner * width].copy()
            # [tokens, dim], or [dim, tokens]: the oldest tokens leave, the last places stay.
            axes = (inner, width, size) if self.dim_first else (width, inner, size)
            window, there = window.reshape(axes), there.reshape(axes)
            if self.dim_first:
                there[:, : width - shift] = window[:, shift:]
            else:
                there[: width - shift] = window[shift:]
            buffer.expect(target_at, there.reshape(-1))


# Computed, scheduled and draft tokens before the step, accepted ones, column of the state.
NOTHING = (3, 2, 0, 1, 0)  # no block is filled
PLAIN = (10, 6, 0, 1, 2)  # the block of column 1 is filled
SHIFTED = (13, 4, 3, 3, 2)  # ... by two accepted drafts
IN_PLACE = (21, 3, 0, 1, 2)  # column 2 is filled and holds the state already
SHIFTED_IN_PLACE = (20, 4, 2, 3, 2)  # ... and two drafts further: an overlapping move


def outcome(computed, scheduled, draft, accepted, column):
    """Whether a block is filled, its column, and how many accepted tokens lie behind it."""
    running = computed + scheduled - draft
    filled = (running + accepted - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    return filled >= running, filled // TOKENS_PER_BLOCK - 1, filled - running


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("order", ["sd", "ds"], ids="mamba_postprocess_fused-{}".format)
def test_postprocess(surface, release, order):
    module = surface.load(release, MAMBA)
    # 0.24 moves an overlapping window without order between its lanes.
    last = IN_PLACE if release < "0.33" else SHIFTED_IN_PLACE
    requests = [NOTHING, SHIFTED, last, PLAIN]
    computed, scheduled, drafts, accepted, columns = zip(*requests, strict=True)
    states = States(surface, dim_first=order == "ds")
    given = {
        "num_accepted_tokens_ptr": accepted,
        "mamba_state_idx_ptr": columns,
        "num_scheduled_tokens_ptr": scheduled,
        "num_computed_tokens_ptr": computed,
        "num_draft_tokens_ptr": drafts,
    }
    arguments = {
        name: surface.tensor(name, torch.tensor(values, dtype=torch.int32))
        for name, values in given.items()
    }
    counter, counts = surface.given("accepted_out", torch.full((4,), 9, dtype=torch.int32))
    grid = (5, 4) if release < "0.33" else (5, 4, 3)
    tiles = {} if release < "0.33" else {"TEMPORAL_TILES": 3, "idx_mapping_ptr": None}
    module.postprocess_mamba_fused_kernel[grid](
        num_accepted_tokens_out_ptr=counter,
        num_reqs=4,
        block_size=TOKENS_PER_BLOCK,
        **arguments,
        **states.arguments,
        **tiles,
    )
    for i, request in enumerate(requests):
        is_filled, target, shift = outcome(*request)
        if is_filled:
            states.expect_copy(i, columns[i], target, shift)
            if target == columns[i]:
                counts.expect(4 * i, np.int32(1))
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"])
@pytest.mark.parametrize("order", ["sd", "ds"], ids="mamba_precopy_align_fused-{}".format)
def test_precopy(surface, release, order):
    module = surface.load(release, MAMBA)
    states = States(surface, dim_first=order == "ds")
    # Source column (-1: none yet), target column, accepted tokens, by the slot of a request.
    moves = [(1, 2, 2), (-1, 0, 0), (3, 3, 1), (0, 1, 0)]
    mapping = (3, -1, 0, 2)
    given = zip(
        ("src_col_ptr", "mamba_state_idx_ptr", "token_bias_ptr"),
        zip(*moves, strict=True),
        strict=True,
    )
    arguments = {
        name: surface.tensor(name, torch.tensor(values, dtype=torch.int32))
        for name, values in (*given, ("idx_mapping_ptr", mapping))
    }
    module.precopy_mamba_align_fused_kernel[(5, 4, 3)](
        num_reqs=4, TEMPORAL_TILES=3, **arguments, **states.arguments
    )
    for slot in (3, 0):
        states.expect_copy(slot, *moves[slot])
    surface.check()
