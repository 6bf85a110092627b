"""The kinds of scenes, by their types and by their ops."""

from kvfuzz.model.ops import (
    attention_family,
    latent_family,
    merge_family,
    mla_family,
    pages,
    slot_family,
    states,
)
from kvfuzz.model.ops.attention import AttentionScene
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.latent import LatentScene
from kvfuzz.model.ops.merge import MergeScene
from kvfuzz.model.ops.mla import MlaScene
from kvfuzz.model.ops.page_scene import PageScene
from kvfuzz.model.ops.slots import SlotScene
from kvfuzz.model.ops.states import StateScene

OpScene = SlotScene | PageScene | StateScene | LatentScene | AttentionScene | MergeScene | MlaScene

FAMILIES: dict[type, OpFamily] = {
    SlotScene: slot_family.FAMILY,
    PageScene: pages.FAMILY,
    StateScene: states.FAMILY,
    LatentScene: latent_family.FAMILY,
    AttentionScene: attention_family.FAMILY,
    MergeScene: merge_family.FAMILY,
    MlaScene: mla_family.FAMILY,
}

BY_OP: dict[str, OpFamily] = {op: family for family in FAMILIES.values() for op in family.ops}
"""By op, its family; what is missing is an op on K and V pages, a plan or a script."""


def family_of(scene: OpScene) -> OpFamily:
    """What there is to ask about `scene`."""
    return FAMILIES[type(scene)]
