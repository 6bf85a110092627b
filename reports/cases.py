"""A case as a table that a person can take in: sizes, layout, numbers, sequences, views."""

import itertools

from kvfuzz.model.axes import facts
from kvfuzz.model.case import Case, Program, TensorView
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import Fill, FloatFill, GroupFill, IntegerFill, ScaleFill, TieFill
from kvfuzz.model.plan import Sequence
from kvfuzz.model.scene import QUANT_OP, Scene
from kvfuzz.model.verdict import Launch
from kvfuzz.reports.text import Pairs, count, numbers

MOST_SEQUENCES = 6


def case_rows(case: Case) -> Pairs:
    """The case in about ten rows."""
    scene, g = case.scene, case.geometry
    rows: Pairs = [
        ("op", scene.op),
        (
            "geometry",
            ", ".join(
                (
                    f"num_blocks={g.num_blocks}",
                    f"block_size={g.block_size}",
                    f"num_kv_heads={g.num_kv_heads}",
                    f"head_size={g.head_size}",
                    *([f"head_size_v={g.head_size_v}"] if g.head_size_v else []),
                )
            ),
        ),
        ("layout", f"{layout_words(scene)}, {_density(case)}"),
        ("dtypes", f"cache {scene.attention.cache_dtype}, model {scene.model_dtype}"),
        ("scales", _scales(scene)),
    ]
    rows += _sequence_rows(scene.batch.sequences, g.block_size)
    if scene.op != "gather_cache":
        gap = f", {scene.row_gap} elements between rows" if scene.row_gap else ""
        padding = f"rows {numbers(scene.batch.padding)}" if scene.batch.padding else "no row"
        total = scene.batch.num_rows
        rows.append(("batch", f"{count(total, 'row')}; padding (slot -1): {padding}{gap}"))
    else:
        longest = max((len(each.block_ids) for each in scene.batch.sequences), default=0)
        stale = ", the rest of a row is stale" if scene.batch.table_width > longest else ""
        rows.append(("block_table", f"{count(scene.batch.table_width, 'column')}{stale}"))
    if scene.spare_rows or scene.spare_entries:
        behind = f"{count(scene.spare_rows, 'row')} more, metadata longer by {scene.spare_entries}"
        rows.append(("behind it", f"{behind}, as engines keep them"))
    if scene.state_blocks:
        rows.append(("state", f"Mamba state in blocks {numbers(scene.state_blocks)}"))
    return rows + _view_rows(case)


def layout_words(scene: Scene) -> str:
    """How the pages of the op's layer lie, as far as that is not the plainest."""
    layer = scene.attention
    count = len(scene.plan.sharing(layer.allocation))
    said = [layer.layout, f"order {layer.order}"]
    if count > 1 or layer.nesting != "layer_first":
        said.append(f"nesting {layer.nesting} of {count} attention layer{'s' * (count > 1)}")
    if layer.page_padding:
        said.append(f"{layer.page_padding} bytes of padding behind a page")
    return ", ".join(said)


def _scales(scene: Scene) -> str:
    many = scene.attention.granularity != "tensor"
    if scene.op == QUANT_OP:
        return f"made by the op, granularity {scene.attention.granularity}"
    least = "from " if many else ""
    said = f"k_scale {least}{_scale(scene.k_scale)}, v_scale {least}{_scale(scene.v_scale)}"
    return f"{said}, granularity {scene.attention.granularity}" if many else said


def _density(case: Case) -> str:
    dense = facts(case)["strides"] == "dense"
    return "views are dense" if dense else "views are not dense"


def _scale(bits: int) -> str:
    return f"{DTYPES['fp32'].decode(bits):.9g} (0x{bits:08x})"


