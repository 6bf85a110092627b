"""The header and the summary of a campaign as lines."""

from kvfuzz.model.axes import AXIS, axes_of
from kvfuzz.model.events import Combinations, Started, Summary
from kvfuzz.model.verdict import WAITING, Hazard
from kvfuzz.reports.kernel_coverage import coverage_lines
from kvfuzz.reports.text import Pairs, columns, count, seconds
from kvfuzz.reports.words import ENDED_BY, HAZARDS, where_words

MOST_REASONS = 4


def header_lines(started: Started) -> list[str]:
    """What runs, where, with which versions; enough to run it again."""
    info = started.target
    versions = f"kvfuzz {started.kvfuzz}, triton {started.triton}, torch {started.torch}"
    rows: Pairs = [
        ("target", f"{info.name} ({info.op}), content {info.content}"),
        ("lane", f"{started.lane}, arch {started.arch}"),
        ("versions", versions),
        ("seed", str(started.random_seed)),
        ("budget", seconds(started.budget_s)),
        ("where", where_words(started.where) or "whole domain of the target"),
    ]
    return columns(rows, indent=0)


def summary_lines(summary: Summary, started: Started | None = None) -> list[str]:
    """How a campaign ended. `not checked` stands apart from `passed`, hazards apart from both."""
    checked = summary.cases - summary.refused
    lines = [_verdict_line(summary)]
    if summary.refused:
        lines += columns([(f"{count(summary.refused, 'case')} refused by the target",)])
    if summary.undecided:
        lines += columns([(f"{count(summary.undecided, 'case')} of which nothing was checked",)])
    if summary.rejected:
        outside = f"{count(summary.rejected, 'draw')} outside the domain or --where, never run"
        lines += columns([(outside,)])
    if summary.passed:
        lines += ["", "  passed, of " + count(checked, "case")]
        lines += _folded(summary.passed)
    if summary.not_checked:
        lines += ["", "  not checked, of " + count(checked, "case")]
        lines += columns(_reason_rows(summary), indent=4)
        lines += columns(_turn_rows(summary), indent=4)
    if summary.hazards:
        lines += ["", "  hazards (no influence on any result)"]
        lines += columns(_hazard_rows(summary.hazards), indent=4)
    # A campaign that stops at a finding says nothing about coverage.
    if checked and summary.ended_by != "finding":
        lines += ["", "  combinations of three levels of three axes"]
        lines += columns([(_combinations(summary.combinations),)], indent=4)
        lines += ["", "  cases per level of each axis"]
        lines += columns(_fact_rows(summary, started), indent=4)
        if summary.exercised:
            lines += ["", "  kernel coverage"]
            lines += coverage_lines(summary.exercised, indent=4)
    return lines


def _combinations(counted: Combinations) -> str:
    if not counted.open:
        if counted.given_up:
            return f"{counted.shown:,} shown, {counted.given_up:,} more drawn for in vain"
        return f"{counted.shown:,} shown: every one that the domain has"
    most = counted.shown + counted.open + counted.given_up
    return f"{counted.shown:,} of at most {most:,} shown ({counted.shown / most:.1%})"


def _verdict_line(summary: Summary) -> str:
    took = f"{count(summary.cases, 'case')} in {seconds(summary.elapsed_s)}"
    ended = ENDED_BY.get(summary.ended_by, summary.ended_by)
    if summary.findings:
        return f"{count(summary.findings, 'finding')} after {took}; {ended}"
    if summary.ended_by == "interrupted":
        return f"interrupted, no finding after {took}"
    if not summary.passed:
        return f"nothing was checked in {took}; {ended}"
    return f"no finding in {took}; {ended}"


def _folded(passed: dict[str, int]) -> list[str]:
    """Properties with equal counts share a row."""
    by_count: dict[int, list[str]] = {}
    for name, cases in passed.items():
        by_count.setdefault(cases, []).append(name)
    rows = [(f"{cases:,}", ", ".join(names)) for cases, names in sorted(by_count.items())[::-1]]
    return columns(rows, indent=4)


def _reason_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, reasons in summary.not_checked.items():
        ordered = sorted(_without_turns(reasons).items(), key=lambda item: -item[1])
        for index, (reason, cases) in enumerate(ordered[:MOST_REASONS]):
            rows.append((name if not index else "", f"{cases:,}", reason))
        if rest := ordered[MOST_REASONS:]:
            rows.append(("", f"{sum(cases for _, cases in rest):,}", "other reasons"))
    return rows


def _without_turns(reasons: dict[str, int]) -> dict[str, int]:
    return {reason: cases for reason, cases in reasons.items() if reason != WAITING}


def _turn_rows(summary: Summary) -> Pairs:
    """What was asked of some cases, in turns; in a row of its own what none of them decided."""
    waited = [name for name, reasons in summary.not_checked.items() if WAITING in reasons]
    never = [name for name in waited if name not in summary.passed and name not in summary.failed]
    some = [name for name in waited if name not in never]
    rows: Pairs = []
    if some:
        rows.append(("in turns", f"each asked of some cases only: {', '.join(some)}"))
    if never:
        rows.append(("never", f"no case decided: {', '.join(never)}"))
    return rows


def _hazard_rows(hazards: tuple[tuple[Hazard, int], ...]) -> list[tuple[str, ...]]:
    """One row a kind, with the most frequent message as its example."""
    kinds: dict[str, list[tuple[str, int]]] = {}
    for hazard, cases in hazards:
        kinds.setdefault(hazard.kind, []).append((hazard.message, cases))
    rows: list[tuple[str, ...]] = []
    for kind, messages in kinds.items():
        total = sum(cases for _, cases in messages)
        rows.append((kind, f"{total:,}", HAZARDS.get(kind, "")))
        rows.append(("", "", f"for instance: {messages[0][0]}"))
    return rows


def _fact_rows(summary: Summary, started: Started | None) -> Pairs:
    rows: Pairs = []
    domain = started.target.domain.narrowed(started.target.op, started.where) if started else None
    for axis in axes_of(started.target.op) if started else [AXIS[name] for name in summary.facts]:
        counts = summary.facts.get(axis.name, {})
        levels = domain.levels(axis.name) if domain else tuple(counts)
        shown = [f"{level} ({counts[level]:,})" for level in counts if counts[level]]
        never = [level for level in levels if not counts.get(level)]
        missing = f"never {', '.join(never)}" if never else ""
        rows.append((axis.name, "; ".join(filter(None, (", ".join(shown), missing)))))
    return rows


def one_line(summary: Summary) -> str:
    """A campaign in one line, every property that was not checked named."""
    parts = [_verdict_line(summary)]
    never = [name for name in summary.not_checked if name not in summary.passed]
    partly = [name for name in summary.not_checked if name in summary.passed]
    if never:
        parts.append(f"never checked: {', '.join(never)}")
    for name in partly:
        cases = sum(_without_turns(summary.not_checked[name]).values())
        if cases:
            parts.append(f"{name} not checked in {cases:,} of {count(summary.cases, 'case')}")
    return "; ".join(parts)
