"""Properties of what the hardware may do in another way: no_overflow and no_race.

Integers of 32 bits that lose bits may do so unseen, as long as the result decides no access. Two
programs of a launch run in any order, so a byte that both write differently, or that one reads and
the other changes, has no defined value.
"""

from kvfuzz.model.verdict import Violation
from kvfuzz.oracles.observation import Overflow, Race, Run
from kvfuzz.oracles.properties import BASE, NotChecked, Runs, Variant
from kvfuzz.oracles.stored_bytes import place_of

READERS = "readers"


def _unseen(run: Run) -> NotChecked | None:
    if run.written is None:
        return NotChecked("this lane does not record accesses")
    if not run.launches:
        return NotChecked("no kernel launch was seen, so no access was recorded")
    return None


def no_overflow(runs: Runs) -> Violation | NotChecked | None:
    """No 32-bit integer that lost bits reaches an address, or the mask or branch of an access."""
    run = runs[BASE]
    if unseen := _unseen(run):
        return unseen
    if not run.overflows:
        return None
    first = run.overflows[0]
    known = {buffer.name for buffer in run.case.buffers}
    place = None
    if first.reached == "address" and first.buffer in known:
        place = place_of(run.case, first.buffer, first.used)
    return Violation(_lost(first), place)


def _lost(each: Overflow) -> str:
    start = (
        f"{each.kernel} ({each.lost_where}), program {each.program}: a 32-bit integer loses bits"
    )
    if each.reached == "address":
        return (
            f"{start}, and the access at {each.where} goes to byte {each.used} of {each.buffer} "
            f"where 64-bit arithmetic gives {each.exact}"
        )
    guarded = "mask of the access" if each.reached == "mask" else "branch"
    return (
        f"{start}, and the {guarded} at {each.where} is {bool(each.used)} "
        f"where 64-bit arithmetic gives {bool(each.exact)}"
    )


def race_variants(base: Run) -> dict[str, Variant]:
    """The case with readers noted, where a launch may have read what it wrote."""
    return {READERS: Variant(base.case, readers=True)} if base.crossed else {}


def no_race(runs: Runs) -> Violation | NotChecked | None:
    """No byte is written differently, or read and changed, by two programs of one launch."""
    run = runs[BASE]
    if unseen := _unseen(run):
        return unseen
    if run.synchronises:
        return NotChecked(f"{run.synchronises} orders its programs by atomics")
    races = run.races or (runs[READERS].races if READERS in runs else ())
    if not races:
        return None
    first = races[0]
    return Violation(_met(first), place_of(run.case, first.buffer, first.offset))


def _met(race: Race) -> str:
    what = f"{race.nbytes} byte{'s' * (race.nbytes > 1)} at byte {race.offset} of {race.buffer}"
    start = f"{race.kernel} ({race.where}), program {race.program}"
    if race.other_program == race.program and race.kind == "write/write":
        return f"{start} writes two values to {what} in one store"
    other = "other programs" if race.other_program is None else f"program {race.other_program}"
    at = f" ({race.other_where})" if race.other_where else ""
    if race.kind == "read/write":
        return f"{start} accesses {what}, which it or {other} changes while the other reads it"
    return f"{start} and {other}{at} write different values to {what}"
