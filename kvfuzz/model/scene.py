"""A scene: one drawn intent, small enough to read, complete enough to lower to a case.

Strategies draw scenes and nothing else. `check` says in one line what makes a scene impossible;
whatever passes it can be lowered.
"""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import LAYOUTS, ORDERS, Geometry

OPS: tuple[str, ...] = ("reshape_and_cache", "gather_cache")
VALUES: tuple[str, ...] = ("spread", "ties")


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: its blocks in order, and the run of tokens that the op touches.

    Token `p` of the sequence (start <= p < start + length) lives in block
    `block_ids[p // block_size]` at offset `p % block_size`.
    """

    block_ids: tuple[int, ...]
    start: int
    length: int


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a case with one attention layer and one op."""

    op: str
    layout: str
    order: str
    geometry: Geometry
    cache_dtype: str
    model_dtype: str
    k_scale: int
    """Bit pattern of an fp32: stored = x / scale, read = stored * scale."""
    v_scale: int
    sequences: tuple[Sequence, ...]
    padding: tuple[int, ...] = ()
    """Rows of the batch, counted after insertion, whose slot is -1."""
    values: str = "spread"
    """What a write to an fp8 cache stores: `spread` over the range, or `ties` of its rounding."""
    row_gap: int = 0
    """Elements between the end of one row of key or value and the next (a slice of qkv)."""
    table_width: int = 0
    """Columns of the block table; engines allocate more than a batch needs."""
    state_blocks: tuple[int, ...] = ()
    """Blocks of a hybrid allocation that hold Mamba state instead of attention pages."""
    fill_seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the op touches, padding rows not counted."""
        return sum(sequence.length for sequence in self.sequences)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible scene: {what}")


def check(scene: Scene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    g = scene.geometry
    _require(scene.op in OPS, f"op={scene.op!r}, expected one of {', '.join(OPS)}")
    _require(scene.layout in LAYOUTS, f"layout={scene.layout!r}, expected one of {LAYOUTS}")
    _require(scene.order in ORDERS, f"order={scene.order!r}, expected one of {ORDERS}")
    for name, value in msgspec.structs.asdict(g).items():
        _require(value >= 1, f"{name}={value}, expected at least 1")
    _require(scene.cache_dtype in DTYPES, f"cache_dtype={scene.cache_dtype!r} is unknown")
    _require(
        scene.model_dtype in DTYPES and not DTYPES[scene.model_dtype].is_fp8,
        f"model_dtype={scene.model_dtype!r}, expected fp32, bf16 or fp16",
    )
    cache = DTYPES[scene.cache_dtype]
    _require(scene.values in VALUES, f"values={scene.values!r}, expected one of {VALUES}")
    _require(
        cache.is_fp8 or scene.cache_dtype == scene.model_dtype,
        f"cache_dtype={scene.cache_dtype} with model_dtype={scene.model_dtype}: "
        "a cache that is not fp8 has the model's dtype",
    )
    if scene.order == "shuffle":
        x = 16 // cache.itemsize
        _require(scene.layout != "content_packed", "layout=content_packed has no shuffle order")
        _require(
            g.head_size % x == 0 and g.block_size % x == 0,
            f"shuffle needs head_size={g.head_size} and block_size={g.block_size} divisible by {x}",
        )
    _require(
        (scene.layout == "hybrid") == bool(scene.state_blocks),
        f"layout={scene.layout} with state_blocks={scene.state_blocks}: "
        "a hybrid allocation has blocks of Mamba state, and no other has",
    )
    for name, bits in (("k_scale", scene.k_scale), ("v_scale", scene.v_scale)):
        value = DTYPES["fp32"].decode(bits)
        _require(0 < value < float("inf"), f"{name}=0x{bits:08x}, expected a positive fp32")
    _check_blocks(scene)


def _check_blocks(scene: Scene) -> None:
    g = scene.geometry
    used = [block for sequence in scene.sequences for block in sequence.block_ids]
    owned = set(used) | set(scene.state_blocks)
    _require(len(used) + len(scene.state_blocks) == len(owned), "a block id has two owners")
    _require(
        all(0 <= block < g.num_blocks for block in owned),
        f"block ids {sorted(owned)} outside num_blocks={g.num_blocks}",
    )
    for sequence in scene.sequences:
        capacity = len(sequence.block_ids) * g.block_size
        _require(
            sequence.start >= 0 and 0 <= sequence.length <= capacity - sequence.start,
            f"tokens {sequence.start}..{sequence.start + sequence.length} outside a sequence of "
            f"{len(sequence.block_ids)} blocks",
        )
        _require(
            len(sequence.block_ids) <= scene.table_width,
            f"table_width={scene.table_width} is narrower than a sequence's blocks",
        )
    rows = scene.num_tokens + len(scene.padding)
    _require(
        list(scene.padding) == sorted(set(scene.padding))
        and all(0 <= row < rows for row in scene.padding),
        f"padding rows {scene.padding} outside a batch of {rows} rows",
    )
    _require(scene.num_tokens >= 1, "a batch without tokens")
    _require(scene.row_gap >= 0, f"row_gap={scene.row_gap}, expected 0 or more")
