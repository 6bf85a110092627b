"""copy_states: the Mamba states of a layer, from whole blocks to others.

A block has the layer's states one after the other, a convolution's and a recurrence's for instance,
and padding up to the size of its neighbours' pages (`kvfuzz.model.pages.mamba_states`). For each
pair (s, t) every state of block t becomes that of block s, as bytes; padding and the other blocks
must survive. No block is written twice, and none is read and written: an engine copies the state of
a request that goes on into a block that it was just given (vLLM vllm/v1/worker/mamba_utils.py).

The step binds block_mapping `[n, 2]` i64 and state_0, state_1, ... `[num_blocks, *shape]`.
"""

import math
from collections.abc import Iterator

import msgspec

from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Field
from kvfuzz.model.named_blocks import PAIRS
from kvfuzz.model.ops import metadata
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.state_axes import MOST_STATES, STATE_AXES, STATE_OP, STATE_RULES
from kvfuzz.model.pages import mamba_states
from kvfuzz.model.parts import Parts
from kvfuzz.model.plan import CACHE, require
from kvfuzz.model.search import (
    Steps,
    fewer_items,
    first_of,
    lower_number,
    plainer_value,
    smallest,
    until_stable,
)
from kvfuzz.model.tokens import REACH

LAYER = "layer.0"
MOST_ENTRIES = 1 << 16
MOST_STATE = 1 << 20
"""Elements of one state, at most."""


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One state of a block."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one block."""
        return math.prod(self.shape) * itemsize(self.dtype)


class StateScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="states"):
    """Everything that decides a copy of states."""

    states: tuple[State, ...]
    num_blocks: int
    pairs: tuple[tuple[int, int], ...]
    """Blocks (from, to)."""
    padding: int = 0
    """Bytes between a block's last state and the next block."""
    spare: int = 0
    """Entries that block_mapping has behind the pairs."""
    fill_seed: int = 0

    @property
    def block_stride(self) -> int:
        """Bytes from block to block."""
        return sum(state.nbytes for state in self.states) + self.padding


def check(scene: StateScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(
        1 <= len(scene.states) <= MOST_STATES,
        f"{len(scene.states)} states, expected 1 to {MOST_STATES}",
    )
    for state in scene.states:
        require(
            state.dtype in DTYPES
            and bool(state.shape)
            and min(state.shape) >= 1
            and math.prod(state.shape) <= MOST_STATE,
            f"a state of {state.dtype} {state.shape}, expected up to {MOST_STATE} elements",
        )
    require(scene.padding >= 0, f"padding={scene.padding}, expected 0 or more")
    require(
        0 < len(scene.pairs) <= MOST_ENTRIES and 0 <= scene.spare <= MOST_ENTRIES,
        f"{len(scene.pairs)} pairs and spare={scene.spare}, expected 1 to {MOST_ENTRIES}",
    )
    sources, targets = ([pair[side] for pair in scene.pairs] for side in (0, 1))
    require(
        all(0 <= block < scene.num_blocks for block in (*sources, *targets)),
        f"pairs {scene.pairs} outside {scene.num_blocks} blocks",
    )
    require(
        len(set(targets)) == len(targets) and not {*sources} & {*targets},
        f"a block is written twice, or read and written: {scene.pairs}",
    )
    _fields_of(scene)  # every state lies at a multiple of its element


def _fields_of(scene: StateScene) -> tuple[Field, ...]:
    states = [(state.dtype, state.shape) for state in scene.states]
    return mamba_states(
        scene.num_blocks, states, buffer=CACHE, layer=LAYER, block_stride=scene.block_stride
    )


def parts(scene: StateScene) -> Parts:
    """What a scene adds up to."""
    fields = _fields_of(scene)
    views = [
        TensorView(
            field.name,
            CACHE,
            field.dtype,
            (scene.num_blocks, *state.shape),
            (scene.block_stride, *_row_major(state)),
            field.base,
        )
        for field, state in zip(fields, scene.states, strict=True)
    ]
    old = metadata.stale(scene.fill_seed, PAIRS, 2 * scene.spare, scene.num_blocks)
    rows = (*scene.pairs, *zip(old[::2], old[1::2], strict=True))
    numbers = metadata.table(PAIRS, "i64", rows, len(scene.pairs))
    bound = {name: name for name in (*(view.name for view in views), PAIRS)}
    nbytes = scene.num_blocks * scene.block_stride
    return Parts(
        (Buffer(CACHE, nbytes, ByteFill(scene.fill_seed)), numbers.buffer),
        (*fields, numbers.field),
        (*views, numbers.view),
        Step(STATE_OP, bound, bound, {}),
    )


def _row_major(state: State) -> tuple[int, ...]:
    """The strides of a state in bytes."""
    element = itemsize(state.dtype)
    return tuple(element * math.prod(state.shape[axis + 1 :]) for axis in range(len(state.shape)))


def simpler(scene: StateScene) -> Steps[StateScene]:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        fewer_items("pairs", least=1),
        fewer_items("states", least=1),
        _each_state,
        _blocks,
        lower_number("padding"),
        lower_number("spare"),
        plainer_value("fill_seed", *range(8)),
    )
    return until_stable(scene, passes)


