"""Properties of what the hardware may do in another way: no_overflow and no_race.

Integers of at most 32 bits may lose some unseen, as long as the result decides no access. Two
programs of a launch run in any order, so a byte that both write differently, or that one reads and
the other changes, has no defined value. In a buffer of the case that is a finding; in memory of the
target's own, where padding rows may be dumped, it is one once a result depends on it. Numbers that
have a bound two programs may add up apart: that, too, is one where the order decides what is right.
"""

from kvfuzz.model.verdict import Hazard, Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.observation import Overflow, Race, Run
from kvfuzz.oracles.properties import BASE, NotChecked, Order, Runs, Variant, Wanted
from kvfuzz.oracles.stored_bytes import place_of

READERS = "readers"


def _unseen(run: Run) -> NotChecked | None:
    if run.written is None:
        return NotChecked("this lane does not record accesses")
    if not run.launches:
        return NotChecked("no kernel launch was seen, so no access was recorded")
    return None


def no_overflow(runs: Runs) -> Violation | NotChecked | None:
    """No integer that lost bits reaches an address, or the mask, branch or loop of an access."""
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
    start = f"{each.kernel} ({each.lost_where}), program {each.program}: an integer loses bits"
    if each.reached == "address":
        return (
            f"{start}, and the access at {each.where} goes to byte {each.used} of {each.buffer} "
            f"where 64-bit arithmetic gives {each.exact}"
        )
    if each.reached == "bound":
        return (
            f"{start}, and the loop at {each.where} has the bound {each.used} "
            f"where 64-bit arithmetic gives {each.exact}"
        )
    guarded = "mask of the access" if each.reached == "mask" else "branch"
    return (
        f"{start}, and the {guarded} at {each.where} is {bool(each.used)} "
        f"where 64-bit arithmetic gives {bool(each.exact)}"
    )


def race_variants(base: Run) -> Wanted:
    """Where it takes a second look, the case with the programs one after the other from either end:
    for races in memory of the target's own, and where a launch may have read what it wrote. Then
    the case with readers noted, too."""
    if not base.crossed and not _races(base, own=True) and not _of_numbers(base):
        return {}
    orders: tuple[Order, ...] = ("forward", "backward")
    noted = {READERS: Variant(base.case, readers=True)} if base.crossed else {}
    return noted | {order: Variant(base.case, order=order) for order in orders}


def _races(run: Run, *, own: bool) -> list[Race]:
    """The races in memory of the target's own, or in buffers of the case."""
    known = {buffer.name for buffer in run.case.buffers}
    return [race for race in run.races if (race.buffer not in known) == own]


def _of_numbers(run: Run) -> list[Race]:
    """The races in which two programs write numbers that have a bound: both may be right."""
    bounded = {each.field.buffer for each in run.expectation.stored if each.within is not None}
    races = _races(run, own=False)
    return [each for each in races if each.buffer in bounded and each.kind == "write/write"]


def _depends_on_order(runs: Runs) -> bool:
    others = [runs[name] for name in ("forward", "backward") if name in runs]
    base = runs[BASE]
    return any(
        other.error != base.error or any(not _same(base, other, name) for name in base.after)
        for other in others
    )


def _same(base: Run, other: Run, name: str) -> bool:
    """Whether two runs left the same in a buffer, numbers within their bound being the same."""
    mine, theirs = base.after[name], other.after[name]
    if image.same(mine, theirs):
        return True
    if name not in base.expectation.must:
        return False
    settled = base.expectation.settled
    return image.same(settled(name, mine), settled(name, theirs))


def no_race(runs: Runs) -> Violation | NotChecked | None:
    """No byte is written differently by two programs of one launch, and none that one reads is
    changed by another with an effect on any result."""
    run = runs[BASE]
    if unseen := _unseen(run):
        return unseen
    depends, of_numbers = _depends_on_order(runs), _of_numbers(run)
    races = [each for each in _races(run, own=False) if depends or each not in of_numbers]
    if not races and depends:
        races = [*_races(run, own=True), *(runs[READERS].races if READERS in runs else ())]
    if races:
        return Violation(_met(races[0]), place_of(run.case, races[0].buffer, races[0].offset))
    if run.synchronising:
        return NotChecked(f"{run.synchronising[0]} orders its own programs")
    return None


def harmless_races(runs: Runs) -> list[Hazard]:
    """Reads of bytes that another program changes, and writes to memory of the target's own that
    another program overwrites, which no order of the programs shows."""
    if _depends_on_order(runs):
        return []
    noted = runs[READERS].races if READERS in runs else ()
    read = [race for race in noted if race.kind == "read/write"]
    return [
        Hazard(kind, f"{race.kernel} ({race.where}) in {race.buffer}")
        for kind, races in (
            ("read_race", read),
            ("write_race", [*_races(runs[BASE], own=True), *_of_numbers(runs[BASE])]),
        )
        for race in races
    ]


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
