"""What a contract is: the parameters of one op, and how functions spell them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Scalars = Mapping[str, int | str]
Derivation = Callable[[Tensors, Scalars], Any]


@dataclass(frozen=True, slots=True)
class Contract:
    """The parameters of one op: `required` must be taken, `optional` may be."""

    op: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    aliases: Mapping[str, str]
    """From another spelling to the canonical or derived name."""
    derived: Mapping[str, Derivation] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """Every parameter name that can be bound."""
        return (*self.required, *self.optional, *self.derived, *self.aliases)

    def value(self, name: str, tensors: Tensors, scalars: Scalars) -> Any:
        """The argument of a step that has the canonical or derived `name`."""
        if name in self.derived:
            return self.derived[name](tensors, scalars)
        return tensors[name] if name in tensors else scalars[name]

    def canonical(self, name: str) -> str | None:
        """The canonical or derived name that a parameter called `name` stands for."""
        name = self.aliases.get(name, name)
        return name if name in self.known else None
