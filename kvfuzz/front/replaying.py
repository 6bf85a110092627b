"""`kvfuzz replay`: saved cases again, each reported by what it does now."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import kvfuzz
from kvfuzz.engine.replay import Replayed, replay
from kvfuzz.engine.store import read_seed
from kvfuzz.errors import Exit, KvfuzzError, UsageError
from kvfuzz.front.cli import complain
from kvfuzz.front.config import load_config
from kvfuzz.front.options import checked_sources, parse_duration, parse_sources
from kvfuzz.model.seed import Provenance, Seed, load
from kvfuzz.reports.replay import replay_lines

STDIN = "-"
PRECEDENCE = (Exit.FINDING, Exit.INFRASTRUCTURE, Exit.NOT_CHECKED, Exit.CLEAN)


class ReplayOptions(NamedTuple):
    """The options of `kvfuzz replay`, as typed."""

    target: str = ""
    source: tuple[str, ...] = ()
    lane: str = ""
    arch: str = ""
    case_timeout: str = "60s"

    def command(self, seed: str) -> str:
        """The command line that replays `seed` by these options."""
        parts = ["kvfuzz", "replay", seed]
        parts += ["--target", self.target] if self.target else []
        parts += [part for each in self.source for part in ("--source", each)]
        parts += ["--lane", self.lane] if self.lane else []
        parts += ["--arch", self.arch] if self.arch else []
        return shlex.join(parts)


def read(name: str) -> Seed:
    """The seed in the file called `name`, or on stdin for `-`."""
    if name == STDIN:
        return load(sys.stdin.buffer.read(), where="on stdin")
    return read_seed(Path(name))


def worst(codes: Sequence[int]) -> Exit:
    """The exit code of several seeds: finding over infrastructure over not checked over clean."""
    return next((code for code in PRECEDENCE if code in codes), Exit.CLEAN)


def over_seeds(command: str, names: Sequence[str], act: Callable[[str, Seed], Exit]) -> Exit:
    """Do something with each seed; `act` takes its name and the seed, and prints.

    Every seed is read before the first one runs. Raises UsageError, which ends the command; of
    other errors each is said with its seed, and the next one goes on.
    """
    if names.count(STDIN) > 1:
        raise UsageError(f"{command} {STDIN} {STDIN}: stdin holds one seed")
    codes = []
    for index, (name, seed) in enumerate([(name, read(name)) for name in names]):
        if index:
            print()
        try:
            codes.append(act(name, seed))
        except UsageError:
            raise
        except KvfuzzError as error:
            complain(type(error)(f"seed {name}: {error}"))
            codes.append(error.exit_code)
    return worst(codes)


def sources_of(options: ReplayOptions, *, folder: Path) -> dict[str, str]:
    """The source trees of the configuration of `folder`, those of the options over them."""
    configured = checked_sources(load_config(folder).source, relative_to=folder)
    return configured | parse_sources(options.source)


def replay_seeds(names: Sequence[str], options: ReplayOptions, *, folder: Path) -> Exit:
    """Replay each seed and report it. Raises as `over_seeds` does."""
    timeout = parse_duration(options.case_timeout, name="--case-timeout")
    sources = sources_of(options, folder=folder)

    def act(name: str, seed: Seed) -> Exit:
        replayed = replay(
            seed,
            target=options.target,
            sources=sources,
            lane=options.lane,
            arch=options.arch,
            case_timeout_s=timeout,
        )
        print("\n".join(_lines(replayed, name, options)), flush=True)
        return replayed.exit_code

    return over_seeds("replay", names, act)


def _lines(replayed: Replayed, name: str, options: ReplayOptions) -> list[str]:
    info, environment = replayed.description.info, replayed.description.environment
    now = Provenance(
        kvfuzz=kvfuzz.__version__,
        triton=environment.triton,
        torch=environment.torch,
        lane=environment.lane,
        arch=environment.arch,
        content=info.content,
    )
    return replay_lines(
        replayed.seed,
        replayed.verdict,
        target=info.name,
        now=now,
        checked=replayed.exit_code != Exit.NOT_CHECKED,
        path=name,
        command=options.command(name),
    )
