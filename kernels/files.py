"""Targets in a file of the user's: `path/to/file.py:function`.

What a function takes beyond the conventional, and how it quantises, its file says: the declarations
are part of the source, so that a seed replays by them.

    KVFUZZ_DOMAIN = "order=nhd|x_packed,granularity=tensor|head"    axes in the syntax of --where
    KVFUZZ_QUOTIENT = "x*(1/s)"                                     a writer that takes reciprocals
    KVFUZZ_QUANTISE = {"rounding": "half_even", "scale_floor": 0.0}   what else `Quantise` has
    KVFUZZ_PRECISION = {"weights": "fp32", "scaled_query": None}    what `Precision` has
    KVFUZZ_DEAD = "finite"                                          no NaN in bytes nobody may use
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec

from kvfuzz.errors import NotCheckedError, UsageError
from kvfuzz.kernels import plan_targets
from kvfuzz.kernels.adapter import Adapter, content_of
from kvfuzz.kernels.contract_table import CONTRACTS, conventional
from kvfuzz.kernels.contracts import bind, objections, untold
from kvfuzz.kernels.fp8 import formats_of
from kvfuzz.kernels.own import INVERSE, quantise_of
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.model.axes import Domain, nearest, parse_where
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.target import (
    DeadBytes,
    MayHold,
    Precision,
    Quantise,
    Quotient,
    TargetInfo,
    TargetSpec,
    checked,
)

NEAREST = 2
"""Ops of which is said why a function is none of them: those that it is nearest to."""
QUOTIENT, QUANTISE = "KVFUZZ_QUOTIENT", "KVFUZZ_QUANTISE"
DOMAIN, DEAD, PRECISION = "KVFUZZ_DOMAIN", "KVFUZZ_DEAD", "KVFUZZ_PRECISION"


def adapter(spec: TargetSpec, *, arch: str) -> Adapter | PlanAdapter:
    """The adapter of the function; its op is `spec.op`, or what its parameters say. That of an op
    on a cache plan (`kvfuzz.kernels.plan_targets` says what it takes) has to be named.

    It claims all strides, sizes and numbers, of the axes in `CONVENTIONAL` those levels, of axes
    that it has no parameter for nothing (`TOLD_BY`), and instead of each what the file declares:
    narrow it with --where, or let the function refuse by raising NotImplementedError. Raises
    UsageError where the file, the function, its op or a declaration cannot be made out, and
    NotCheckedError where the file does not import.
    """
    file, _, name = spec.name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"target {spec.name}: no file {file}")
    source = path.read_bytes()
    content = content_of(source)
    module = _import(path, content)
    function = _function(module, name, spec.name)
    op = spec.op or _op_of(function, spec.name)
    if op in PLAN_OPS:
        source_of = "a file target takes every plan that --where leaves"
        info = TargetInfo(f"file:{name}", op, Domain(source=source_of), Quantise(), "", content)
        return PlanAdapter(info, plan_targets.bind(function, op), (NotImplementedError,))
    if op not in CONTRACTS:
        known = {**CONTRACTS, **dict.fromkeys(PLAN_OPS)}
        raise UsageError(f"--op {op}: no such op; {nearest(op, known)}")
    info = TargetInfo(
        # Never the path: a seed must mean the same on every machine.
        name=f"file:{name}",
        op=op,
        domain=_domain(module, function, spec.name, op, arch),
        quantise=_quantise(module, spec.name, op),
        partner=INVERSE.get(op, ""),
        content=content,
        dead=_dead(module, spec.name),
        precision=_precision(module, spec.name),
    )
    return Adapter(info, bind(function, op), (NotImplementedError,))


def _domain(
    module: ModuleType, function: Callable[..., Any], target: str, op: str, arch: str
) -> Domain:
    declared = getattr(module, DOMAIN, "")
    if not isinstance(declared, str):
        raise UsageError(f"target {target}: {DOMAIN}={declared!r}, expected text, AXIS=LEVEL|LEVEL")
    try:
        more = parse_where(declared)
    except UsageError as error:
        raise UsageError(f"target {target}: {DOMAIN}: {error}".replace("--where ", "")) from None
    try:
        Domain().narrowed(op, more)
    except UsageError as error:
        raise UsageError(f"target {target}: {DOMAIN}: {error}".replace("--where ", "")) from None
    missing = untold(function, op)
    for axis, (level, parameter) in missing.items():
        if asked := [each for each in more.get(axis, ()) if each != level]:
            raise UsageError(
                f"target {target}: {DOMAIN}: {axis}={asked[0]}, and {function.__name__} takes no "
                f"{parameter}; add the parameter, or declare {axis}={level}"
            )
    formats = formats_of(arch)
    known = tuple(each for each in more.pop("cache_dtype", formats) if each in formats)
    if not known:
        raise UsageError(f"target {target}: {DOMAIN}: on {arch} Triton has {'|'.join(formats)}")
    left = {axis: (level,) for axis, (level, _) in missing.items()}
    return Domain(
        allowed=conventional(op) | left | more | {"cache_dtype": known},
        source=f"a file target takes the conventional on {arch}, or what its {DOMAIN} says",
    )


def _quantise(module: ModuleType, target: str, op: str) -> Quantise:
    """What a file declares; where it declares nothing it does as our own kernel of the op."""
    ours = quantise_of(op)
    quotient: Quotient = getattr(module, QUOTIENT, ours.quotient)
    known = get_args(Quotient)
    if quotient not in known:
        raise UsageError(f"target {target}: {QUOTIENT}={quotient!r}, expected {' or '.join(known)}")
    declared = getattr(module, QUANTISE, {})
    source = f"{QUOTIENT} and {QUANTISE} of the file, as our own kernel where it declares neither"
    try:
        said = {**msgspec.structs.asdict(ours), "quotient": quotient, **declared, "source": source}
        return msgspec.convert(said, Quantise)
    except (TypeError, msgspec.ValidationError) as error:
        fields = ", ".join(name for name in Quantise.__struct_fields__ if name != "source")
        raise UsageError(
            f"target {target}: {QUANTISE}={declared!r}, expected a dict of {fields}: {error}"
        ) from None


def _precision(module: ModuleType, target: str) -> Precision:
    """What a file declares; where it declares nothing, all that kernels are known to round."""
    declared = getattr(module, PRECISION, {})
    try:
        said = {**declared, "source": f"{PRECISION} of the file"}
        return checked(msgspec.convert(said, Precision))
    except (TypeError, ValueError, OverflowError) as error:
        fields = ", ".join(name for name in Precision.__struct_fields__ if name != "source")
        raise UsageError(
            f"target {target}: {PRECISION}={declared!r}, expected a dict of {fields}: {error}"
        ) from None


def _dead(module: ModuleType, target: str) -> DeadBytes:
    declared: MayHold = getattr(module, DEAD, "nan")
    known = get_args(MayHold)
    if declared not in known:
        raise UsageError(f"target {target}: {DEAD}={declared!r}, expected {' or '.join(known)}")
    return DeadBytes(declared, f"{DEAD} of the file, nan where it declares none")


def _import(path: Path, content: str) -> ModuleType:
    """The module of a file, which finds its neighbours as if it were run where it is."""
    package = _package_of(path)
    top = path.resolve().parents[len(package)]
    if str(top) not in sys.path:
        sys.path.insert(0, str(top))
    # In a package it has its own name, by which its relative imports work.
    name = ".".join((*package, path.stem)) if package else f"kvfuzz_target_{content}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise UsageError(f"target {path}: expected a Python file, path/to/file.py:function")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException as error:  # a script that ends in sys.exit, too
        del sys.modules[name]
        raise NotCheckedError(
            f"target {path} does not import: {type(error).__name__}: {error}"
        ) from error
    return module


def _package_of(path: Path) -> tuple[str, ...]:
    """The names of the packages that a file is in, outermost first."""
    names: list[str] = []
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return tuple(names)


def _function(module: ModuleType, name: str, target: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    functions = {key: None for key, value in vars(module).items() if callable(value)}
    if found is None:
        raise UsageError(f"target {target}: no function {name!r}; {nearest(name, functions)}")
    if hasattr(found, "__getitem__") or not callable(found):
        raise UsageError(
            f"target {target}: {name} is a kernel or no function; "
            "name the Python function that launches it"
        )
    function: Callable[..., Any] = found
    return function


def _op_of(function: Callable[..., Any], target: str) -> str:
    found = {op: objections(function, op) for op in CONTRACTS}
    fitting = [op for op, against in found.items() if not against]
    if len(fitting) != 1:
        nearest_ops = sorted(found, key=lambda op: len(found[op]))[:NEAREST]
        why = "; ".join(f"as {op}: {', '.join(found[op])}" for op in nearest_ops)
        raise UsageError(
            f"target {target}: its parameters fit {len(fitting)} ops, say which with "
            f"--op {'|'.join(CONTRACTS)} ({why if not fitting else ', '.join(fitting)})"
        )
    return fitting[0]
