"""Scenes of attention: a cache as the row says, sequences that begin with their first token, and of
each how many of its last tokens are queries."""

from msgspec.structs import replace

from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.ops.attended import HOT
from kvfuzz.model.ops.attended_axes import FAR_APART, SHORT
from kvfuzz.model.ops.attention import SHARED, AttentionScene
from kvfuzz.model.placement import place
from kvfuzz.model.plan import Sequence
from kvfuzz.strategies.batches import occupancy
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, chance, fill_seed, number, pick, rarely
from kvfuzz.strategies.layers import drawn_layer, layer_name, layer_of_several, plan_of
from kvfuzz.strategies.rows import Row
from kvfuzz.strategies.scales import scale_pair

PARTS = (257, 1697, 5745)
"""By how much a long sequence is longer than a short one, about: 8,192 tokens and more."""
MOST_SPARE = 5
"""Rows and entries behind a batch, at most."""
MOST_WINDOW = 300
CAPS = (30, 50, 5)
"""What scores are kept below: Gemma 2 has 50 in its layers and 30 at its end; a low one bites."""
WORK = 1 << 18
"""Scores of a sequence, about, where it need not have more."""
FP8_EXPONENT = 7
"""The largest power of two that all fp8 formats have, about."""
SMALL = 4
"""Powers of two by which the scales of integers are smaller than those of floats."""
USUAL = 5
"""All but one in so many scenes scale scores by one over the root of the head size."""
OPPOSITE = 4
"""One in so many mixed batches has its prompts first."""

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"phase": "decode", "sequences": "3"}, "one query token each, at other lengths"),
    Boundary({"phase": "mixed", "queries_per_kv": "3"}, "rows of a tile that are another's"),
    Boundary({"layout": "hybrid", "block_ids": "shuffled"}, "page stride of a decode, 45111"),
    Boundary({"layout": "content_packed", "block_ids": "shuffled"}, "token stride that is no row"),
    Boundary({"order": "hnd", "layout": "blocks_first"}, "head stride"),
    Boundary({"order": "x_packed_v", "phase": "mixed"}, "interleaved V, a prompt behind a context"),
    Boundary({"order": "x_packed", "last_offset": "inside"}, "slots behind a sequence, 47305"),
    Boundary({"last_offset": "first", "sequences": "3"}, "one token in the last block"),
    Boundary({"window": "cuts", "phase": "extend"}, "blocks in front of a window"),
    Boundary({"window": "cuts", "phase": "decode"}, "a window that begins inside a block"),
    Boundary({"block_size": "48", "phase": "decode"}, "tiles that lie across blocks, 39810"),
    Boundary({"block_size": "784", "layout": "hybrid"}, "blocks larger than a tile"),
    Boundary({"block_size": "1"}, "a token a block"),
    Boundary({"sinks": "some", "window": "cuts"}, "gpt-oss"),
    Boundary({"softcap": "some", "phase": "mixed"}, "Gemma 2"),
    Boundary({"alibi_slopes": "some", "phase": "extend"}, "a bias by position"),
    Boundary({"scale": "general", "phase": "mixed"}, "K and V with scales of their own"),
    Boundary({"granularity": "token_head_inline"}, "scales inside of pages"),
    Boundary({"numbers": "exact", "table": "wide"}, "one wrong token among many shows"),
    Boundary({"numbers": "exact", "sequences": "3", "phase": "mixed"}, "the same over sequences"),
    Boundary({"numbers": "low", "window": "cuts"}, "tiles that a query sees nothing of"),
    Boundary({"numbers": "flat", "phase": "mixed"}, "tokens that all count, over sequences"),
    Boundary({"context": "long", "phase": "decode"}, "thousands of tokens, in parts"),
    Boundary({"context": "long", "phase": "extend", "numbers": "flat"}, "none of them left out"),
    Boundary({"queries_per_kv": "20", "phase": "mixed"}, "more rows of a token than of a tile"),
    Boundary({"result_rows": "dense", "value_size": "same"}, "rows of the query alone are apart"),
    Boundary({"value_size": "narrower"}, "V narrower than K"),
    Boundary({"query": "quantised", "scale": "general"}, "three scales of a score"),
    Boundary({"query": "quantised", "phase": "mixed"}, "weights of fp8, as large as queries ask"),
    Boundary({"shared_by": "3", "phase": "mixed"}, "layers that share a target, one after another"),
    Boundary({"idle": "some"}, "a padded request: no tokens at all"),
    Boundary({"idle": "some", "phase": "decode", "table": "wide"}, "its stale table entries"),
    Boundary({"row_count": "more", "metadata": "wider"}, "a batch padded to a captured size"),
    Boundary({"reach": "past_2g_elements"}, "32-bit offsets of blocks"),
    Boundary({"head_size": "80"}, "heads that are no power of two"),
)


