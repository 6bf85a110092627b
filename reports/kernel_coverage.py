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
    never_ran = {
        (each.site.file, each.site.line)
        for each in exercised
        if each.site.kind == "line" and each.missing
    }
    rows: list[tuple[str, ...]] = []
    for each in exercised:
        site = each.site
        # A line that never ran says it all.
        if each.missing and (site.kind == "line" or (site.file, site.line) not in never_ran):
            what = "; ".join(NEVER[site.kind, outcome] for outcome in each.missing)
            rows.append((f"{site.file}:{site.line}", what))
    return rows
