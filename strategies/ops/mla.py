"""Scenes of decode over MLA's latent: a page, and sequences whose last token is the query."""

from msgspec.structs import replace

from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.mla import MlaScene
from kvfuzz.model.plan import Batch
from kvfuzz.strategies.batches import occupancy
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, chance, fill_seed, number, pick
from kvfuzz.strategies.ops.attention import CAPS, MOST_SPARE, USUAL, busy, idle, long_sequence
from kvfuzz.strategies.ops.latent import MOST_LAYERS, given_scale, padding
from kvfuzz.strategies.rows import Row

MARGINS = (1, 7, 512, 1000, 2048, 8192)
"""Tokens that the host's longest sequence is longer than that of a batch: none at all, almost; or
as many as make a backend split each sequence into more parts."""

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"nesting": "block_first", "block_ids": "shuffled"}, "layers in a block, 45111"),
    Boundary({"page": "padded", "block_ids": "shuffled"}, "a page stride that is no page, 45111"),
    Boundary({"reach": "past_2g_elements"}, "block * stride past 2**31"),
    Boundary({"latent_size": "512", "rope_size": "64", "query_heads": "128"}, "DeepSeek V3"),
    Boundary({"latent_size": "512", "rope_size": "64", "query_heads": "16"}, "one program of it"),
    Boundary({"query_heads": "20", "sequences": "3"}, "a second program with few heads"),
    Boundary({"query_heads": "1"}, "one head of a rank"),
    Boundary({"query_heads": "3", "numbers": "exact"}, "fewer heads than a program takes"),
    Boundary({"latent_size": "48", "rope_size": "8"}, "latents that are no power of two"),
    Boundary({"block_size": "1"}, "a token a block"),
    Boundary({"block_size": "64", "sequences": "3"}, "the block size of FlashMLA"),
    Boundary({"block_size": "784"}, "blocks larger than a tile"),
    Boundary({"last_offset": "inside"}, "slots behind a sequence, in its last block"),
    Boundary({"last_offset": "first", "sequences": "3"}, "one token in the last block"),
    Boundary({"sequences": "3", "table": "wide"}, "stale entries behind each sequence's blocks"),
    Boundary({"scale": "general", "cache_dtype": "e4m3fnuz"}, "keys and values by one scale"),
    Boundary({"longest": "more", "last_offset": "inside"}, "parts of a few tokens, or of none"),
    Boundary({"row_count": "more", "metadata": "wider"}, "a batch padded to a captured size"),
    Boundary({"rows": "gapped", "sequences": "2"}, "queries as a slice of something wider"),
    Boundary({"numbers": "exact", "table": "wide"}, "one wrong token among many shows"),
    Boundary({"softcap": "some"}, "capped scores"),
    Boundary({"context": "long", "numbers": "flat"}, "thousands of tokens, none left out"),
    Boundary({"idle": "some", "table": "wide"}, "a padded request, whose table row is stale"),
    Boundary({"lse_dtype": "model"}, "a log-sum-exp of few bits"),
)


def drawn_scene(choices: Choices, row: Row) -> MlaScene:
    """The scene of `row`; what the row leaves open is drawn."""
    layers = number(choices, 2, MOST_LAYERS) if row["nesting"] == "block_first" else 1
    shaped = {**row, "page_form": "mla", "padding": "none", "sequences": str(busy(row))}
    alone = MlaScene(
        num_blocks=1,
        block_size=int(row["block_size"]),
        latent_size=int(row["latent_size"]),
        rope_size=int(row["rope_size"]),
        cache_dtype=row["cache_dtype"],
        model_dtype=row["model_dtype"],
        batch=Batch(()),
        layers=layers,
        layer=number(choices, 0, layers - 1),
        page_padding=padding(choices, shaped),
        scale=given_scale(choices, row),
        num_query_heads=int(row["query_heads"]),
        lse_dtype="fp32" if row["lse_dtype"] == "fp32" else row["model_dtype"],
        values=row["numbers"],
    )
    width = alone.latent_size + alone.rope_size
    occupied = occupancy(
        choices,
        shaped,
        Geometry(1, alone.block_size, 1, width),
        layers=layers,
        side_bytes=alone.block_size * width * itemsize(alone.cache_dtype),
        block_stride=alone.block_stride,
        writes=False,
        from_start=True,
        least=(1, long_sequence(choices) if row["context"] == "long" else 1),
    )
    gapped = row["rows"] == "gapped"
    return replace(
        alone,
        num_blocks=occupied.num_blocks,
        batch=replace(
            occupied.batch,
            sequences=(
                *(
                    replace(each, start=each.length - 1, length=1)
                    for each in occupied.batch.sequences
                ),
                *idle(row),
            ),
        ),
        softmax_scale=_softmax_scale(choices, width),
        softcap=pick(choices, CAPS) if row["softcap"] == "some" else 0,
        row_gap=pick(choices, (alone.rope_size, 16, 3 * width)) if gapped else 0,
        dense_output=row["result_rows"] == "dense",
        spare_rows=number(choices, 1, MOST_SPARE) if row["row_count"] == "more" else 0,
        spare_entries=number(choices, 1, MOST_SPARE) if row["metadata"] == "wider" else 0,
        margin=pick(choices, MARGINS) if row["longest"] == "more" else 0,
        fill_seed=fill_seed(choices),
    )


def _softmax_scale(choices: Choices, width: int) -> int:
    """One over the root of the width; at times a power of two near it, so that few tokens count."""
    scale = width**-0.5
    if chance(choices, USUAL):
        scale = 2.0 ** (number(choices, 0, 3) - width.bit_length() // 2 - 1)
    return DTYPES["fp32"].encode(scale)
