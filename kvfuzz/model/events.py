"""What a campaign says while it runs: the only thing that reports read.

Events are tagged in JSON by their type, one object a line in OUT/events.ndjson.
"""

import msgspec

from kvfuzz.model.coverage import Exercised
from kvfuzz.model.seed import Seed
from kvfuzz.model.target import TargetInfo
from kvfuzz.model.verdict import Hazard, Verdict
from kvfuzz.model.vocabulary import Levels


class Started(msgspec.Struct, frozen=True, tag=True):
    """A campaign begins."""

    target: TargetInfo
    command: str
    lane: str
    arch: str
    random_seed: int
    budget_s: float
    where: dict[str, tuple[str, ...]]
    kvfuzz: str
    triton: str
    torch: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far a campaign is; `phase` is seeds, boundary, covering, random, shrink or extent."""

    phase: str
    cases: int
    elapsed_s: float


class Found(msgspec.Struct, frozen=True, tag=True):
    """A finding, reduced and saved."""

    seed: Seed
    verdict: Verdict
    path: str
    replay: str
    shrunk_from_bytes: int
    """Bytes of all buffers of the case that failed first."""
    extent: dict[str, Levels] | None = None
    """The levels under which it shows when one axis of its case is changed, by axis where those are
    not all; None where it was not tried out."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something that the user should know and that stops nothing."""

    message: str


class Combinations(msgspec.Struct, frozen=True):
    """Combinations of three levels of three axes that cases of the target can show."""

    shown: int = 0
    open: int = 0
    """Not shown, and not known to be impossible."""
    given_up: int = 0
    """Drawn for several times, and never shown by a case that was decided."""


class Summary(msgspec.Struct, frozen=True, tag=True):
    """A campaign ended. Counts are cases, except where named otherwise."""

    cases: int
    refused: int
    undecided: int
    """Cases of which no property was checked, for what the lane lacks."""
    rejected: int
    """Draws outside `--where`, never run."""
    findings: int
    elapsed_s: float
    ended_by: str
    facts: dict[str, dict[str, int]]
    not_checked: dict[str, dict[str, int]]
    """Per property: each reason for which it was not checked, with its cases."""
    passed: dict[str, int]
    failed: dict[str, int]
    """Per property: cases that failed it, those of known findings included."""
    hazards: tuple[tuple[Hazard, int], ...]
    exercised: tuple[Exercised, ...] = ()
    """What of the kernels' source ran; empty where the lane does not see it."""
    combinations: Combinations = Combinations()


Event = Started | Progress | Found | Note | Summary
