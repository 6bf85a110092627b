"""Properties of the accesses themselves: bounds and crash.

A write outside the allocation is a finding at once. A read outside may be harmless (a masked-off
lane's address, a value that is thrown away), so the case runs again with other bytes out there: a
finding if any result changes, a hazard if none does.
"""

from kvfuzz.model.verdict import Hazard, Place, Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.observation import Run, Stray
from kvfuzz.oracles.properties import BASE, NotChecked, Runs, Variant, Wanted

OTHER_POISONS = {"outside_zero": 0x00, "outside_ones": 0x3C}
"""Two fills for bytes outside every allocation; 0x3C bytes are finite in every format."""


def _strays(run: Run, kind: str) -> list[Stray]:
    return [stray for stray in run.strays if stray.kind == kind]


def _sentence(stray: Stray) -> str:
    return (
        f"{stray.kernel} ({stray.where}), program {stray.program}, {stray.kind}s "
        f"{stray.nbytes} byte{'s' * (stray.nbytes > 1)} at byte {stray.offset} of {stray.buffer}, "
        "outside the allocation" + (f"; {stray.count} such accesses" if stray.count > 1 else "")
    )


def bounds_variants(base: Run) -> Wanted:
    """Runs with other bytes outside, where the base run read any."""
    if not _strays(base, "read"):
        return {}
    return {name: Variant(base.case, poison) for name, poison in OTHER_POISONS.items()}


def _influenced(runs: Runs) -> bool:
    base = runs[BASE]
    others = [runs[name] for name in OTHER_POISONS if name in runs]
    return any(
        other.error != base.error
        or any(not image.same(other.after[name], base.after[name]) for name in base.after)
        for other in others
    )


def bounds(runs: Runs) -> Violation | NotChecked | None:
    """No access outside an allocation that writes, or whose value reaches a result."""
    run = runs[BASE]
    if run.written is None:
        return NotChecked("this lane does not record accesses")
    if not run.launches:
        return NotChecked("no kernel launch was seen, so no access was recorded")
    writes, reads = _strays(run, "write"), _strays(run, "read")
    if writes:
        return Violation(_sentence(writes[0]), Place(writes[0].buffer, writes[0].offset))
    if reads and _influenced(runs):
        message = _sentence(reads[0]) + "; what is there changes the result"
        return Violation(message, Place(reads[0].buffer, reads[0].offset))
    return None


def stray_reads(runs: Runs) -> list[Hazard]:
    """Reads outside an allocation that change nothing."""
    reads = _strays(runs[BASE], "read")
    if not reads or _influenced(runs):
        return []
    return [
        Hazard(
            "stray_read",
            f"{stray.kernel} ({stray.where}) reads outside of {stray.buffer}",
        )
        for stray in reads
    ]


def crash(runs: Runs) -> Violation | None:
    """The target raises nothing but a declared refusal before its first launch."""
    run = runs[BASE]
    return Violation(f"the target raised {run.error}") if run.error else None
