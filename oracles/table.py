"""All properties, in the order of `kvfuzz.model.verdict.PROPERTY_NAMES`."""

from kvfuzz.oracles import (
    access,
    batches,
    dead_bytes,
    relations,
    relocated,
    scales,
    schedule,
    stored_bytes,
    strides,
)
from kvfuzz.oracles.properties import Property

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
    ),
    Property(
        "determinism",
        relations.determinism,
        variants=relations.determinism_variants,
    ),
    Property("size1_stride", strides.size1_stride, variants=strides.stride_variants),
    Property("scale_homogeneity", scales.scale_homogeneity, variants=scales.scale_variants),
    Property(
        "layout_equivariance",
        relocated.layout_equivariance,
        variants=relocated.layout_variants,
    ),
    Property(
        "block_permutation",
        relocated.block_permutation,
        variants=relocated.permutation_variants,
    ),
    Property("batch_invariance", batches.batch_invariance, variants=batches.batch_variants),
)
