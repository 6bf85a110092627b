"""`kvfuzz run`: options from flags and configuration, one campaign, its sinks."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvfuzz.engine.campaign import Campaign, Options
from kvfuzz.errors import UsageError
from kvfuzz.front.config import Defaults, load_config
from kvfuzz.front.options import checked_sources, parse_duration, parse_sources
from kvfuzz.model.axes import parse_where
from kvfuzz.model.events import Event
from kvfuzz.model.target import TargetSpec
from kvfuzz.reports.console import ConsoleReport
from kvfuzz.reports.events_log import EventsLog


def campaign_options(
    target: str, wanted: Defaults, sources: dict[str, str], *, command: str
) -> Options:
    """The campaign that `wanted` describes. Raises UsageError for values that mean nothing."""
    return Options(
        target=TargetSpec(target, sources, wanted.op),
        out=_folder(wanted.out),
        where=parse_where(wanted.where),
        budget_s=parse_duration(wanted.budget, name="--budget"),
        max_cases=wanted.max_cases,
        random_seed=wanted.seed,
        lane=wanted.lane,
        arch=wanted.arch,
        keep_going=wanted.keep_going,
        until_coverage=wanted.until_coverage,
        case_timeout_s=parse_duration(wanted.case_timeout, name="--case-timeout"),
        command=command,
    )


def _folder(out: str) -> Path:
    if not out.strip():
        raise UsageError(f"--out {out!r}: expected a folder")
    return Path(out).expanduser()


def run_campaign(
    target: str, flags: Mapping[str, object], source: tuple[str, ...], *, folder: Path
) -> int:
    """Run `target` by the flags that were given over the configuration of `folder`."""
    given = {name: value for name, value in flags.items() if value is not None}
    configured = load_config(folder)
    sources = checked_sources(configured.source, relative_to=folder) | parse_sources(source)
    wanted = msgspec.structs.replace(configured, **given)
    options = campaign_options(
        target, wanted, sources, command=shlex.join(["kvfuzz", *sys.argv[1:]])
    )
    with ConsoleReport(sys.stdout, target=target) as console, EventsLog(options.out) as log:

        def emit(event: Event) -> None:
            log(event)
            console(event)

        return Campaign(options, emit).run()
