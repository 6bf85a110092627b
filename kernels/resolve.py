"""From the name of a target to its adapter."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvfuzz.errors import NotCheckedError, UsageError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.catalogue import ENTRY_POINTS, list_targets
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.kernels.stateful import PREFIX, StatefulAdapter, bundle
from kvfuzz.model.axes import nearest
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.target import DEFAULT_ARCH, TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable


class Maker(Protocol):
    """Makes the adapter of a target of one kind."""

    def __call__(self, spec: TargetSpec, *, arch: str) -> Adapter | PlanAdapter:
        """The adapter of `spec`, as an engine on `arch` would call the target."""


MAKERS: dict[str, tuple[str, str]] = {
    "builtin": ("kvfuzz.kernels.own", "builtin"),
    "mutant": ("kvfuzz.kernels.own", "mutant"),
    "conch": ("kvfuzz.kernels.conch", "adapter"),
    "vllm": ("kvfuzz.kernels.vllm", "adapter"),
    "vllm views": ("kvfuzz.kernels.vllm_views", "adapter"),
}
"""Module and function by the part of a name before its colon; loaded when asked for."""


def resolve(
    spec: TargetSpec, *, arch: str = DEFAULT_ARCH
) -> Adapter | PlanAdapter | StatefulAdapter:
    """The adapter of `spec` as an engine on `arch` would call the target; of an op that a cache in
    use has, and asked for as that, of the whole of it.

    Raises UsageError for a name that means nothing, NotCheckedError where the target, its source
    tree or its package is absent.
    """
    if spec.name.startswith(PREFIX):
        return bundle(spec, lambda part: resolve_kernel(part, arch=arch))
    # A seed of a script says what its target is part of.
    itself = msgspec.structs.replace(spec, op="") if spec.op == STATEFUL_OP else spec
    found = _resolved(itself, arch)
    if isinstance(found, Adapter) and found.info.op in PAGE_OPS and spec.op == STATEFUL_OP:
        return bundle(spec, lambda part: resolve_kernel(part, arch=arch))
    return found


def resolve_kernel(spec: TargetSpec, *, arch: str = DEFAULT_ARCH) -> Adapter:
    """The adapter of `spec` itself, of an op that reads or writes bytes. Raises as `resolve` does,
    and UsageError for a target of another kind of op."""
    found = _resolved(spec, arch)
    if isinstance(found, PlanAdapter):
        raise UsageError(f"{spec.name} is a {found.info.op}, which launches no kernel")
    return found


def _resolved(spec: TargetSpec, arch: str) -> Adapter | PlanAdapter:
    kind, colon, _ = spec.name.partition(":")
    if spec.name.rpartition(":")[0].endswith(".py"):
        return _maker("kvfuzz.kernels.files", "adapter")(spec, arch=arch)
    if kind == "file":
        raise NotCheckedError(
            f"{spec.name} stands for a function in a file that a seed does not name; "
            "pass it again as path/to/file.py:function"
        )
    listed = {target.name: target for target in list_targets()}
    if kind in MAKERS and (spec.name in listed or kind == "mutant"):
        builds = kind == "vllm" and listed[spec.name].op in PLAN_OPS
        return _checked(_maker(*MAKERS["vllm views" if builds else kind])(spec, arch=arch), spec)
    for entry in entry_points(group=ENTRY_POINTS, name=spec.name):
        make: Callable[[TargetSpec], Adapter | PlanAdapter] = entry.load()
        return _checked(make(spec), spec)
    raise UsageError(
        f"no target {spec.name!r}; {nearest(spec.name, listed)}"
        + ("" if colon else "; a function in a file is path/to/file.py:function")
    )


def _checked(adapter: Adapter | PlanAdapter, spec: TargetSpec) -> Adapter | PlanAdapter:
    if spec.op not in ("", adapter.info.op):
        raise UsageError(f"--op {spec.op}: {spec.name} is a {adapter.info.op}")
    return adapter


def _maker(module: str, function: str) -> Maker:
    maker: Maker = getattr(import_module(module), function)
    return maker
