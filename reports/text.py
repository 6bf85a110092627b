"""Plain text in columns: aligned, wrapped with a hanging indent, free of control characters."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100
"""Columns of a line; what cannot be broken (a path, a command) may be longer."""

Row = Sequence[str]
Pairs = list[tuple[str, str]]
"""Labels with their values, in reading order; an empty label continues the value above."""


def printable(text: str) -> str:
    """`text` with control characters escaped, newlines excepted.

    Messages of a target or a compiler end up on terminals and in CI logs.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def columns(rows: Iterable[Row], *, indent: int = 2, width: int = WIDTH) -> list[str]:
    """The lines of a table: columns padded to their widest cell, the last one wrapped."""
    table = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    if not table:
        return []
    last = max(len(row) for row in table) - 1
    widths = [
        max((len(row[column]) for row in table if column < len(row) - 1), default=0)
        for column in range(last)
    ]
    lines = []
    for row in table:
        padded = [f"{cell:<{size}}" for cell, size in zip(row[:-1], widths, strict=False)]
        lead = " " * indent + "".join(cell + "  " for cell in padded)
        lines += _wrapped(lead, row[-1], width)
    return lines


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(lead) + 20),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [lead.rstrip()]


def paragraph(text: str, *, indent: int = 0, width: int = WIDTH) -> list[str]:
    """The lines of a sentence or two."""
    return _wrapped(" " * indent, printable(text), width)


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,024 bytes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def numbers(values: Sequence[int], *, most: int = 12) -> str:
    """Integers with runs folded: `0, 3-5, 9`; of more than `most` runs the first ones."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    parts: list[str] = []
    for low, high in runs:
        if high - low == 1:
            parts += [str(low), str(high)]
        else:
            parts.append(str(low) if low == high else f"{low}-{high}")
    if len(parts) > most:
        parts = [*parts[:most], f"... ({len(values)} in all)"]
    return ", ".join(parts)


def seconds(value: float) -> str:
    """A duration as people say it: `0.8 s`, `59 s`, `4 min 10 s`, `2 h 5 min`."""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    unit, big, small = (60, "min", "s") if whole < 7200 else (3600, "h", "min")
    rest = whole % unit if unit == 60 else whole % unit // 60
    return f"{whole // unit} {big}" + (f" {rest} {small}" if rest else "")
