"""`kvfuzz seeds minimize`: smaller seeds beside those that were given, which stay as they are."""

from collections.abc import Sequence
from pathlib import Path

from kvfuzz.engine.minimize import minimize
from kvfuzz.engine.replay import config_of
from kvfuzz.engine.store import write_atomic
from kvfuzz.errors import Exit, UsageError
from kvfuzz.front.options import parse_duration
from kvfuzz.front.replaying import STDIN, ReplayOptions, over_seeds, sources_of
from kvfuzz.model.seed import Seed, dump
from kvfuzz.reports.reduction import reduction_lines


def minimize_seeds(
    names: Sequence[str], options: ReplayOptions, *, budget: str, out: str, folder: Path
) -> Exit:
    """Minimise each seed, write the result and report it. Raises as `over_seeds` does."""
    budget_s = parse_duration(budget, name="--budget")
    timeout = parse_duration(options.case_timeout, name="--case-timeout")
    sources = sources_of(options, folder=folder)
    into = _made(out) if out else None

    def act(name: str, seed: Seed) -> Exit:
        config = config_of(
            seed, target=options.target, sources=sources, lane=options.lane, arch=options.arch
        )
        done = minimize(seed, config, budget_s=budget_s, case_timeout_s=timeout)
        path = Path(name)
        if done.is_smaller:
            beside = folder if name == STDIN else path.parent
            path = _saved(done.after, into or beside)
        lines = reduction_lines(
            done.before,
            done.after,
            name=name,
            path=str(path),
            runs=done.reduction.runs,
            ended_by=done.reduction.ended_by,
            command=options.command(str(path)),
        )
        print("\n".join(lines), flush=True)
        return Exit.CLEAN

    return over_seeds("seeds minimize", names, act)


def _made(out: str) -> Path:
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: no folder ({error.strerror}); name another one") from None
    return folder


def _saved(seed: Seed, folder: Path) -> Path:
    """Write `seed` under its id, where no file of that name is yet."""
    path = folder / f"{seed.id}.json"
    if not path.exists():
        try:
            write_atomic(path, dump(seed))
        except OSError as error:
            raise UsageError(
                f"{folder}: cannot be written ({error.strerror}); say --out DIR"
            ) from None
    return path
