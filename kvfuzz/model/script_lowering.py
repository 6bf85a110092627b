"""Lower a script: the block manager says what each action does, and every layer gets its steps.

The cache is that of `kvfuzz.model.plan_views`, over the device and once more over the host, where
swapped blocks go. All layers of a group get a block id together, so that an action is one step for
each of them. Blocks are handed out by the manager's size and named by kernels in their own: block b
is kernel blocks `b * ratio` to `b * ratio + ratio - 1`, and a slot is the same token in either.
"""

from typing import NamedTuple

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import CacheLayer, CachePlan
from kvfuzz.model.case import Buffer, Program, Step, TensorView
from kvfuzz.model.fill import LARGE, ByteFill, IntegerFill, word
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.layout import Axis, Field, Geometry, Term
from kvfuzz.model.manager import BlockManager, Effect, Run
from kvfuzz.model.parts import (
    Parts,
    Setting,
    activation_fill,
    gather_parts,
    page_parts,
    write_parts,
)
from kvfuzz.model.plan_edits import groups_of, planner_of
from kvfuzz.model.plan_views import expected, storages
from kvfuzz.model.scales import SCALES
from kvfuzz.model.script import Script, ScriptCase, check

HOST = "host."
"""Before the names of the host's buffers, fields and views."""
AXES: tuple[Axis, ...] = ("block", "token", "head", "dim")
STALE = 2
"""Columns of a block table beyond the longest sequence, which hold whatever ids were there."""


class Cache(NamedTuple):
    """The buffers, fields and views of a plan's K and V pages, on one side."""

    buffers: tuple[Buffer, ...]
    fields: tuple[Field, ...]
    tensors: tuple[TensorView, ...]


def lower_script(script: Script) -> ScriptCase:
    """The case of `script`. Raises UsageError for actions that cannot follow each other."""
    check(script)
    plan = script.plan
    manager = BlockManager(plan, script.host_blocks)
    device = _cache(plan, script.fill_seed, "")
    host_plan = planner_of(plan)(groups_of(plan), script.host_blocks)
    host = _cache(host_plan, script.fill_seed, HOST)
    largest = max(each.nbytes for each in (*device.buffers, *host.buffers))
    if largest >= LARGE:
        raise UsageError(
            f"impossible script: an allocation of {largest} bytes, expected less than {LARGE}"
        )
    parts: list[Parts] = []
    for number, action in enumerate(script.actions):
        for effect in manager.apply(action):
            for layer in _layers(plan, effect.group):
                place = f"{number}.{action.rule}.{len(parts)}."
                parts.append(_lowered(script, effect, layer, place))
    if not parts:
        raise UsageError("impossible script: no action touches a byte")
    scales = [
        Buffer(name, 4, IntegerFill("fp32", (bits,)))
        for name, bits in zip(SCALES, (script.k_scale, script.v_scale), strict=True)
    ]
    whole = Program(
        buffers=(
            *device.buffers,
            *host.buffers,
            *scales,
            *(buffer for each in parts for buffer in each.buffers),
        ),
        fields=(
            *device.fields,
            *host.fields,
            *(Field(name, name, "fp32", 0, (), {}) for name in SCALES),
            *(field for each in parts for field in each.fields),
        ),
        tensors=(
            *device.tensors,
            *host.tensors,
            *(TensorView(name, name, "fp32", (1,), (4,)) for name in SCALES),
            *(view for each in parts for view in each.tensors),
        ),
        steps=tuple(each.step for each in parts),
    )
    return ScriptCase(**msgspec.structs.asdict(whole), script=script)


def _layers(plan: CachePlan, group: int) -> list[CacheLayer]:
    """The layers of a group that own a cache."""
    layers = [plan.layer(name) for name in plan.groups[group]]
    return [layer for layer in layers if not layer.shares]


def _cache(plan: CachePlan, seed: int, prefix: str) -> Cache:
    buffers = [Buffer(prefix + each.name, each.nbytes, ByteFill(seed)) for each in plan.allocations]
    fields, tensors = [], []
    for layer in plan.owners:
        if not layer.is_attention:
            continue
        allocation = plan.placement_of[layer.name].allocation
        for view in expected(plan, layer, storages(plan, allocation)[0]):
            fields.append(_field(view, prefix))
            tensors.append(
                TensorView(
                    _named(layer.name, view.part, prefix),
                    prefix + view.allocation,
                    view.dtype,
                    view.shape,
                    view.strides,
                    view.offset,
                )
            )
    return Cache(tuple(buffers), tuple(fields), tuple(tensors))


