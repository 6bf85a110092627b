"""One byte in words: which element it is, what that element means to the batch, which one it pairs.

An op pairs each activation element (row, head, dim of key or value) with one cache element. That
pairing says where a wrong value should have come from, or where it should have gone.
"""

from kvfuzz.model.case import Case, Program
from kvfuzz.model.dtypes import DTYPES, INTEGER_SIZES, itemsize
from kvfuzz.model.fill import ByteFill, IntegerFill, ScaleFill, byte_at, code_at
from kvfuzz.model.layout import Axis, Field
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.verdict import Place

_CACHE_AXES: tuple[Axis, ...] = ("block", "head", "token", "dim")
_ROW_AXES: tuple[Axis, ...] = ("token", "head", "dim")
_SIDES = {"key": "key_cache", "value": "value_cache"}


def element(place: Place) -> str:
    """`layer.0 k, block 4, head 0, token 3, dim 0`; rows of an activation are called rows."""
    if not place.field:
        return f"no element of {place.buffer}"
    cached = bool(place.layer)
    digits = [
        f"{axis if cached or axis != 'token' else 'row'} {place.coordinate[axis]}"
        for axis in (_CACHE_AXES if cached else _ROW_AXES)
        if axis in place.coordinate
    ]
    # Fields of the layers beside the op's own have the layer in their name already.
    field = place.field.removeprefix(f"{place.layer}.")
    return ", ".join([f"{place.layer} {field}".strip(), *digits])


def byte(place: Place) -> str:
    """`byte 256 of kv_cache`."""
    return f"byte {place.byte:,} of {place.buffer}"


def dtype_of(case: Program, place: Place) -> str:
    """The format of the element at `place`, or nothing where no element is."""
    if not place.field:
        return ""
    known = {field.name: field.dtype for field in case.fields}
    if place.field not in known and isinstance(case, Case):
        known = {field.name: field.dtype for field in with_round_trip(case).fields}
    return known.get(place.field, "")


def number(bits: str, dtype: str) -> str:
    """`0x3f800000 = 1 (fp32)`; the bits alone where they are no number."""
    if dtype in INTEGER_SIZES and dtype != "u8":
        code, width = int(bits, 16), 8 * INTEGER_SIZES[dtype]
        return f"{bits} = {code - (code >> (width - 1) << width)} ({dtype})"
    if dtype not in DTYPES:
        return bits
    return f"{bits} = {DTYPES[dtype].decode(int(bits, 16)):.9g} ({dtype})"


def rows_of(case: Case) -> list[tuple[int, int] | None]:
    """Sequence and position of each row of the activations; None is a padding row."""
    scene = case.scene
    touched = [
        (index, position)
        for index, sequence in enumerate(scene.batch.sequences)
        for position in range(sequence.start, sequence.start + sequence.length)
    ]
    if scene.op == "gather_cache":
        return list(touched)
    padded, remaining = set(scene.batch.padding), iter(touched)
    total = len(touched) + len(padded)
    return [None if row in padded else next(remaining) for row in range(total)]


def meaning(case: Case, place: Place) -> str:
    """What the element at `place` is to the batch, as a sentence; empty where that says nothing."""
    if not place.field:
        return _outside_elements(case, place)
    if place.field == "state":
        return f"block {place.coordinate['block']} holds Mamba state of {place.layer}"
    if place.field not in {field.name for field in case.fields}:
        return ""
    if not place.layer:
        return _row(case, place)
    if place.layer != case.scene.layer:
        return f"{place.layer} shares the allocation with {case.scene.layer}, which the op works on"
    if "dim" not in place.coordinate:
        return f"a scale, which the op only reads (granularity {case.scene.attention.granularity})"
    return _cached(case, place)


def _row(case: Case, place: Place) -> str:
    row, rows = place.coordinate["token"], rows_of(case)
    if row >= len(rows):
        return f"row {row} is beyond the batch of {len(rows)} rows"
    owner = rows[row]
    if owner is None:
        return f"row {row} is padding: its slot is -1"
    sequence, position = owner
    index, offset = divmod(position, case.geometry.block_size)
    block = case.scene.batch.sequences[sequence].block_ids[index]
    slot = block * case.geometry.block_size + offset
    write = case.scene.op != "gather_cache"
    by = f"slot {slot}" if write else f"block_table[{sequence}, {index}]"
    return (
        f"row {row} is position {position} of sequence {sequence}: "
        f"block {block}, token {offset} ({by})"
    )


