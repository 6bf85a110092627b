"""The same scene with its cache laid out in a plainer way that the target takes, too.

The tables of `kvfuzz.model.vocabulary` have the plainest answer first: a plainer layer has none
that stands further down. A kernel reads strided pages and each packed order on a path of its own,
so that of another path only the plainest layout of all counts: in every other the second path may
be the one that is wrong.
"""

import itertools
from typing import TYPE_CHECKING, cast

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Case
from kvfuzz.model.fill import word
from kvfuzz.model.layer_scene import LayerScene
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.op_case import OpCase, lower_op
from kvfuzz.model.plan import AttentionLayer, Layer
from kvfuzz.model.scene import Scene
from kvfuzz.model.vocabulary import LAYOUTS, NESTINGS, ORDERS, code_path, conflict
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.related import outside

if TYPE_CHECKING:
    from kvfuzz.model.ops.table import OpScene


def plainer(base: Run) -> Case | OpCase | None:
    """The case in a plainer layout of the target's domain and `--where`, or None without one.

    Which one, where there are several, the fill seed decides.
    """
    case, domain = base.layer_case, base.target.domain
    layers = [
        layer
        for layer in plainer_layers(case)
        if conflict(layer.levels) is None and domain.refusal(layer.levels) is None
    ]
    first = word(case.scene.fill_seed, "plainer", 0) % max(len(layers), 1)
    for layer in (*layers[first:], *layers[:first]):
        other = _relowered(case, layer)
        if other is not None and not any(outside(each, other) for each in (domain, base.where)):
            return other
    return None


def layer_scene(case: Case | OpCase) -> LayerScene:
    """The scene of a case that is about one layer of a plan."""
    scene = case.scene
    assert isinstance(scene, LayerScene)  # noqa: S101  (who asks has checked)
    return scene


def levels_of(case: Case | OpCase) -> dict[str, str]:
    """How the layer that a case works on is laid out."""
    return layer_scene(case).attention.levels


def _lowered(scene: LayerScene) -> Case | OpCase:
    return lower(scene) if isinstance(scene, Scene) else lower_op(cast("OpScene", scene))


def plainer_layers(case: Case | OpCase) -> list[AttentionLayer]:
    """The layer that the op works on, laid out in every plainer way."""
    scene = layer_scene(case)
    layer, plainest = scene.attention, (LAYOUTS[0], ORDERS[0])
    layouts = LAYOUTS[: LAYOUTS.index(layer.layout) + 1]
    orders = ORDERS[: ORDERS.index(layer.order) + 1]
    layers = [
        msgspec.structs.replace(
            layer, layout=layout, order=order, nesting=nesting, page_padding=padding
        )
        for layout, order in itertools.product(layouts, orders)
        if code_path(order) == code_path(layer.order) or (layout, order) == plainest
        if layout != "hybrid" or scene.state_blocks
        for nesting in dict.fromkeys((layer.nesting, NESTINGS[0]))
        for padding in dict.fromkeys((layer.page_padding, 0))
    ]
    return [each for each in layers if each != layer]


def _relowered(case: Case | OpCase, layer: AttentionLayer) -> Case | OpCase | None:
    """`case` with its allocation laid out as `layer` is, or None where that is impossible.

    A case that was edited after it was lowered differs in more than its cache, and has no other.
    """
    scene, allocation = layer_scene(case), layer.allocation
    layers: list[Layer] = []
    for each in scene.plan.layers:
        if each.allocation != allocation:
            layers.append(each)
        elif isinstance(each, AttentionLayer):
            laid_out = msgspec.structs.replace(
                each,
                layout=layer.layout,
                order=layer.order,
                nesting=layer.nesting,
                page_padding=layer.page_padding,
            )
            layers.append(laid_out)
        elif layer.layout == "hybrid":  # no other has blocks of Mamba state
            layers.append(each)
    plan = msgspec.structs.replace(scene.plan, layers=tuple(layers))
    try:
        other = _lowered(msgspec.structs.replace(scene, plan=plan))
    except UsageError:
        return None
    kept = [[each for each in of.buffers if each.name != allocation] for of in (case, other)]
    moved = (case.fields, case.tensors) != (other.fields, other.tensors)
    return other if moved and kept[0] == kept[1] else None
