"""What the engine holds of a target: its description as data, and one callable."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import torch

from kvfuzz.model.target import TargetInfo
from kvfuzz.model.vocabulary import Levels

Call = Callable[[Mapping[str, torch.Tensor], Mapping[str, int | str]], None]
"""Takes a step's tensors and scalars under the op's own parameter names."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A target that can be called."""

    info: TargetInfo
    call: Call
    refusals: tuple[type[BaseException], ...] = ()
    """Exceptions by which the target declares, before any launch, that it refuses an input."""

    def taking(self, levels: dict[str, Levels]) -> "Adapter":
        """The same with other levels of some axes."""
        allowed = self.info.domain.allowed | levels
        domain = msgspec.structs.replace(self.info.domain, allowed=allowed)
        info = msgspec.structs.replace(self.info, domain=domain)
        return replace(self, info=info)


def content_of(source: bytes) -> str:
    """The hash that names a source file in seeds and reports."""
    return hashlib.sha256(source).hexdigest()[:16]