def _cached(case: Case, place: Place) -> str:
    block, token, n = place.coordinate["block"], place.coordinate["token"], case.geometry.block_size
    for index, sequence in enumerate(case.scene.batch.sequences):
        if block not in sequence.block_ids:
            continue
        position = sequence.block_ids.index(block) * n + token
        where = f"slot {block * n + token} is position {position} of sequence {index}"
        rows = rows_of(case)
        if (index, position) in rows:
            return f"{where}, row {rows.index((index, position))} of the batch"
        return f"{where}, which this batch does not touch"
    return f"block {block} belongs to no sequence"


def _outside_elements(case: Case, place: Place) -> str:
    buffer = next((each for each in case.buffers if each.name == place.buffer), None)
    if buffer is None:
        return f"{place.buffer} is memory that the target allocates itself"
    if not 0 <= place.byte < buffer.nbytes:
        side = "before" if place.byte < 0 else "after"
        distance = -place.byte if place.byte < 0 else place.byte - buffer.nbytes + 1
        end = "first" if place.byte < 0 else "last"
        return (
            f"{distance:,} bytes {side} the {end} byte of {place.buffer} ({buffer.nbytes:,} bytes)"
        )
    if isinstance(buffer.fill, IntegerFill):
        index = place.byte * len(buffer.fill.values) // buffer.nbytes
        return f"element {index} of {place.buffer}, given as {buffer.fill.values[index]}"
    return "a byte between elements"


def counterpart(case: Case, place: Place) -> Place | None:
    """The element that the op pairs with the one at `place`, if it touches that one.

    A write moves an activation element to its cache element, a gather moves it back.
    """
    step = case.steps[0]
    for side, cache_side in _SIDES.items():
        rows, cache = case.bound_field(step, side), case.bound_field(step, cache_side)
        if place.field == rows.name:
            return _in_cache(case, place, cache)
        if place.field == cache.name:
            return _in_rows(case, place, rows)
    return None


def _in_cache(case: Case, place: Place, cache: Field) -> Place | None:
    row, owners = place.coordinate["token"], rows_of(case)
    owner = owners[row] if row < len(owners) else None
    if owner is None:
        return None
    index, offset = divmod(owner[1], case.geometry.block_size)
    block = case.scene.batch.sequences[owner[0]].block_ids[index]
    return _at(cache, {**_head_and_dim(place), "block": block, "token": offset})


def _in_rows(case: Case, place: Place, rows: Field) -> Place | None:
    block, n = place.coordinate["block"], case.geometry.block_size
    for row, owner in enumerate(rows_of(case)):
        if owner is None:
            continue
        index, offset = divmod(owner[1], n)
        if (
            case.scene.batch.sequences[owner[0]].block_ids[index] == block
            and offset == place.coordinate["token"]
        ):
            return _at(rows, {**_head_and_dim(place), "token": row})
    return None


def _head_and_dim(place: Place) -> dict[Axis, int]:
    return {"head": place.coordinate["head"], "dim": place.coordinate["dim"]}


def _at(field: Field, coordinate: dict[Axis, int]) -> Place:
    named = {str(axis): value for axis, value in coordinate.items()}
    return Place(field.buffer, field.byte(coordinate), field.name, field.layer, named)


def first_byte(case: Case, place: Place) -> int:
    """The address of the first byte of the element at `place`."""
    if not place.field:
        return place.byte
    field = case.field(place.field)
    return field.byte({axis: place.coordinate[axis] for axis in field.extents})


def initial(case: Case, place: Place) -> str:
    """The code that the element at `place` holds before the first step, as hex."""
    field, buffer = case.field(place.field), case.buffer(place.buffer)
    start, size = first_byte(case, place), itemsize(field.dtype)
    if isinstance(field.fill, ScaleFill):
        index = field.index({axis: place.coordinate[axis] for axis in field.extents})
        return f"0x{code_at(field.fill, field.name, index):0{2 * size}x}"
    if isinstance(buffer.fill, ByteFill):
        held = bytes(byte_at(buffer.fill, buffer.name, start + each) for each in range(size))
        return "0x" + held[::-1].hex()
    if isinstance(buffer.fill, IntegerFill):
        return f"0x{buffer.fill.values[start // size]:0{2 * size}x}"
    return f"0x{code_at(buffer.fill, buffer.name, start // size):0{2 * size}x}"


def distance(case: Case, place: Place, right: Place) -> str:
    """How far the element at `place` is from the one it should be."""
    if place.buffer != right.buffer:
        return f"in {place.buffer}, not in {right.buffer}"
    apart = first_byte(case, place) - first_byte(case, right)
    if not apart:
        return "the right element"
    return f"{abs(apart):,} bytes {'after' if apart > 0 else 'before'} the right element"
