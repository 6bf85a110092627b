"""Replay: one saved case again, in a fresh worker, judged by what it does now."""

import msgspec

from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import Exit, UsageError
from kvfuzz.model.seed import Seed
from kvfuzz.model.target import TargetInfo, TargetSpec
from kvfuzz.model.verdict import Verdict


class Replayed(msgspec.Struct, frozen=True):
    """What a seed's case does now, and with which target."""

    seed: Seed
    verdict: Verdict
    target: TargetInfo

    @property
    def same_bytes(self) -> bool:
        """Whether every buffer ended as it did when the seed was recorded."""
        return self.verdict.digest == self.seed.expected.digest

    @property
    def exit_code(self) -> Exit:
        """By the verdict obtained now, never by the recorded one."""
        if self.verdict.failed:
            return Exit.FINDING
        about = [each for each in self.verdict.results if each.name == self.seed.property]
        checked = about and about[0].outcome == "passed"
        return Exit.CLEAN if checked else Exit.NOT_CHECKED


def replay(
    seed: Seed,
    *,
    target: str = "",
    sources: dict[str, str] | None = None,
    lane: str = "",
    arch: str = "",
    case_timeout_s: float = 60.0,
) -> Replayed:
    """Run the case of `seed` on its target, or on `target` where one is named.

    Raises UsageError for a seed of a file target without `target`, and for a target of another op.
    """
    name = target or seed.target
    if name.startswith("file:"):
        raise UsageError(
            f"seed {seed.id} is about the function {name.removeprefix('file:')} of a file "
            f"(content {seed.provenance.content}); say --target PATH.py:FUNCTION"
        )
    config = WorkerConfig(
        TargetSpec(name, sources or {}, seed.op),
        lane or seed.provenance.lane,
        arch or seed.provenance.arch,
    )
    with Worker(config, case_timeout_s=case_timeout_s) as worker:
        info = worker.describe().info
        if info.op != seed.op:
            raise UsageError(f"seed {seed.id} is about {seed.op}, and {name} is {info.op}")
        return Replayed(seed, worker.check(seed.case, explain=True), info)
