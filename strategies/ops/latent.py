"""Scenes of one row a token: a page, and a batch as for K and V."""

from msgspec.structs import replace

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.latent import TOKEN_BYTES, V4_UNIT, LatentScene
from kvfuzz.model.ops.latent_axes import GATHER_INDEX, INDEX, WRITES
from kvfuzz.model.plan import Batch
from kvfuzz.model.scene import VALUES
from kvfuzz.strategies.batches import occupancy
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, fill_seed, number, pick
from kvfuzz.strategies.rows import Row
from kvfuzz.strategies.scales import scale_pair

MOST_LAYERS = 3

_SHARED: tuple[Boundary, ...] = (
    Boundary({"nesting": "block_first", "block_ids": "shuffled"}, "packed layers, block stride"),
    Boundary({"page": "padded", "block_ids": "shuffled"}, "a block stride that is no page"),
    Boundary({"reach": "past_2g_elements"}, "block * stride past 2**31"),
    Boundary({"block_size": "1"}, "a token a block"),
    Boundary({"block_size": "64"}, "the block size of FlashMLA and of the indexer"),
)
_WRITES: tuple[Boundary, ...] = (
    Boundary({"padding": "some"}, "rows with slot -1"),
    Boundary({"rows": "gapped"}, "k_pe as a slice of a projection"),
    Boundary({"values": "ties"}, "x / s on rounding ties"),
    Boundary({"cache_dtype": "e4m3fnuz", "values": "spread"}, "224, and not 240"),
)
_GATHERS: tuple[Boundary, ...] = (
    Boundary({"sequences": "3", "table": "wide"}, "stale entries behind each sequence's blocks"),
    Boundary({"sequences": "2", "last_offset": "first"}, "one token past a block"),
    Boundary({"rows": "gapped", "sequences": "2"}, "results, and a block table, in wider ones"),
)
_OWN: dict[str, tuple[Boundary, ...]] = {
    "concat_and_cache_mla": (
        Boundary({"values": "beyond"}, "quotients that a conversion alone makes NaN"),
        Boundary({"page_form": "fp8_ds_mla"}, "four scales a token"),
        Boundary({"page_form": "mla", "scale": "general"}, "x / s against x * (1/s)"),
    ),
    "gather_mla": (
        Boundary({"start_block": "later", "first_offset": "inside"}, "chunks inside a block"),
        Boundary({"cache_dtype": "e4m3fn", "scale": "general"}, "dequantised by the scale"),
    ),
    "indexer_quant_and_cache": (
        Boundary({"page_form": "tiled", "scale_format": "ue8m0"}, "tiles of 16 tokens"),
        Boundary({"scale_format": "ue8m0", "values": "ties"}, "scales that are powers of two"),
    ),
    "gather_indexer": (
        Boundary({"page_form": "tiled", "latent_size": "128"}, "DeepSeek V3.2's keys"),
        Boundary({"page_form": "flat", "block_size": "1"}, "a token a block"),
    ),
    "quantize_and_insert_k_cache": (Boundary({"block_size": "2"}, "256 tokens compressed by 128"),),
}
BOUNDARIES: dict[str, tuple[Boundary, ...]] = {
    op: (*own, *(_WRITES if op in WRITES else _GATHERS), *_SHARED) for op, own in _OWN.items()
}


def drawn_scene(choices: Choices, row: Row, op: str) -> LatentScene:
    """The scene of `row`; what the row leaves open is drawn."""
    layers = number(choices, 2, MOST_LAYERS) if row["nesting"] == "block_first" else 1
    gapped = row["rows"] == "gapped"
    alone = LatentScene(
        op=op,
        form=row["page_form"],
        num_blocks=1,
        block_size=int(row["block_size"]),
        latent_size=int(row["latent_size"]),
        rope_size=int(row["rope_size"]),
        cache_dtype=row["cache_dtype"],
        model_dtype=row["model_dtype"],
        batch=Batch(()),
        layers=layers,
        layer=number(choices, 0, layers - 1),
        page_padding=padding(choices, row),
        scale=given_scale(choices, row),
        ue8m0=row["scale_format"] == "ue8m0" and op == INDEX,
        values=row["values"] if row["values"] in VALUES else VALUES[0],
    )
    width = alone.latent_size + alone.rope_size
    element = itemsize(alone.cache_dtype)
    occupied = occupancy(
        choices,
        row,
        Geometry(1, alone.block_size, 1, width),
        layers=layers,
        side_bytes=alone.block_size * width * element,
        block_stride=alone.block_stride,
        writes=op in WRITES,
        from_start=op == GATHER_INDEX,
    )
    return replace(
        alone,
        num_blocks=occupied.num_blocks,
        batch=occupied.batch,
        row_gap=_row_gap(choices, alone) if gapped else 0,
        fill_seed=fill_seed(choices),
    )


def given_scale(choices: Choices, row: Row) -> int:
    """A scale of the row's kind: of two different ones, one that is not 1."""
    pair = scale_pair(choices, {"granularity": "tensor"} | row)
    return pair[0] if pair[0] != FP32_ONE else pair[1]


def padding(choices: Choices, row: Row) -> int:
    """Bytes between pages: a multiple of what lies in them."""
    if row["page"] == "exact":
        return 0
    if row["page_form"] == "fp8_ds_mla_v4":
        used = int(row["block_size"]) * TOKEN_BYTES["fp8_ds_mla_v4"]
        return -used % V4_UNIT + V4_UNIT * pick(choices, (0, 0, 1))
    unit = itemsize(row["cache_dtype"]) if row["page_form"] == "mla" else 4
    return pick(choices, (16, 64, unit, 3 * unit, 28 * unit))


def _row_gap(choices: Choices, scene: LatentScene) -> int:
    """Elements between rows: what else the projection makes, in whole groups."""
    if scene.group:
        return scene.group * number(choices, 1, 3)
    return pick(choices, (scene.rope_size, scene.latent_size, 3 * scene.latent_size))
