"""The axes of pages of one row a token, read off their one step, and which levels go together."""

from kvfuzz.model import tokens
from kvfuzz.model.axis import Axis, only
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES, FLOATS, highest_inside, itemsize
from kvfuzz.model.fill import FP32_MANTISSA, FP32_ONE, FloatFill, GroupFill, TieFill
from kvfuzz.model.layout import Field
from kvfuzz.model.round_trip import paged
from kvfuzz.model.rules import BLOCK_ELEMENTS, RULES, Rule
from kvfuzz.model.vocabulary import BLOCK_SIZES, NESTINGS, PAGES, Levels

CONCAT, GATHER_MLA = "concat_and_cache_mla", "gather_mla"
INDEX, GATHER_INDEX = "indexer_quant_and_cache", "gather_indexer"
INSERT_V4 = "quantize_and_insert_k_cache"
WRITES: Levels = (CONCAT, INDEX, INSERT_V4)
GATHERS: Levels = (GATHER_MLA, GATHER_INDEX)
INDEXER: Levels = (INDEX, GATHER_INDEX)
COMPUTED: Levels = (*INDEXER, INSERT_V4)
"""The ops of which every page is fp8 with computed scales."""
GIVEN: Levels = (CONCAT, GATHER_MLA)
"""The ops that may be handed a scale."""

FORMS: Levels = ("mla", "fp8_ds_mla", "tiled", "flat", "fp8_ds_mla_v4")
"""What a page looks like: `kvfuzz.model.pages`, the indexer's in tiles or row by row."""
FORMS_OF: dict[str, Levels] = {
    CONCAT: ("mla", "fp8_ds_mla"),
    GATHER_MLA: ("mla",),
    INDEX: ("tiled", "flat"),
    GATHER_INDEX: ("tiled", "flat"),
    INSERT_V4: ("fp8_ds_mla_v4",),
}
LATENT_SIZES: Levels = ("16", "32", "48", "64", "128", "448", "512")
"""Elements of a token's first part: kv_c, or the indexer's key."""
ROPE_SIZES: Levels = ("0", "8", "16", "64")
"""Elements of its second part, k_pe; the indexer has none."""
SIZES_OF: dict[str, tuple[Levels, Levels]] = {
    "mla": (("16", "32", "512"), ("8", "16", "64")),
    "fp8_ds_mla": (("512",), ("64",)),
    "tiled": (("16", "32", "64", "128"), ("0",)),
    "flat": (("16", "32", "64", "128"), ("0",)),
    "fp8_ds_mla_v4": (("448",), ("64",)),
}
"""By form, the sizes of both parts: small ones find what large ones do."""
BF16_FORMS: Levels = ("fp8_ds_mla", "fp8_ds_mla_v4")
"""The forms whose rotary elements are bf16, as they come."""
E4M3: Levels = ("e4m3fn", "e4m3fnuz")
"""The formats that a computed scale is for."""
MODEL_DTYPES: Levels = ("fp32", "bf16", "fp16")
MOST_V4 = 128
"""Most tokens of a block of DeepSeek V4: a block is to stay small."""
TILE = 16
"""Tokens of a tile of the indexer."""


def _field(case: Program, parameter: str) -> Field:
    return case.bound_field(case.steps[0], parameter)


def page_of(case: Program) -> Field:
    """The first part of a page."""
    return paged(case, case.steps[0])


def _page_form(case: Program) -> str:
    fields = case.steps[0].fields
    if "cached_k" in fields:
        return "tiled" if sum(term.axis == "token" for term in page_of(case).terms) > 1 else "flat"
    if "cached_nope" in fields:
        return "fp8_ds_mla_v4"
    return "fp8_ds_mla" if "cached_scale" in fields else "mla"


def _model_dtype(case: Program) -> str:
    """The dtype of what is written, or what a gather makes; the plainest where codes are copied."""
    fields = case.steps[0].fields
    name = next((each for each in ("kv_c", "out", "k") if each in fields), "")
    dtype = _field(case, name).dtype
    return dtype if dtype in MODEL_DTYPES else MODEL_DTYPES[0]