def _sequence_rows(sequences: tuple[Sequence, ...], block_size: int) -> Pairs:
    rows: Pairs = []
    for index, sequence in enumerate(sequences[:MOST_SEQUENCES]):
        end = sequence.start + sequence.length
        tokens = f"tokens {sequence.start}..{end - 1}" if sequence.length else "no token"
        held = f"blocks {numbers(sequence.block_ids)}" if sequence.block_ids else "no block"
        rows.append((f"sequence {index}", f"{tokens} of {_room(sequence, block_size)}, {held}"))
    if rest := sequences[MOST_SEQUENCES:]:
        tokens = count(sum(each.length for each in rest), "token")
        rows.append(("", f"and {len(rest)} more with {tokens}"))
    return rows


def _room(sequence: Sequence, block_size: int) -> str:
    return str(len(sequence.block_ids) * block_size)


def _view_rows(case: Case) -> Pairs:
    return [
        (name, _view(case.tensor(case.steps[0].tensors[name])))
        for name in ("key_cache", "value_cache")
    ]


def _view(view: TensorView) -> str:
    return (
        f"shape {_tuple(view.shape)}, strides in bytes {_tuple(view.strides)}, "
        f"from byte {view.offset:,} of {view.buffer}"
    )


def _tuple(values: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, values)) + ")"


def buffer_rows(case: Case) -> list[tuple[str, ...]]:
    """Every buffer: name, bytes, initial content."""
    return [
        (
            buffer.name,
            f"{buffer.nbytes:,}",
            "; ".join(
                [
                    fill_words(buffer.fill),
                    *(
                        f"{field.name} inside: {fill_words(field.fill)}"
                        for field in case.fields
                        if field.buffer == buffer.name and field.fill
                    ),
                ]
            ),
        )
        for buffer in case.buffers
    ]


def view_rows(case: Program) -> list[tuple[str, ...]]:
    """Every tensor of the first step: parameter, dtype, view."""
    views = [(name, case.tensor(tensor)) for name, tensor in case.steps[0].tensors.items()]
    return [(name, view.dtype, _view(view)) for name, view in views]


def fill_words(fill: Fill) -> str:
    """What a buffer holds first, in a few words."""
    if isinstance(fill, IntegerFill):
        written = "0x{:x}" if fill.dtype in DTYPES else "{}"
        shown = ", ".join(map(written.format, itertools.islice(fill.values, 16)))
        more = f", ... ({len(fill.values)} in all)" if len(fill.values) > 16 else ""
        return f"{fill.dtype}: {shown}{more}"
    if isinstance(fill, FloatFill):
        bias = DTYPES[fill.dtype].bias
        low, high = fill.low - bias, fill.high - bias
        return f"hash of seed {fill.seed}: {fill.dtype} of magnitude 2^{low} to 2^{high + 1}"
    if isinstance(fill, TieFill):
        return (
            f"hash of seed {fill.seed}: {fill.dtype} next to rounding ties of {fill.cache_dtype} "
            f"times {_scale(fill.scale)}"
        )
    if isinstance(fill, GroupFill):
        how = "rounding ties" if fill.ties else "magnitudes that differ"
        return f"hash of seed {fill.seed}: {fill.dtype} in groups of {fill.group}, {how}, some zero"
    if isinstance(fill, ScaleFill):
        return f"hash of seed {fill.seed}: fp32 from {_scale(fill.least)} to four times that"
    return f"hash of seed {fill.seed}: any bytes"


def launch_words(launch: Launch) -> str:
    """A launch in one line: kernel, grid, constants, warps."""
    grid = "x".join(map(str, launch.grid))
    constants = " ".join(f"{name}={value}" for name, value in launch.constexprs.items())
    warps = launch.options.get("num_warps")
    options = f"num_warps={warps}" if warps else ""
    return "  ".join(filter(None, (f"{launch.kernel}[{grid}]", constants, options)))


def launch_rows(launches: tuple[Launch, ...]) -> Pairs:
    """The launch plan."""
    return [
        ("launch" if not index else "", launch_words(each)) for index, each in enumerate(launches)
    ]
