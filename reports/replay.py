"""What a replayed seed did, as text."""

import msgspec

from kvfuzz.model.seed import Provenance, Seed
from kvfuzz.model.verdict import Verdict
from kvfuzz.reports.finding import render
from kvfuzz.reports.text import Pairs, columns
from kvfuzz.reports.view import view_of


def replay_lines(
    seed: Seed,
    verdict: Verdict,
    *,
    target: str,
    now: Provenance,
    checked: bool,
    path: str,
    command: str,
) -> list[str]:
    """The finding where there is one, else what passed; then how that compares with the record.

    `target` and `now` say what the case ran on; `checked` whether the seed's property was decided.
    """
    recorded = _recorded(seed, verdict, target, now)
    if verdict.failed:
        ran = msgspec.structs.replace(seed, target=target, provenance=now)
        view = view_of(ran, verdict, path=path, replay=command, recorded=recorded)
        return render(view).splitlines()
    if verdict.refused:
        head = f"not checked: {path}: the target refused the case: {verdict.refused}"
    elif not checked:
        reasons = {each.name: each.reason for each in verdict.results}
        reason = reasons.get(seed.property) or "the target has no such property"
        head = f"not checked: {path}: {seed.property}: {reason}"
    else:
        head = f"clean: {path}: {seed.property} holds for {target}"
    return [*columns([(head,)], indent=0), *columns(_outcomes(verdict) + recorded)]


def _outcomes(verdict: Verdict) -> Pairs:
    passed = ", ".join(each.name for each in verdict.results if each.outcome == "passed")
    rows: Pairs = [("passed", passed)] if passed else []
    unchecked = [each for each in verdict.results if each.outcome == "not_checked"]
    for index, each in enumerate(unchecked):
        rows.append(("not checked" if not index else "", f"{each.name}: {each.reason}"))
    return rows


def _recorded(seed: Seed, verdict: Verdict, target: str, now: Provenance) -> Pairs:
    """How the verdict compares with what the seed records, and what else is different."""
    recorded, then = seed.expected, seed.provenance
    same = "the same bytes now" if verdict.digest == recorded.digest else "other bytes now"
    rows = [("recorded", f"{recorded.verdict} ({seed.property}) for {seed.target}; {same}")]
    changed = [
        f"{name} {getattr(then, name)}, now {getattr(now, name)}"
        for name in ("kvfuzz", "triton", "torch", "lane", "arch", "content")
        if getattr(then, name) != getattr(now, name)
        if name != "content" or target == seed.target
    ]
    if changed:
        rows.append(("", f"with {'; '.join(changed)}"))
    return rows
