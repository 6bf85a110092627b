"""What an op's printed text says beside the names of its operands: attributes, words, types.

The same few hundred forms occur in all specialisations of a kernel, so that they are remembered.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvfuzz.cpu.ir import Type
from kvfuzz.cpu.text import cut_balanced, keywords_in, parse_attributes, parse_types, split_top

_SYMBOL_OR_STRING = re.compile(r'@("[^"]*"|[\w.$]+)|"((?:[^"\\]|\\.)*)"')

# Printed forms that leave the result's type out or put it first; elsewhere it comes last.
_IMPLIED_TYPES: dict[str, Callable[[tuple[Type, ...]], tuple[Type, ...]]] = {
    "tt.addptr": lambda types: types[:1],
    "tt.load": lambda types: (Type(types[0].shape, types[0].element),),
    "arith.cmpi": lambda types: (Type(types[0].shape, "i1"),),
    "arith.cmpf": lambda types: (Type(types[0].shape, "i1"),),
    "arith.addui_extended": lambda types: types,
    "arith.mulsi_extended": lambda types: (types[0], types[0]),
    "arith.mului_extended": lambda types: (types[0], types[0]),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What an op's text says beside its results: `body` up to the types and without groups and
    strings, `types_text` after that."""

    body: str
    types_text: str
    words: tuple[str, ...]
    attributes: dict[str, object]


@lru_cache(maxsize=1 << 12)
def form_of(name: str, text: str) -> Form:
    """The form of an op without regions, branches and strings, whose operands stand as `%`."""
    return read_form(name, text, None)


def read_form(name: str, body: str, types_text: str | None) -> Form:
    """The form of any op; `types_text` is None where the types stand in `body`, as they mostly
    do. ValueError, KeyError or IndexError for what cannot be read."""
    quoted = list(_SYMBOL_OR_STRING.finditer(body))
    symbols = [match[1].strip('"') for match in quoted if match[1]]
    strings = [match[2] for match in quoted if match[2] is not None]
    body = _SYMBOL_OR_STRING.sub("", body)
    parts = split_top(body, " : ")
    if types_text is None:
        types_text = parts[-1] if len(parts) > 1 else ""
        if len(parts) == 1:
            arrow = split_top(body, "->")
            types_text = "() -> " + arrow[1] if len(arrow) > 1 else ""
    # A print has its operands after the first colon, all other ops before it.
    body, groups = cut_balanced(" : ".join(parts[: 2 if name == "tt.print" else 1]), "{")
    pairs, words = keywords_in(body)
    attributes = {**pairs, **parse_attributes(groups)}
    if strings:
        attributes["strings"] = tuple(strings)
    if symbols:
        attributes["callee"] = symbols[0]
    if name == "arith.constant":
        attributes["value"] = body.strip()
    if name == "tt.dot_scaled":
        attributes["scaled"] = tuple(" scale " in side for side in split_top(body, ",")[:2])
    return Form(body, types_text, words, attributes)


@lru_cache(maxsize=1 << 12)
def result_types(name: str, body: str, types_text: str) -> tuple[Type, ...]:
    """The types of an op's results, of which `body` and `types_text` are the form's. ValueError
    names a type that has no meaning here."""
    if name == "scf.for":
        return parse_types(split_top(body, "->")[-1])
    arrow = split_top(types_text, "->")
    if len(arrow) > 1:
        return parse_types(arrow[1])
    cast = split_top(types_text, " to ")
    if len(cast) > 1:
        return parse_types(cast[1])
    if not types_text and name == "arith.constant":
        return (Type((), "i1"),)
    types = parse_types(types_text)
    implied = _IMPLIED_TYPES.get(name)
    return types[-1:] if implied is None else implied(types)
