"""A big failing case is reduced to about the smallest one that there is, which was found by hand.

Each bug is planted in a kernel that meets a case of forty blocks, eight heads, three long runs, fp8
and Mamba state between; nothing has shrunk it before.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from nights import all_but

from kvfuzz.engine.minimize import alike_of, minimum
from kvfuzz.model.axes import facts
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import AttentionLayer, Batch, Plan, Sequence, StateLayer
from kvfuzz.model.scene import Scene

GATHER = "kernels/builtin/gather_cache.py"
ENTRY = "entry = sequence * block_table_stride + position // block_size"
POSITION = "position = start + row - tl.load(cu_seqlens_kv_ptr + sequence)"
MOST_RUNS = 120
FAR = 1 << 17
"""The first block of a case past 2**31."""


class Planted(NamedTuple):
    """A bug: a mutant's name or an edit of the gather, and the smallest case that shows it."""

    bug: str | tuple[str, str]
    property: str
    blocks: int
    rows: int
    heads: int
    why: str
    """Why there is no smaller one."""
    scene: Mapping[str, object] = MappingProxyType({})


WRITE = {"op": "reshape_and_cache"}
SLOW = (
    "no mask at an odd head size, writing",
    "padding is stored",
    "head stride",
    "lengths of sequences",
    "row of the table",
    "block crossing",
    "block stride of SHUFFLE alone",
)
"""Bugs that wait for the night."""

PLANTED = {
    "block stride": Planted(
        "hardcoded_block_stride", "oracle", 2, 1, 1, "block 0 is right under any stride"
    ),
    "block stride of SHUFFLE alone": Planted(
        "shuffle_block_stride",
        "oracle",
        2,
        1,
        1,
        "as above, in a layout that keeps the other side between two blocks",
        {"order": "shuffle", "head_size": 96},
    ),
    "head stride": Planted(
        "head_stride_is_head_size",
        "oracle",
        1,
        2,
        2,
        "head 0 is right; the stray row of head 1 must land on an element that another row wrote",
        WRITE,
    ),
    "heads on top of each other": Planted(
        "one_head", "oracle", 1, 1, 2, "one head is right, the second one lands on it"
    ),
    "scale of K for V": Planted(
        "scale_of_k_for_v", "oracle", 1, 1, 1, "any element shows it, if the scales differ"
    ),
    "reciprocal of the scale": Planted(
        "reciprocal_scale",
        "oracle",
        1,
        1,
        1,
        "one element next to a tie shows it, if its bytes are the right ones",
        WRITE | {"values": "ties", "model_dtype": "fp32"},
    ),
    "padding is stored": Planted(
        "padding_written",
        "oracle",
        1,
        2,
        1,
        "a padding row, and a token that its V lands on: that of slot -1 lies before V, in K",
        WRITE,
    ),
    "no mask at an odd head size, writing": Planted(
        "missing_store_mask_write",
        "oracle",
        1,
        2,
        1,
        "V of one token spills into K of another one that was stored, content-packed its neighbour",
        WRITE,
    ),
    "no mask at an odd head size, gathering": Planted(
        "missing_store_mask_gather", "bounds", 1, 1, 1, "the last row is the only one"
    ),
    "start of the run": Planted(
        "seq_start_ignored", "oracle", 1, 1, 1, "token 1 of a block of two is read as token 0"
    ),
    "off by one token": Planted(
        "off_by_one_token", "oracle", 1, 1, 1, "a block of two tokens: the wrong one is read"
    ),
    "block crossing": Planted(
        (ENTRY, "entry = sequence * block_table_stride"),
        "oracle",
        2,
        1,
        1,
        "a token behind the first block of its sequence, which is right",
    ),
    "row of the table": Planted(
        (ENTRY, "entry = position // block_size"),
        "oracle",
        2,
        2,
        1,
        "sequence 0 is right; the second one needs a token, and a block that is not the first's",
    ),
    "lengths of sequences": Planted(
        (POSITION, "position = start + row - sequence * tl.load(cu_seqlens_kv_ptr + 1)"),
        "oracle",
        3,
        4,
        1,
        "right for two sequences: a third one, behind two of different lengths, at least 1 and 2",
    ),
    "stale table": Planted(
        (ENTRY, "entry = sequence * block_table_stride + block_table_stride - 1"),
        "oracle",
        2,
        1,
        1,
        "a table of two columns, the last of which names another block",
    ),
    "overflow of 32 bits": Planted(
        "int32_block_offset",
        "no_overflow",
        0,  # by formula, below
        1,
        1,
        "one token of the first block whose offset in elements is 2**31",
        {"first_block": FAR},
    ),
    "race": Planted(
        "stores_next_head_too",
        "no_race",
        1,
        1,
        2,
        "head 1, and the wide store of head 0",
        WRITE,
    ),
}


def _big(
    *,
    op: str = "gather_cache",
    order: str = "hnd",
    head_size: int = 80,
    first_block: int = 0,
    **more: object,
) -> Scene:
    ids = [first_block + (block * 17 + 5) % 39 for block in range(39)]
    runs = ((0, 13, 37, 150), (13, 26, 16, 190), (26, 36, 5, 120))
    sequences = tuple(Sequence(tuple(ids[a:b]), start, length) for a, b, start, length in runs)
    geometry = Geometry(first_block + 40, 16, 8, head_size)
    layer = AttentionLayer("layer.0", "kv_cache", "hybrid", order, geometry, "e4m3fnuz")
    state = StateLayer("layer.1", "kv_cache", tuple(sorted(ids[36:])))
    writes = op == "reshape_and_cache"
    scene = {
        "op": op,
        "layer": "layer.0",
        "plan": Plan((layer, state)),
        "batch": Batch(sequences, (0, 100, 200) if writes else (), 20),
        "model_dtype": "bf16",
        "k_scale": 0x3FA66666,
        "v_scale": 0x40133333,
        "row_gap": head_size if writes else 0,
        "fill_seed": 12345,
    }
    return Scene(**scene | more)


@pytest.fixture(autouse=True)
def _one_thread():
    """Cases become small: threads cost more than they bring, as in a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def broken(judge, edited):
    """The judge of a planted bug's kernel."""

    def make(bug):
        if isinstance(bug, str):
            return judge(f"mutant:{bug}")
        return judge(edited(GATHER, "gather_cache", bug))

    return make


@pytest.mark.parametrize("planted", all_but(SLOW, PLANTED))
def test_a_big_case_is_reduced_to_the_smallest_but_one(broken, planted):
    judged = broken(planted.bug)
    domain = judged.target.info.domain
    case = lower(_big(**planted.scene))
    verdict = judged.verdict(case)
    alike = alike_of(verdict)
    assert alike.property == planted.property

    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    small = reduction.case
    assert alike.shown_by(seen)
    assert domain.refusal(facts(small)) is None
    assert reduction.ended_by == "minimal"
    assert reduction.runs <= MOST_RUNS

    blocks = planted.blocks
    if "first_block" in planted.scene:
        stride = small.tensor("key_cache").strides[0]
        blocks = 2**31 // stride + 1  # an element is one byte
        assert small.nbytes <= case.nbytes
    scene = small.scene
    assert small.geometry.num_blocks <= blocks + 1
    assert scene.batch.num_rows <= planted.rows + 1
    assert small.geometry.num_kv_heads <= planted.heads + 1
    # Whoever reads it need not think about what the bug does not depend on.
    assert (scene.row_gap, scene.state_blocks) == (0, ())
    assert scene.fill_seed < 8
