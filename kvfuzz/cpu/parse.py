"""Reads printed TTIR into `ir.Module`, once per compiled kernel.

The printer puts every op on one line, opens a region at the end of a line and closes it at the
start of one, so that the reader goes line by line. Anything it does not understand raises
`UnsupportedOp` with the op's name and place.
"""

import os
import re

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.forms import Form, form_of, read_form, result_types
from kvfuzz.cpu.ir import NOWHERE, Block, Function, Location, Module, Op, Successor, Type
from kvfuzz.cpu.text import (
    Locations,
    cut_balanced,
    parse_type,
    split_top,
    values_in,
    without_names,
)

_OP = re.compile(r'(?:(%[^="]+?) = )?"?([a-z_]\w*\.[\w.]+)"?(.*)$')
_SUCCESSOR = re.compile(r"\^(\w+)(?:\(([^)]*)\))?")
_SYMBOL = re.compile(r'@("[^"]*"|[\w.$]+)')


def parse_module(text: str) -> Module:
    """Read one printed module. Raises `UnsupportedOp` for anything that has no meaning here."""
    return _Reader(text).module()


class _Reader:
    def __init__(self, text: str) -> None:
        self._lines = [line.strip() for line in text.splitlines()]
        self._at = 0
        self._locations = Locations(text)
        self._slots: dict[str, tuple[int, Type]] = {}
        self._num_slots = 0
        self._labels: dict[str, int] = {}

    def module(self) -> Module:
        functions, entry = {}, ""
        while self._at < len(self._lines):
            line = self._next()
            if not line.startswith("tt.func"):
                continue
            match = _SYMBOL.search(line)
            name = match[1].strip('"') if match else "?"
            try:
                functions[name] = self._function(name, _SYMBOL.sub("", line, count=1))
            except (ValueError, IndexError) as error:
                raise UnsupportedOp(f"tt.func {name} ({error})") from error
            if " public " in line or not entry:
                entry = name
        return Module(entry, functions)

    def _next(self) -> str:
        line = self._lines[self._at]
        self._at += 1
        return line

    def _function(self, name: str, line: str) -> Function:
        self._slots, self._num_slots = {}, 0
        header, _ = cut_balanced(line, " loc(")
        _, groups = cut_balanced(header, "(")
        arguments = [part.split(" {")[0] for part in split_top(groups[0], ",")]
        blocks, _ = self._region(arguments)
        return Function(name, blocks, self._num_slots)

    def _define(self, name: str, type_: Type) -> int:
        slot = self._num_slots
        self._slots[name] = (slot, type_)
        self._num_slots += 1
        return slot

    def _arguments(self, parts: list[str]) -> tuple[tuple[int, ...], tuple[Type, ...]]:
        slots, types = [], []
        for part in parts:
            name, _, type_text = part.partition(":")
            types.append(parse_type(type_text))
            slots.append(self._define(name.strip(), types[-1]))
        return tuple(slots), tuple(types)

    def _region(self, arguments: list[str]) -> tuple[tuple[Block, ...], str]:
        """Read blocks up to the closing line, which is returned too."""
        outer_labels, self._labels = self._labels, self._block_numbers()
        blocks: list[Block] = []
        slots, types = self._arguments(arguments)
        ops: list[Op] = []
        while not (line := self._next()).startswith("}"):
            if line.startswith("^"):
                if ops or blocks:
                    blocks.append(Block(slots, types, tuple(ops)))
                label, _ = cut_balanced(line.split("//")[0], " loc(")
                _, groups = cut_balanced(label, "(")
                slots, types = self._arguments(split_top(groups[0], ",") if groups else [])
                ops = []
            elif line:
                ops.append(self._op(line))
        blocks.append(Block(slots, types, tuple(ops)))
        self._labels = outer_labels
        return tuple(blocks), line

    def _block_numbers(self) -> dict[str, int]:
        """Labels of the region that starts here; an unlabelled first block is number 0."""
        numbers: dict[str, int] = {}
        depth, first = 0, self._lines[self._at].startswith("^")
        for line in self._lines[self._at :]:
            if line.startswith("}"):
                depth -= 1
                if depth < 0:
                    break
            elif depth == 0 and (match := re.match(r"\^(\w+)", line)):
                numbers[match[1]] = len(numbers) + (0 if first else 1)
            depth += line.endswith("{")
        return numbers

    def _op(self, line: str) -> Op:
        match = _OP.match(line)
        if match is None:
            raise UnsupportedOp(line.split(" loc(")[0][:60])
        names, name, rest = match[1] or "", match[2], match[3]
        start = self._at
        try:
            return self._read_op(names, name, rest)
        except (ValueError, KeyError, IndexError) as error:
            rest = self._lines[start - 1]
            place = self._locations.find(rest[rest.rfind(" loc(") + 5 : -1])
            detail = f"{name} ({error})"
            raise UnsupportedOp(detail, os.path.basename(place.file), place.line) from error

    def _read_op(self, names: str, name: str, rest: str) -> Op:
        regions: tuple[tuple[Block, ...], ...] = ()
        if rest.endswith("{"):
            body, regions, closing = self._regions(name, rest)
            signature_line = closing.lstrip("})")
        else:
            body, signature_line = rest, rest
        location, signature_line = self._strip_location(signature_line)
        if not regions:
            body = signature_line
        if regions or name.startswith("cf.") or '"' in body or "@" in body:
            types_text = split_top(signature_line, " : ")[-1] if rest.endswith("({") else None
            form = read_form(name, body, types_text)
            operands = self._operands(name, form.body)
        else:
            form = form_of(name, without_names(body))
            operands = values_in(body)
        successors = self._successors(form.body) if name.startswith("cf.") else ()
        operand_slots = [self._slots[value] for value in operands]
        results = self._results(names, name, form)
        return Op(
            name,
            tuple([slot for slot, _ in operand_slots]),
            tuple([type_ for _, type_ in operand_slots]),
            results[0],
            results[1],
            location,
            form.words,
            dict(form.attributes),
            regions,
            successors,
        )

    def _strip_location(self, text: str) -> tuple[Location, str]:
        at = text.rfind(" loc(")
        if at < 0:
            return NOWHERE, text
        return self._locations.find(text[at + 5 : -1]), text[:at]

    def _operands(self, name: str, body: str) -> list[str]:
        if name == "scf.for":
            bounds = values_in(body.split("iter_args")[0])[1:]
            return bounds + self._initial(body)
        if name == "scf.while":
            return self._initial(body)
        if name.startswith("cf."):
            body = _SUCCESSOR.sub("", body)
        return values_in(body)

    def _initial(self, body: str) -> list[str]:
        """The right-hand sides of `(%argument = %initial, ...)`."""
        return re.findall(r"= (%[\w$.\-]+(?:#\d+)?)[,)]", body)

    def _successors(self, body: str) -> tuple[Successor, ...]:
        return tuple(
            Successor(
                self._labels[label], tuple(self._slots[value][0] for value in values_in(passed))
            )
            for label, passed in _SUCCESSOR.findall(body)
        )

    def _results(
        self, names: str, name: str, form: Form
    ) -> tuple[tuple[int, ...], tuple[Type, ...]]:
        if not names:
            return (), ()
        types = result_types(name, form.body, form.types_text)
        expanded = []
        for printed in names.split(","):
            value, _, count = printed.strip().partition(":")
            expanded += [f"{value}#{i}" for i in range(int(count))] if count else [value]
        if name == "tt.split":  # prints the type that both halves have
            types = types * 2
        if len(expanded) != len(types):
            raise ValueError(f"{len(expanded)} results, {len(types)} types")
        return tuple(map(self._define, expanded, types)), types

    def _regions(self, name: str, rest: str) -> tuple[str, tuple[tuple[Block, ...], ...], str]:
        """Read an op's regions; return its header, them, and the line that closed the last."""
        body = re.sub(r"\(?\{$", "", rest).rstrip()
        arguments: list[str] = []
        if name == "scf.for":
            counter = values_in(body)[0]
            kind = split_top(body, " : ")[-1] if " : " in body else "index"
            arguments = [f"{counter}: {kind}"]
            inits = re.findall(r"(%[\w$.\-]+) = (?=%[\w$.\-]+(?:#\d+)?[,)])", body)
            if "iter_args" in body:
                carried = split_top(split_top(body, " : ")[0], "->")[1].strip("()")
                arguments += map("{}: {}".format, inits, split_top(carried, ","))
        elif name == "scf.while":
            inits = re.findall(r"(%[\w$.\-]+) = %", body)
            before = split_top(split_top(body, " : ")[-1], "->")[0]
            before = before[1:-1] if before.startswith("(") else before
            arguments = list(map("{}: {}".format, inits, split_top(before, ",")))
        regions = []
        while True:
            blocks, closing = self._region(arguments)
            regions.append(blocks)
            arguments = []
            if not closing.endswith("{"):
                return body, tuple(regions), closing