def drawn_scene(choices: Choices, row: Row, op: str) -> AttentionScene:
    """The scene of `row`; what the row leaves open is drawn."""
    layer = drawn_layer(choices, row)
    page, element = layer.geometry, itemsize(layer.cache_dtype)
    index, count = layer_of_several(choices, row)
    occupied = occupancy(
        choices,
        {**row, "sequences": str(busy(row)), "padding": "none"},
        page,
        layers=count,
        side_bytes=page.block_size * page.num_kv_heads * page.head_size * element,
        block_stride=place(layer, count=count).k.block,
        writes=False,
        from_start=True,
        least=_least(choices, row),
    )
    sequences = _with_queries(choices, row, op, occupied.batch.sequences)
    longest = max(each.start + each.length for each in sequences)
    sequences += idle(row)
    k_scale, v_scale = _scales(choices, row)
    gapped = row["rows"] == "gapped"
    return AttentionScene(
        op=op,
        layer=layer_name(index),
        plan=plan_of(layer, count, occupied.num_blocks, occupied.state_blocks),
        batch=replace(occupied.batch, sequences=sequences),
        model_dtype=row["model_dtype"],
        k_scale=k_scale,
        v_scale=v_scale,
        softmax_scale=_softmax_scale(choices, row, page.head_size),
        queries_per_kv=int(row["queries_per_kv"]),
        window=_window(choices, row, longest),
        softcap=pick(choices, CAPS) if row["softcap"] == "some" else 0,
        sinks=row["sinks"] == "some",
        alibi=row["alibi_slopes"] == "some",
        query_quantised=row["query"] == "quantised",
        q_scale=_q_scale(choices, row),
        sharers=int(row["shared_by"]),
        values=row["numbers"],
        row_gap=pick(choices, (page.head_size, 16, 3 * page.head_size)) if gapped else 0,
        dense_output=row["result_rows"] == "dense",
        spare_rows=number(choices, 1, MOST_SPARE) if row["row_count"] == "more" else 0,
        spare_entries=number(choices, 1, MOST_SPARE) if row["metadata"] == "wider" else 0,
        fill_seed=fill_seed(choices),
    )


def busy(row: Row) -> int:
    """The sequences that have tokens."""
    if row["idle"] == "none":
        return int(row["sequences"])
    return int(row["sequences"]) - 1 if row["block_ids"] not in FAR_APART else 2


def idle(row: Row) -> tuple[Sequence, ...]:
    """Those that have none: engines pad a batch of requests at its end."""
    return (Sequence((), 0, 0),) if row["idle"] == "some" else ()


def long_sequence(choices: Choices) -> int:
    """Tokens of a long sequence: about where kernels begin another part, or a little later."""
    return SHORT + pick(choices, PARTS) + rarely(choices, 8, PARTS[0])


def _least(choices: Choices, row: Row) -> tuple[int, int]:
    """The tokens that a sequence has at least, and the last one, for its phase to show."""
    if row["context"] == "long":
        return 2, long_sequence(choices)
    each, last = {"decode": (1, 1), "prefill": (1, 2), "extend": (2, 3), "mixed": (2, 3)}[
        row["phase"]
    ]
    return each, max(last, 2 if row["window"] == "cuts" else 1)


def _with_queries(
    choices: Choices, row: Row, op: str, whole: tuple[Sequence, ...]
) -> tuple[Sequence, ...]:
    """The sequences with some of their tokens as queries. The last one has several; engines put
    decodes before what extends a context, and that before prompts."""
    phase, found = row["phase"], []
    heads = int(row["num_kv_heads"]) * int(row["queries_per_kv"])
    has_prompt = False
    for index, sequence in enumerate(whole):
        tokens, is_last = sequence.length, index == len(whole) - 1
        if phase == "decode":
            new = 1
        elif phase == "prefill" or (phase == "mixed" and (has_prompt or is_last)):
            new = tokens
        elif phase == "mixed" and index and chance(choices, 2):
            new, has_prompt = tokens, True
        else:
            least = 2 if is_last else 1
            most = min(tokens - 1, max(least, WORK // (tokens * heads))) - least
            new = least + rarely(choices, min(8, most), most)
        found.append(replace(sequence, start=tokens - new, length=new))
    if phase == "mixed" and op != SHARED and chance(choices, OPPOSITE):
        found[0], found[-1] = _swapped(found[0], found[-1])
    return tuple(found)


def _swapped(first: Sequence, last: Sequence) -> tuple[Sequence, Sequence]:
    """A prompt first, and a context before the last tokens; the last has three tokens or more."""
    first = replace(first, start=0, length=first.start + first.length)
    return first, replace(last, start=1, length=last.length - 1)


def _scales(choices: Choices, row: Row) -> tuple[int, int]:
    """Scales as for a gather; integers, which are about as large as their scale is small, get
    smaller ones."""
    if row["numbers"] != "spread" and DTYPES[row["cache_dtype"]].is_integer:
        return FP32_ONE, FP32_ONE
    k_scale, v_scale = scale_pair(choices, row)
    if DTYPES[row["cache_dtype"]].is_integer and row["scale"] != "unit":
        less = SMALL << DTYPES["fp32"].mantissa_bits
        return k_scale - less, v_scale - less
    return k_scale, v_scale


def _q_scale(choices: Choices, row: Row) -> int:
    """The scale of a quantised query, of the kind that K has; where sums are to be exact one that
    gives fp8 a number as large as other queries have."""
    if row["query"] == "model":
        return FP32_ONE
    if row["numbers"] == "exact":
        return DTYPES["fp32"].encode(2.0 ** (HOT - FP8_EXPONENT))
    return scale_pair(choices, row)[0]


def _softmax_scale(choices: Choices, row: Row, head_size: int) -> int:
    """One over the root of the head size, or a power of two, with which exact sums stay exact."""
    fp32 = DTYPES["fp32"]
    if chance(choices, USUAL) or row["numbers"] == "exact":
        return fp32.encode(2.0 ** -number(choices, 1, 4))
    return fp32.encode(head_size**-0.5)


def _window(choices: Choices, row: Row, longest: int) -> int:
    """A window; one that cuts is shorter than the longest sequence."""
    if row["window"] == "none":
        return 0
    if row["window"] == "wide":
        return longest + number(choices, 0, MOST_WINDOW)
    return 1 + rarely(choices, min(16, longest - 2), longest - 2)
