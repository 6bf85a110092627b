"""Kernel coverage as lines: what of each kernel ran, and what never happened."""

from kvfuzz.model.coverage import Exercised
from kvfuzz.reports.text import columns

NOUNS = {"line": "lines", "branch": "sides of branches", "mask": "mask cases", "loop": "loop cases"}
"""By kind of site, what its outcomes are called in the plural."""

NEVER = {
    ("branch", "taken"): "branch never taken",
    ("branch", "not taken"): "branch always taken",
    ("mask", "all"): "no program had every lane active",
    ("mask", "some"): "no program had a part of its lanes active",
    ("mask", "none"): "no program had every lane off",
    ("loop", "0"): "loop never skipped",
    ("loop", "1"): "loop never ran exactly once",
    ("loop", "many"): "loop never ran twice or more",
    ("line", "run"): "never ran",
}
MOST_ROWS = 8


def coverage_lines(exercised: tuple[Exercised, ...], *, indent: int) -> list[str]:
    """One row a kernel with its counts, then the places of which some outcome is missing."""
    lines: list[str] = []
    for kernel in dict.fromkeys(each.site.kernel for each in exercised):
        own = [each for each in exercised if each.site.kernel == kernel]
        lines += columns([(kernel, ", ".join(_counts(own)))], indent=indent)
        rows = _missing(own)
        shown = rows if len(rows) <= MOST_ROWS else rows[: MOST_ROWS - 1]
        if len(rows) > len(shown):
            shown = [*shown, ("", f"and {len(rows) - len(shown)} more")]
        lines += columns(shown, indent=indent + 2)
    return lines


def _counts(exercised: list[Exercised]) -> list[str]:
    counts = []
    for kind, noun in NOUNS.items():
        own = [each for each in exercised if each.site.kind == kind]
        seen = sum(len(each.seen) for each in own)
        possible = seen + sum(len(each.missing) for each in own)
        if possible:
            counts.append(f"{seen} of {possible} {noun}")
    return counts


def _missing(exercised: list[Exercised]) -> list[tuple[str, ...]]:
    never_ran = _never_ran(exercised)
    rows: list[tuple[str, ...]] = []
    for each in exercised:
        site = each.site
        last = never_ran.get((site.file, site.line))
        if last is None:
            what = [NEVER[site.kind, outcome] for outcome in each.missing]
            row = (f"{site.file}:{site.line}", "; ".join(what))
        elif site.line <= last and site.kind == "line":  # says it all of branches and masks there
            lines = f"{site.line}-{last}" if site.line < last else f"{last}"
            row = (f"{site.file}:{lines}", NEVER["line", "run"])
        else:
            continue
        if row[1] and row not in rows:
            rows.append(row)
    return rows


def _never_ran(exercised: list[Exercised]) -> dict[tuple[str, int], int]:
    """By file and line, of lines that never ran: the last of the lines in a row that did not, for
    the first of them, and 0 for the others."""
    found: dict[tuple[str, int], int] = {}
    start: tuple[str, int] | None = None
    for each in sorted((e for e in exercised if e.site.kind == "line"), key=lambda e: e.site):
        place = (each.site.file, each.site.line)
        if not each.missing:
            start = None
            continue
        if start is None or start[0] != place[0]:
            start = place
        found[place] = 0
        found[start] = place[1]
    return found
