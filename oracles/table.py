"""All properties, in the order in which a finding is named after them."""

from kvfuzz.oracles import access, relations, stored_bytes
from kvfuzz.oracles.properties import Property

PROPERTIES: tuple[Property, ...] = (
    Property("crash", "the target raises only declared refusals", access.crash),
    Property("oracle", "written bytes hold the right values", stored_bytes.oracle),
    Property("complete", "every byte that must be written is", stored_bytes.complete),
    Property(
        "frame",
        "no other byte of a written buffer changes",
        stored_bytes.frame,
        hazards=stored_bytes.rewritten,
    ),
    Property("immutable", "a buffer that is only read does not change", stored_bytes.immutable),
    Property(
        "bounds",
        "no access outside an allocation that writes or matters",
        access.bounds,
        variants=access.bounds_variants,
        hazards=access.stray_reads,
    ),
    Property(
        "roundtrip",
        "what is written and gathered back is what went in",
        relations.roundtrip,
        variants=relations.round_trip_variants,
    ),
    Property(
        "determinism",
        "two runs of one case leave the same bytes",
        relations.determinism,
        variants=relations.determinism_variants,
    ),
)
