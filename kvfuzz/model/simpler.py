"""Simpler scenes of K and V pages: those of `kvfuzz.model.layer_passes`, with what they store."""

from kvfuzz.model import layer_passes
from kvfuzz.model.lower import lower
from kvfuzz.model.plain import Plainer, attribute
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.model.search import Steps

OWN: tuple[Plainer, ...] = (attribute("scene", "values", *VALUES),)


def simplifications(scene: Scene) -> Steps[Scene]:
    """Candidates that are simpler than `scene`, pass after pass, until a round changes nothing."""
    return layer_passes.simplifications(scene, lower, OWN)
