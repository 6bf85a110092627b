"""Small readers for MLIR's printed form: balanced splitting, types, attributes, locations."""

import re
from functools import lru_cache

from kvfuzz.cpu.ir import FLOAT_BITS, INTEGER_BITS, NOWHERE, Location, Type

_OPEN, _CLOSE = "([{<", ")]}>"
_VALUE = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_KEY_WORD = re.compile(r"(\w+) = ([\w.]+)")
_WORD = re.compile(r"(?<![%\w.#\-])[A-Za-z_]\w*")
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+)(?::(\d+))?')
_NAMED = re.compile(r'"(?:[^"\\]|\\.)*"')


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` outside all brackets and strings; parts are stripped, `""` gives []."""
    parts, depth, start, i, quoted = [], 0, 0, 0, False
    while i < len(text):
        char = text[i]
        if char == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif quoted:
            pass
        elif text.startswith("->", i):
            if depth == 0 and separator == "->":
                parts.append(text[start:i])
                start = i + 2
            i += 1
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i += len(separator) - 1
            start = i + 1
        i += 1
    parts.append(text[start:])
    stripped = [part.strip() for part in parts]
    return stripped if stripped != [""] else []


def cut_balanced(text: str, opener: str) -> tuple[str, list[str]]:
    """Take out every bracketed group that starts with `opener`; return the rest and the insides."""
    rest, groups, i = "", [], 0
    while (start := text.find(opener, i)) >= 0:
        depth, end, quoted = 0, start + len(opener) - 1, False
        while True:
            char = text[end]
            if char == '"':
                quoted = not quoted
            elif not quoted and char in _OPEN:
                depth += 1
            elif not quoted and char in _CLOSE and text[end - 1] != "-":
                depth -= 1
                if depth == 0:
                    break
            end += 1
        rest += text[i:start]
        groups.append(text[start + len(opener) : end])
        i = end + 1
    return rest + text[i:], groups


def parse_type(text: str) -> Type:
    """Read `i32`, `!tt.ptr<bf16>` or `tensor<4x!tt.ptr<f32>>`; ValueError names any other type."""
    text = text.strip()
    shape: tuple[int, ...] = ()
    inner = text
    if text.startswith("tensor<") and text.endswith(">"):
        inner = text[len("tensor<") : -1]
        while match := re.match(r"(\d+)x", inner):
            shape += (int(match[1]),)
            inner = inner[match.end() :]
    is_pointer = inner.startswith("!tt.ptr<")
    element = inner[len("!tt.ptr<") : -1].split(",")[0] if is_pointer else inner
    if element not in INTEGER_BITS and element not in FLOAT_BITS:
        raise ValueError(f"type {text}")
    return Type(shape, element, is_pointer)


def parse_types(text: str) -> tuple[Type, ...]:
    """Read a list of types, in parentheses or not; `()` gives none."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return tuple(parse_type(part) for part in split_top(text, ","))


def parse_attributes(groups: list[str]) -> dict[str, object]:
    """Read the insides of `{key = value, flag}` groups: ints, bools, int arrays, else text."""
    attributes: dict[str, object] = {}
    for group in groups:
        for item in split_top(group, ","):
            key, _, value = item.partition(" = ")
            attributes[key] = _attribute(value.strip())
    return attributes


def _attribute(value: str) -> object:
    if value in ("", "true", "false"):
        return value != "false"
    if match := re.fullmatch(r"(-?\d+)(?: : \w+)?", value):
        return int(match[1])
    if match := re.fullmatch(r"array<i\d+(?:: (.*))?>", value):
        return tuple(int(part) for part in (match[1] or "").split(",") if part)
    return value.strip('"')


def values_in(text: str) -> list[str]:
    """The SSA names in `text`, in order, with their `#n`."""
    return _VALUE.findall(text)


def without_names(text: str) -> str:
    """`text` with every SSA name as a bare `%`."""
    return _VALUE.sub("%", text)


def keywords_in(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """The `key = word` pairs and the bare words of an op's body."""
    pairs: dict[str, object] = dict(_KEY_WORD.findall(text))
    rest = _VALUE.sub(" ", _KEY_WORD.sub(" ", text))
    return pairs, tuple(_WORD.findall(rest))


@lru_cache(maxsize=1 << 12)
def _place(file: str, line: int, column: int) -> Location:
    """One object for one place, in all kernels."""
    return Location(file, line, column)


class Locations:
    """Resolves MLIR locations to the innermost file and line: the callee of an inlined call."""

    def __init__(self, text: str) -> None:
        self._texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
        self._known: dict[str, Location | None] = {}

    def find(self, text: str) -> Location:
        """Resolve the inside of a `loc(...)`; `NOWHERE` if it names no file."""
        return self._resolve(text.strip()) or NOWHERE

    def _resolve(self, text: str) -> Location | None:
        if text.startswith("#"):
            if text not in self._known:
                self._known[text] = self._resolve(self._texts.get(text, "unknown"))
            return self._known[text]
        if match := _FILE.match(text):
            return _place(match[1], int(match[2]), int(match[3] or 0))
        if text.startswith("callsite("):
            return self._first(text[len("callsite(") : -1], " at ")
        if text.startswith("fused"):
            return self._first(text[text.index("[") + 1 : -1], ",")
        if (match := _NAMED.match(text)) and text.endswith(")"):
            return self._resolve(text[match.end() + 1 : -1])
        return None

    def _first(self, text: str, separator: str) -> Location | None:
        resolved = (self._resolve(part) for part in split_top(text, separator))
        return next((location for location in resolved if location), None)
