"""Replay: one saved case again, in a fresh worker, judged by what it does now."""

import msgspec

from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import Description, WorkerConfig
from kvfuzz.errors import Exit, UsageError
from kvfuzz.model.seed import Seed
from kvfuzz.model.target import DEFAULT_ARCH, TargetSpec
from kvfuzz.model.verdict import Verdict


class Replayed(msgspec.Struct, frozen=True):
    """What a seed's case does now, on which target, lane and versions."""

    seed: Seed
    verdict: Verdict
    description: Description

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


def config_of(
    seed: Seed,
    *,
    target: str = "",
    sources: dict[str, str] | None = None,
    lane: str = "",
    arch: str = "",
) -> WorkerConfig:
    """What a worker for `seed` runs: its own target, lane and arch, or those that are named.

    Raises UsageError for a seed of a file target without `target`.
    """
    name = target or seed.target
    if name.startswith("file:"):
        raise UsageError(
            f"seed {seed.id} is about the function {name.removeprefix('file:')} of a file "
            f"(content {seed.provenance.content}); say --target PATH.py:FUNCTION"
        )
    recorded = seed.provenance.arch
    # A seed recorded on a CUDA device replays on the cpu lane, which compiles for AMD alone.
    arch = arch or (recorded if recorded.startswith("gfx") else DEFAULT_ARCH)
    spec = TargetSpec(name, sources or {}, seed.op)
    return WorkerConfig(spec, lane or seed.provenance.lane, arch)


def described(worker: Worker, config: WorkerConfig, seed: Seed) -> Description:
    """What `worker` runs. Raises UsageError for a target of another op than the seed's."""
    description = worker.describe()
    if description.info.op != seed.op:
        raise UsageError(
            f"seed {seed.id} is about {seed.op}, and {config.target.name} is {description.info.op}"
        )
    return description


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

    Raises what `config_of` and `described` raise.
    """
    config = config_of(seed, target=target, sources=sources, lane=lane, arch=arch)
    with Worker(config, case_timeout_s=case_timeout_s) as worker:
        description = described(worker, config, seed)
        return Replayed(seed, worker.check(seed.case, explain=True), description)