def rope_size(case: Program) -> str:
    """Level of `rope_size`."""
    has_rope = "cached_rope" in case.steps[0].fields
    return str(_field(case, "cached_rope").extents["dim"]) if has_rope else "0"


def _scale(case: Program) -> str:
    if _page_form(case) != "mla" or not DTYPES[page_of(case).dtype].is_quantised:
        return "none"
    return given_scale(case, "scale")


def given_scale(case: Program, parameter: str) -> str:
    """What the one scale that a step is handed is."""
    (bits,) = case.integers(case.steps[0], parameter)
    if bits == FP32_ONE:
        return "unit"
    return "power_of_two" if bits & FP32_MANTISSA == 0 else "general"


def _scale_format(case: Program) -> str:
    return str(case.steps[0].scalars.get("scale_fmt") or "fp32")


def _layers(case: Program) -> list[Field]:
    """Every field of the buffer that holds the pages."""
    return [field for field in case.fields if field.buffer == page_of(case).buffer]


def page_level(case: Program) -> str:
    """Level of `page`: whether some bytes of a block belong to no element."""
    stride = next(term.stride for term in page_of(case).terms if term.axis == "block")
    owned = sum(_bytes_of_block(field) for field in _layers(case))
    return "padded" if owned < stride else "exact"


def _bytes_of_block(field: Field) -> int:
    count = 1
    for axis, extent in field.extents.items():
        count *= extent if axis != "block" else 1
    return count * itemsize(field.dtype)


def nesting(case: Program) -> str:
    """Level of `nesting`: whether the pages of several layers lie side by side in each block."""
    return "block_first" if len({field.layer for field in _layers(case)}) > 1 else "layer_first"


def _rows(case: Program) -> str:
    """Whether rows of what is written, or made, have something between them."""
    step = case.steps[0]
    name = next(each for each in ("kv_c", "out", "k") if each in step.tensors)
    view = case.tensor(step.tensors[name])
    return "gapped" if view.strides[0] > view.shape[1] * view.strides[1] else "dense"


def _values(case: Program) -> str:
    step = case.steps[0]
    if "slot_mapping" not in step.tensors:
        return "bytes"
    name = next(each for each in ("kv_c", "k") if each in step.tensors)
    fill = case.buffer(case.bound_buffer(step, name)).fill
    if isinstance(fill, GroupFill):
        return "ties" if fill.ties else "spread"
    if isinstance(fill, FloatFill):
        (bits,) = case.integers(step, "scale")
        scale, cache = DTYPES["fp32"].decode(bits), DTYPES[page_of(case).dtype]
        return (
            "beyond" if fill.high > highest_inside(DTYPES[fill.dtype], cache, scale) else "spread"
        )
    return "ties" if isinstance(fill, TieFill) else "bytes"


def _sizes(part: int) -> dict[str, Levels]:
    """By op, the sizes of a part that some of its forms has."""
    every = (LATENT_SIZES, ROPE_SIZES)[part]
    return {
        op: tuple(size for size in every if any(size in SIZES_OF[form][part] for form in forms))
        for op, forms in FORMS_OF.items()
    }