def _each_state(scene: StateScene) -> Steps[StateScene]:
    """Flat states of few elements, of a plain format."""
    for number in range(len(scene.states)):
        state = scene.states[number]
        flat = State(state.dtype, (math.prod(state.shape),))
        scene = yield from first_of(scene, [_with_state(scene, number, flat)])
        state = scene.states[number]
        for axis in range(len(state.shape)):
            scene = yield from _lower_axis(scene, number, axis)
        state = scene.states[number]
        plainer = list(DTYPES)[: list(DTYPES).index(state.dtype)]
        formats = [_with_state(scene, number, State(each, state.shape)) for each in plainer]
        scene = yield from first_of(scene, formats)
    return scene


def _lower_axis(scene: StateScene, number: int, axis: int) -> Steps[StateScene]:
    state = scene.states[number]

    def of(size: int) -> StateScene:
        shape = (*state.shape[:axis], size, *state.shape[axis + 1 :])
        edited = _with_state(scene, number, State(state.dtype, shape))
        return _as_far(scene, edited) if scene.block_stride * _first(scene) >= REACH else edited

    return (yield from smallest(scene, state.shape[axis], 1, of))


def _with_state(scene: StateScene, number: int, state: State) -> StateScene:
    states = (*scene.states[:number], state, *scene.states[number + 1 :])
    return msgspec.structs.replace(scene, states=states)


def _first(scene: StateScene) -> int:
    return min(block for pair in scene.pairs for block in pair)


def _as_far(scene: StateScene, edited: StateScene) -> StateScene:
    """An edited scene whose blocks lie as many bytes into the cache."""
    first = -(-scene.block_stride * _first(scene) // edited.block_stride)
    return _from_block(edited, first)


def _from_block(scene: StateScene, first: int) -> StateScene:
    by = first - _first(scene)
    pairs = tuple((source + by, target + by) for source, target in scene.pairs)
    return msgspec.structs.replace(scene, pairs=pairs, num_blocks=scene.num_blocks + by)


def _blocks(scene: StateScene) -> Steps[StateScene]:
    """Low block ids without gaps, in order if that will do, and no spare block."""
    scene = yield from first_of(scene, _low(scene))
    scene = yield from _fewest_blocks(scene)

    def from_block(first: int) -> StateScene:
        return _from_block(scene, first)

    scene = yield from smallest(scene, _first(scene), 0, from_block)
    return (yield from _fewest_blocks(scene))


def _low(scene: StateScene) -> Iterator[StateScene]:
    named = list(dict.fromkeys(block for pair in scene.pairs for block in pair))
    for order in (named, sorted(named)):
        ids = {block: number for number, block in enumerate(order)}
        pairs = tuple((ids[source], ids[target]) for source, target in scene.pairs)
        yield msgspec.structs.replace(scene, pairs=pairs, num_blocks=len(named))


def _fewest_blocks(scene: StateScene) -> Steps[StateScene]:
    def of(count: int) -> StateScene:
        return msgspec.structs.replace(scene, num_blocks=count)

    needed = max(block for pair in scene.pairs for block in pair) + 1
    return (yield from smallest(scene, scene.num_blocks, needed, of))


def _size(scene: StateScene) -> tuple[int, ...]:
    encoded = len(msgspec.json.encode(scene))
    return (len(scene.pairs), scene.num_blocks, len(scene.states), scene.block_stride, encoded)


FAMILY = OpFamily(
    ops=(STATE_OP,),
    axes=STATE_AXES,
    rules=STATE_RULES,
    op=lambda scene: STATE_OP,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: "states",
)
