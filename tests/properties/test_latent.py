"""Pages of one row a token: what is planted in our kernels is reduced."""

import pytest
import torch
from msgspec.structs import replace

from kvfuzz.engine.minimize import alike_of, minimum
from kvfuzz.model.ops.latent import LatentScene
from kvfuzz.model.ops.latent_axes import WRITES
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.plan import Batch, Sequence

MOST_RUNS = 120
THREE_TENTHS = 0x3E99999A


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _big(op, form, **changes):
    """Three long runs over forty blocks, in the second of three layers, between rows of padding."""
    ids = [(block * 17 + 5) % 39 for block in range(39)]
    starts = (0, 0, 0) if op == "gather_indexer" else (37, 16, 5)
    sequences = tuple(
        Sequence(tuple(ids[at : at + 13]), start, 150 + at)
        for at, start in zip((0, 13, 26), starts, strict=True)
    )
    writes = op in WRITES
    group = 128 if form == "fp8_ds_mla" else 64
    scene = LatentScene(
        op=op,
        form=form,
        num_blocks=40,
        block_size=16,
        latent_size={"fp8_ds_mla": 512, "fp8_ds_mla_v4": 448, "mla": 32}.get(form, 64),
        rope_size={"mla": 16, "fp8_ds_mla": 64, "fp8_ds_mla_v4": 64}.get(form, 0),
        cache_dtype="e4m3fnuz",
        model_dtype="fp32" if op == "gather_indexer" else "bf16",
        batch=Batch(sequences, (0, 100, 200) if writes else (), 20),
        layers=3,
        layer=1,
        page_padding=448 if form == "fp8_ds_mla_v4" else 64,
        scale=THREE_TENTHS if form == "mla" else 0x3F800000,
        row_gap=group if writes else 0,
        fill_seed=12345,
    )
    return replace(scene, **changes)


PLANTED = {
    # mutant: (op, form, changes, property, blocks, rows, layers); why there is no smaller one
    # Block 0 is right under any stride: one more, and padding or another layer behind a page.
    "mla_dense_blocks": (
        "concat_and_cache_mla",
        "mla",
        {"batch": Batch((Sequence((17,), 3, 9),), table_width=4)},
        "complete", 2, 1, 2,
    ),
    "mla_rope_inside_latent": ("concat_and_cache_mla", "mla", {}, "oracle", 1, 1, 1),
    # The second row of kv_c.
    "mla_latent_rows_dense": ("concat_and_cache_mla", "mla", {}, "oracle", 1, 2, 1),
    # Two tokens of a block.
    "ds_mla_scales_of_a_block": (
        "concat_and_cache_mla", "fp8_ds_mla", {}, "oracle", 1, 2, 1
    ),
    "ds_mla_one_absmax": ("concat_and_cache_mla", "fp8_ds_mla", {}, "oracle", 1, 1, 1),
    "gather_mla_without_starts": ("gather_mla", "mla", {}, "oracle", 1, 1, 1),
    "gather_mla_divides": ("gather_mla", "mla", {}, "oracle", 1, 1, 1),
    "indexer_fnuz_max": ("indexer_quant_and_cache", "tiled", {}, "oracle", 1, 1, 1),
    # A token behind the first tile of its block, and one that its codes land on.
    "indexer_tile_pitch": (
        "indexer_quant_and_cache", "tiled", {"block_size": 32}, "oracle", 1, 2, 1
    ),
    "indexer_power_below": ("indexer_quant_and_cache", "flat", {"ue8m0": True}, "oracle", 1, 1, 1),
    # The second sequence.
    "gather_indexer_first_sequence": ("gather_indexer", "tiled", {}, "oracle", 2, 2, 1),
    "v4_exponents_beside_tokens": (
        "quantize_and_insert_k_cache", "fp8_ds_mla_v4", {}, "oracle", 1, 2, 1
    ),
    "gather_indexer_scale_of_a_block": ("gather_indexer", "flat", {}, "oracle", 1, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("mutant", PLANTED)
def test_a_big_case_is_reduced_to_the_smallest_but_one(judge, mutant):
    op, form, changes, name, blocks, rows, layers = PLANTED[mutant]
    judged = judge(f"mutant:{mutant}")
    domain = judged.target.info.domain
    case = lower_op(_big(op, form, **changes))
    verdict = judged.verdict(case)
    assert alike_of(verdict).property == name
    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    small = reduction.case.scene
    assert name in {each.name for each in seen.failed}
    assert reduction.ended_by == "minimal"
    assert reduction.runs <= MOST_RUNS
    assert small.num_blocks <= blocks + 1
    assert small.batch.num_rows <= rows + 1
    assert small.layers <= layers
    assert small.fill_seed < 8
    if "rows_dense" not in mutant:
        assert small.row_gap == 0
