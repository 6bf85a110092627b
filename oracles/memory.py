"""Memory as a reference sees it: elements that are found by fields, and which of them were read.

A reference reads what the contract of its op gives a meaning to. So what it has read is *live*, and
every other byte is dead: no result may depend on it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.dtypes import INTEGER_SIZES
from kvfuzz.model.layout import Field
from kvfuzz.oracles import image


class Elements(NamedTuple):
    """Elements of `field`, which `parameter` of a step is bound to, at positions `at`."""

    parameter: str
    field: Field
    at: Tensor
    """Whole tokens first: `[tokens, heads, dims]`, 1 for an axis that the field has not."""


class Memory:
    """The images of a case's buffers, which a step may have changed, and a record of reads."""

    def __init__(self, case: Program, images: Mapping[str, Tensor]) -> None:
        self.case = case
        self.images = images
        self.loaded: list[Elements] = []
        self.numbers: list[Elements] = []
        self.device = next(iter(images.values())).device

    def read(self, step: Step, parameter: str, **coordinates: Tensor) -> Tensor:
        """The codes of the elements of `parameter` at the coordinates, which broadcast; int64."""
        field = self.case.bound_field(step, parameter)
        at = image.positions(self.case, field, **coordinates)
        self.loaded.append(Elements(parameter, field, at))
        return image.read(self.images[field.buffer], at, field.dtype)

    def holds_numbers(self, step: Step, parameter: str, **coordinates: Tensor) -> None:
        """Say of elements that are not read that an engine has written them, so that they may hold
        any numbers, but no NaN."""
        field = self.case.bound_field(step, parameter)
        at = image.positions(self.case, field, **coordinates)
        self.numbers.append(Elements(parameter, field, at))

    def integers(self, step: Step, parameter: str, **coordinates: Tensor) -> Tensor:
        """The same of a metadata tensor, as signed integers."""
        codes = self.read(step, parameter, **coordinates)
        bits = 8 * INTEGER_SIZES[self.case.bound_field(step, parameter).dtype]
        if bits == 64:
            return codes
        return codes - ((codes >> (bits - 1)) << bits)

    def at(self, step: Step, parameter: str, **coordinates: Tensor) -> tuple[Field, Tensor]:
        """The field that `parameter` is bound to, and the positions of some of its elements, to
        be written."""
        field = self.case.bound_field(step, parameter)
        return field, image.positions(self.case, field, **coordinates)
