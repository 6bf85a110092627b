"""All properties, in the order of `kvfuzz.model.verdict.PROPERTY_NAMES`, and whose turn it is.

A relation runs the target again: asking all of them takes about four times as long as the case
alone, in which nearly all bugs show. A search has more of other cases.
"""

import zlib

import msgspec

from kvfuzz.model.case import Case
from kvfuzz.model.fill import word
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.ops.slots import SLOT_OP
from kvfuzz.model.rules import READ_SCALES
from kvfuzz.model.scene import OPS as SCENE_OPS
from kvfuzz.model.scene import QUANT_OP
from kvfuzz.oracles import (
    access,
    batches,
    dead_bytes,
    ranks,
    relations,
    relocated,
    scales,
    schedule,
    splits,
    stored_bytes,
    strides,
)
from kvfuzz.oracles.properties import Property

LAYER_OPS = (*SCENE_OPS, *ATTENTION_OPS)
"""The ops on the K and V pages of one layer."""

PROPERTIES: tuple[Property, ...] = (
    Property("crash", access.crash),
    Property("no_overflow", schedule.no_overflow),
    Property("oracle", stored_bytes.oracle),
    Property("complete", stored_bytes.complete),
    Property(
        "frame",
        stored_bytes.frame,
        hazards=stored_bytes.rewritten,
    ),
    Property("immutable", stored_bytes.immutable),
    Property(
        "bounds",
        access.bounds,
        variants=access.bounds_variants,
        hazards=access.stray_reads,
    ),
    Property(
        "no_race",
        schedule.no_race,
        variants=schedule.race_variants,
        hazards=schedule.harmless_races,
    ),
    Property(
        "dead_bytes",
        dead_bytes.dead_bytes,
        variants=dead_bytes.dead_byte_variants,
        hazards=dead_bytes.dead_reads,
    ),
    Property(
        "roundtrip",
        relations.roundtrip,
        variants=relations.round_trip_variants,
        takes_turns=True,
        ops=READ_SCALES,
    ),
    Property(
        "determinism",
        relations.determinism,
        variants=relations.determinism_variants,
        takes_turns=True,
    ),
    Property(
        "size1_stride",
        strides.size1_stride,
        variants=strides.stride_variants,
        takes_turns=True,
    ),
    Property(
        "scale_homogeneity",
        scales.scale_homogeneity,
        variants=scales.scale_variants,
        takes_turns=True,
        ops=READ_SCALES,
    ),
    Property(
        "layout_equivariance",
        relocated.layout_equivariance,
        variants=relocated.layout_variants,
        takes_turns=True,
        ops=LAYER_OPS,
    ),
    Property(
        "block_permutation",
        relocated.block_permutation,
        variants=relocated.permutation_variants,
        takes_turns=True,
        ops=LAYER_OPS,
    ),
    Property(
        "batch_invariance",
        batches.batch_invariance,
        variants=batches.batch_variants,
        takes_turns=True,
        ops=SCENE_OPS,
    ),
    Property(
        "prefix_split",
        splits.prefix_split,
        variants=splits.split_variants,
        takes_turns=True,
        ops=("reshape_and_cache", QUANT_OP),
    ),
    Property(
        "partition",
        ranks.partition,
        variants=ranks.rank_variants,
        takes_turns=True,
        ops=(SLOT_OP,),
    ),
)

ALL_TURNS = tuple(each for each in PROPERTIES if each.takes_turns)
TURNS = 2
"""How many properties that take turns a search has decided of each case, where so many apply."""


def by_turn(case: Case | OpCase) -> list[Property]:
    """The properties that take turns, those whose turn it is with `case` first.

    Any change to a scene gives others their turn: cases near each other often share a fill seed.
    """
    seed = zlib.crc32(msgspec.msgpack.encode(case.scene))
    asked = [each for each in ALL_TURNS if each.is_about(case.steps[0].op)]
    return sorted(asked, key=lambda each: word(seed, each.name, 0))