def _named(layer: str, part: str, prefix: str = "") -> str:
    return f"{prefix}{layer}.{part}"


def _field(view: LayerView, prefix: str) -> Field:
    terms = tuple(Term(axis, stride) for axis, stride in zip(AXES, view.strides, strict=True))
    return Field(
        _named(view.layer, view.part, prefix),
        prefix + view.allocation,
        view.dtype,
        view.offset,
        terms,
        dict(zip(AXES, view.shape, strict=True)),
        view.layer,
    )


def _lowered(script: Script, effect: Effect, layer: CacheLayer, place: str) -> Parts:
    """The step of one effect on one layer; what is its own is named by `place`."""
    setting = Setting(
        Geometry(
            script.plan.num_blocks * layer.ratio,
            layer.kernel_block_size,
            layer.num_kv_heads,
            layer.head_size,
            layer.head_size_v if layer.head_size_v != layer.head_size else 0,
        ),
        layer.cache_dtype,
        script.model_dtype,
        "NHD",
        script.fill_seed,
    )
    if effect.kind == "write":
        fills = tuple(
            activation_fill(setting, bits, "spread") for bits in (script.k_scale, script.v_scale)
        )
        slots = tuple(slot for run in effect.runs for slot in _slots(run, layer.block_size))
        parts = write_parts(setting, slots, (fills[0], fills[1]), 0)
    elif effect.kind == "read":
        parts = _gather(script, setting, effect.runs, layer)
    elif effect.kind == "zero":
        blocks = tuple(each for block in effect.blocks for each in _kernel_blocks(block, layer))
        parts = page_parts("zero_blocks", blocks)
    else:
        op = "copy_blocks" if effect.kind == "copy" else "swap_blocks"
        pairs = tuple(
            each
            for one, other in effect.pairs
            for pair in zip(_kernel_blocks(one, layer), _kernel_blocks(other, layer), strict=True)
            for each in pair
        )
        parts = page_parts(op, pairs)
    return _bound(parts, layer.name, effect.kind, place)


def _slots(run: Run, block_size: int) -> list[int]:
    return [
        run.blocks[p // block_size] * block_size + p % block_size
        for p in range(run.start, run.start + run.length)
    ]


def _kernel_blocks(block: int, layer: CacheLayer) -> range:
    return range(block * layer.ratio, (block + 1) * layer.ratio)


def _gather(script: Script, setting: Setting, runs: tuple[Run, ...], layer: CacheLayer) -> Parts:
    width = max(len(run.blocks) for run in runs) * layer.ratio + STALE
    count = setting.geometry.num_blocks
    table: list[int] = []
    for row, run in enumerate(runs):
        entries = [each for block in run.blocks for each in _kernel_blocks(block, layer)]
        stale = [
            word(script.fill_seed, "block_table", row * width + column) % count
            for column in range(len(entries), width)
        ]
        table += entries + stale
    lengths = [run.length for run in runs]
    ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    starts = tuple(run.start for run in runs)
    return gather_parts(setting, tuple(table), starts, tuple(ends), tuple(owners))


SIDES = {
    "copy": {"cache": ""},
    "zero": {"cache": ""},
    "write": {"cache": ""},
    "read": {"cache": ""},
    "swap_out": {"cache": "", "target": HOST},
    "swap_in": {"cache": HOST, "target": ""},
}
"""By effect, on which side the caches lie that a step's parameters are bound to."""


def _bound(parts: Parts, layer: str, kind: str, place: str) -> Parts:
    """The parts of one step under names of their own, its caches those of `layer`."""
    names = [*(each.name for each in parts.buffers), *(each.name for each in parts.tensors)]
    own = {name: place + name for name in names}
    caches = {
        f"{side}_{what}": _named(layer, side[0], prefix)
        for what, prefix in SIDES[kind].items()
        for side in ("key", "value")
    }
    shared = {name: name for name in SCALES}

    def bound(names: dict[str, str]) -> dict[str, str]:
        return {
            parameter: caches.get(parameter) or own.get(name) or shared[name]
            for parameter, name in names.items()
        }

    step = parts.step
    return Parts(
        tuple(msgspec.structs.replace(each, name=own[each.name]) for each in parts.buffers),
        tuple(
            msgspec.structs.replace(each, name=own[each.name], buffer=own[each.buffer])
            for each in parts.fields
        ),
        tuple(
            msgspec.structs.replace(each, name=own[each.name], buffer=own[each.buffer])
            for each in parts.tensors
        ),
        Step(step.op, bound(step.tensors), bound(step.fields), step.scalars),
    )