LATENT_AXES: tuple[Axis, ...] = (
    Axis("page_form", FORMS, _page_form, FORMS_OF),
    Axis("nesting", NESTINGS, nesting, only((*WRITES, *GATHERS), "layer_first", "block_first")),
    Axis("page", PAGES, page_level, only((INSERT_V4,), "padded")),
    Axis(
        "cache_dtype",
        tuple(DTYPES),
        lambda case: page_of(case).dtype,
        only(COMPUTED, *E4M3) | only(GIVEN, *FLOATS),
    ),
    Axis(
        "model_dtype",
        MODEL_DTYPES,
        _model_dtype,
        only((GATHER_INDEX,), "fp32") | only((INSERT_V4,), "bf16"),
    ),
    Axis(
        "block_size",
        tuple(map(str, BLOCK_SIZES)),
        lambda case: str(page_of(case).extents["token"]),
        only((INSERT_V4,), *(str(size) for size in BLOCK_SIZES if size <= MOST_V4)),
    ),
    Axis("latent_size", LATENT_SIZES, lambda case: str(page_of(case).extents["dim"]), _sizes(0)),
    Axis("rope_size", ROPE_SIZES, rope_size, _sizes(1)),
    Axis(
        "scale",
        ("none", "unit", "power_of_two", "general", "extreme"),
        _scale,
        only(GIVEN, "none", "unit", "power_of_two", "general") | only(COMPUTED, "none"),
    ),
    Axis(
        "scale_format",
        ("fp32", "ue8m0"),
        _scale_format,
        only((CONCAT, *GATHERS), "fp32") | only((INSERT_V4,), "ue8m0"),
    ),
    Axis("blocks_used", ("1", "2+"), tokens.blocks_used),
    Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids),
    Axis("reach", tokens.REACHES, tokens.reach, only(COMPUTED, "near", "past_2g_elements")),
    Axis("first_offset", ("edge", "inside"), tokens.first_offset, only((GATHER_INDEX,), "edge")),
    Axis("last_offset", ("edge", "first", "inside"), tokens.last_offset),
    Axis("sequences", ("1", "2", "3"), tokens.sequences, only(WRITES, "1")),
    Axis(
        "start_block",
        ("first", "later"),
        tokens.start_block,
        only((*WRITES, GATHER_INDEX), "first"),
    ),
    Axis("table", ("tight", "wide"), tokens.table, only(WRITES, "tight")),
    Axis("padding", ("none", "some"), tokens.padding, only(GATHERS, "none")),
    Axis("rows", ("dense", "gapped"), _rows),
    Axis(
        "values",
        ("bytes", "spread", "ties", "beyond"),
        _values,
        only(GATHERS, "bytes")
        | only((INDEX, INSERT_V4), "spread", "ties")
        | only((CONCAT,), "bytes", "spread", "ties", "beyond"),
    ),
)

_OF_TOKENS = {
    "cache_dtype", "block_size", "blocks_used", "block_ids", "reach", "first_offset",
    "last_offset", "sequences",
}  # fmt: skip


def _dtypes_fit(form: str, cache: str, model: str) -> bool:
    """A cache that is not fp8 has the model's dtype; DeepSeek's rotary elements are bf16."""
    if form == "mla":
        return DTYPES[cache].is_quantised or cache == model
    return cache in E4M3 and (form not in BF16_FORMS or model == "bf16")


LATENT_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if set(rule.axes) <= _OF_TOKENS and not rule.ops),
    Rule(("page_form", "cache_dtype", "model_dtype"), _dtypes_fit),
    Rule(("page_form", "latent_size"), lambda form, size: size in SIZES_OF[form][0]),
    Rule(("page_form", "rope_size"), lambda form, size: size in SIZES_OF[form][1]),
    Rule(("page_form", "block_size"), lambda form, size: form != "tiled" or int(size) % TILE == 0),
    Rule(
        ("block_size", "latent_size", "rope_size"),
        lambda n, latent, rope: int(n) * (int(latent) + int(rope)) <= BLOCK_ELEMENTS,
    ),
    Rule(
        ("page_form", "cache_dtype", "scale"),
        lambda form, cache, scale: (
            (form == "mla" and DTYPES[cache].is_quantised) == (scale != "none")
        ),
    ),
    # A scale that is computed keeps all inside; half precision ends where e5m2 does.
    Rule(("page_form", "values"), lambda form, values: form == "mla" or values != "beyond"),
    Rule(
        ("cache_dtype", "model_dtype", "values"),
        lambda cache, model, values: (
            values != "beyond" or model != "fp16" or not cache.startswith("e5m2")
        ),
    ),
    *(
        Rule(
            ("cache_dtype", "values"),
            lambda cache, values: DTYPES[cache].is_quantised == (values != "bytes"),
            (op,),
        )
        for op in WRITES
    ),
    *(
        # As of gather_cache: a run from the start of its only sequence would be long.
        Rule(
            ("block_ids", "sequences", "start_block"),
            lambda ids, sequences, start: (
                ids not in ("split_4", "split_12") or sequences != "1" or start == "later"
            ),
            (op,),
        )
        for op in GATHERS
    ),
)
