"""The case of a scene of `kvfuzz.model.ops`: a program of one op, with its scene."""

from kvfuzz.model.case import Program
from kvfuzz.model.ops.table import OpScene, family_of


class OpCase(Program, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="op"):
    """The whole test input of one op that is about other things than K and V pages."""

    scene: OpScene

    @property
    def op(self) -> str:
        """The op that the target is called for."""
        return self.steps[0].op


def lower_op(scene: OpScene) -> OpCase:
    """The case of `scene`. Raises UsageError where the scene is impossible."""
    family = family_of(scene)
    family.check(scene)
    parts = family.parts(scene)
    return OpCase(
        buffers=parts.buffers,
        fields=parts.fields,
        tensors=parts.tensors,
        steps=(parts.step, *parts.following),
        unused=parts.unused,
        scene=scene,
    )
