"""How a function that fulfils the contract of an op is bound, by the names of its parameters.

Each op has canonical names, the aliases under which engines spell them, and values that are derived
from the others (`kvfuzz.kernels.contract_table`). Parameters with a default that no contract knows
keep their default.
"""

import inspect
from collections.abc import Callable
from typing import Any

from kvfuzz.errors import UsageError
from kvfuzz.kernels.adapter import Call
from kvfuzz.kernels.contract import Contract, Scalars, Tensors
from kvfuzz.kernels.contract_table import CONTRACTS

TOLD_BY = {
    "query": ("model", "q_scale"),
    "window": ("none", "window"),
    "softcap": ("none", "softcap"),
    "sinks": ("none", "sinks"),
    "alibi_slopes": ("none", "alibi_slopes"),
}
"""Axes that come to a function by a parameter of their own: the level of a function that takes no
such parameter, and its name."""


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UsageError(f"{function!r} cannot be bound: {error}") from None
    return [p for p in signature.parameters.values() if p.kind not in variadic]


def objections(function: Callable[..., object], op: str) -> tuple[str, ...]:
    """Why `function` cannot be bound as `op`, one sentence each; empty where it can."""
    contract = CONTRACTS[op]
    taken = _taken(function, contract)
    return (
        *(
            f"required parameter {parameter.name!r} is not known"
            for parameter in _parameters(function)
            if parameter.default is parameter.empty and not contract.canonical(parameter.name)
        ),
        *(f"takes no {name}" for name in contract.required if name not in taken),
    )


def untold(function: Callable[..., object], op: str) -> dict[str, tuple[str, str]]:
    """Axes of which `function` takes no parameter: each with the level that it is left with, and
    the name of the parameter."""
    contract = CONTRACTS[op]
    taken = _taken(function, contract)
    return {
        axis: (level, name)
        for axis, (level, name) in TOLD_BY.items()
        if name in contract.known and name not in taken
    }


def bind(function: Callable[..., object], op: str) -> Call:
    """The call that hands `function` a step's arguments under its own parameter names.

    Raises UsageError where a required parameter is unknown to the op or one of the op's own is
    not taken.
    """
    contract = CONTRACTS[op]
    if found := objections(function, op):
        raise UsageError(
            f"{getattr(function, '__name__', function)} as {op}: {'; '.join(found)}; "
            f"known parameters are {', '.join(contract.known)}"
        )
    plan = [
        (parameter, name)
        for parameter in _parameters(function)
        if (name := contract.canonical(parameter.name))
    ]
    forwarded = _forwarded(function, contract, {name for _, name in plan})

    def call(tensors: Tensors, scalars: Scalars) -> None:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        absent = {each for each in contract.optional if each not in {*tensors, *scalars}}
        absent -= contract.derived.keys()
        for parameter, name in plan:
            if name in absent and parameter.default is not parameter.empty:
                continue
            value = None if name in absent else contract.value(name, tensors, scalars)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        for name in forwarded:
            if name not in absent:
                named[name] = contract.value(name, tensors, scalars)
        function(*positional, **named)

    return call


def _taken(function: Callable[..., object], contract: Contract) -> set[str]:
    """The canonical and derived names that `bind` hands to a function."""
    names = (contract.canonical(parameter.name) for parameter in _parameters(function))
    taken = {name for name in names if name}
    return taken.union(_forwarded(function, contract, taken))


def _forwarded(
    function: Callable[..., object], contract: Contract, bound: set[str]
) -> tuple[str, ...]:
    """What a function that takes `**kwargs` is handed through them, under the op's own names."""
    if not _takes_keywords(function):
        return ()
    return tuple(name for name in (*contract.required, *contract.optional) if name not in bound)


def _takes_keywords(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
