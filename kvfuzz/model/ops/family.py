"""What the engine asks of a scene, whatever the op: one record per kind of scene."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfuzz.model.axis import Axis
from kvfuzz.model.parts import Parts
from kvfuzz.model.rules import Rule
from kvfuzz.model.search import Steps


class OpFamily(NamedTuple):
    """The scenes of one type, and the ops that they are for. Every function takes such a scene,
    but for `level_of` of an axis, which takes its lowered case."""

    ops: tuple[str, ...]
    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...]
    op: Callable[[Any], str]
    check: Callable[[Any], None]
    """Raises UsageError with the first thing that makes a scene impossible."""
    parts: Callable[[Any], Parts]
    """The buffers, fields and views of a possible scene, and the step that binds them."""
    simpler: Callable[[Any], Steps[Any]]
    """A search for simpler scenes; candidates may be impossible."""
    size: Callable[[Any], tuple[int, ...]]
    """What makes one scene smaller than another, most important first."""
    path: Callable[[Any], str]
    """The path of a kernel that a scene takes, as far as its scene tells: part of a finding's
    mark."""
