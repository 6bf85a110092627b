"""Which torch operators a target runs on a buffer's memory.

The cpu lane records what Triton kernels read. What torch reads (a copy, a sum, an item that decides
a branch) it cannot see, so a record is whole only where no operator was handed a buffer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TorchUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes in `ops` the operators that get memory of `buffers`, views apart."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {each.untyped_storage().data_ptr() for each in buffers}
        self.ops: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, after a look at what it gets."""
        if not func.is_view and any(map(self._is_ours, (*args, *(kwargs or {}).values()))):
            self.ops[str(func)] = None
        return func(*args, **(kwargs or {}))

    def _is_ours(self, value: object) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._is_ours, value))
        if not isinstance(value, Tensor):
            return False
        return value.untyped_storage().data_ptr() in self._storages
