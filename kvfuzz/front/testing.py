"""`kernel_test`: a campaign over one target as a pytest test.

    import kvfuzz

    test_gather = kvfuzz.kernel_test("my_kernels.py:gather_cache")

The engine is imported when the test runs, never when it is collected.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfuzz.errors import UsageError
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE

if TYPE_CHECKING:
    import pytest

    from kvfuzz.front.config import Defaults
    from kvfuzz.model.events import Event, Found, Summary

FOLDER = ".kvfuzz"
"""In pytest's rootdir: one output folder a test, so that seeds survive the run and replay first."""
RECORD = "kvfuzz"
"""Name under which a report carries the line that the plugin prints at the end."""


class Wanted(NamedTuple):
    """A kernel test as it was declared."""

    target: str
    where: str
    max_cases: int
    budget: str
    seed: int
    lane: str
    arch: str
    sources: Mapping[str, str]
    op: str
    declared_in: Path


def kernel_test(
    target: str,
    *,
    where: str = "",
    max_cases: int = 200,
    budget: str = "60s",
    seed: int = 0,
    lane: str = DEFAULT_LANE,
    arch: str = DEFAULT_ARCH,
    sources: Mapping[str, str] | None = None,
    op: str = "",
) -> Callable[["pytest.FixtureRequest"], None]:
    """A test function that fuzzes `target` and fails with the text of the first finding.

    `target`, `where` and the rest mean what they mean to `kvfuzz run`; relative paths are relative
    to the file that calls this. The test fails, too, where nothing could be checked: a kernel test
    never passes or skips without having compared bytes. Raises UsageError for a `max_cases` below 1
    or a negative `seed`.
    """
    for name, number, least in (("max_cases", max_cases, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise UsageError(f"kernel_test: {name}={number!r}, expected an integer from {least}")
    caller = inspect.stack(0)[1]
    here = Path(caller.filename).resolve()
    wanted = Wanted(
        target, where, max_cases, budget, seed, lane, arch, dict(sources or {}), op, here.parent
    )

    def test(request: "pytest.FixtureRequest") -> None:
        run_kernel_test(request, wanted)

    # pytest shows where a test is by its code: that is the line that declared it.
    test.__code__ = test.__code__.replace(co_filename=caller.filename, co_firstlineno=caller.lineno)
    test.__doc__ = f"Fuzz {target}."
    return test


def run_kernel_test(request: "pytest.FixtureRequest", wanted: Wanted) -> None:
    """Run the campaign of one test. Ends in pytest.fail for all but a clean one."""
    __tracebackhide__ = True
    import pytest

    from kvfuzz.errors import KvfuzzError
    from kvfuzz.reports.finding import finding_text

    seen, error = Seen(), ""
    try:
        _campaign(request, wanted, seen)
    except KvfuzzError as raised:
        # Failing in here would print what the worker raised as the cause.
        error = f"kvfuzz: {raised}"
    if seen.summary is not None:
        request.node.user_properties.append((RECORD, seen.line(request.node.nodeid)))
    if error:
        pytest.fail(error, pytrace=False)
    if seen.found is not None:
        pytest.fail(finding_text(seen.found), pytrace=False)


class Seen:
    """A sink that keeps what a test needs of a campaign's events."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self.summary: Summary | None = None

    def __call__(self, event: "Event") -> None:
        """Keep the finding and the summary."""
        from kvfuzz.model.events import Found, Summary

        if isinstance(event, Found):
            self.found = event
        elif isinstance(event, Summary):
            self.summary = event

    def line(self, test: str) -> str:
        """One line: how much was checked, and what was not."""
        from kvfuzz.reports.campaign import one_line

        return f"{test}: {one_line(self.summary)}" if self.summary else test


def _campaign(request: "pytest.FixtureRequest", wanted: Wanted, seen: "Seen") -> None:
    from kvfuzz.engine.campaign import Campaign
    from kvfuzz.errors import Exit
    from kvfuzz.front.options import checked_sources
    from kvfuzz.front.running import campaign_options
    from kvfuzz.reports.events_log import EventsLog

    sources = checked_sources(dict(wanted.sources), relative_to=wanted.declared_in)
    out = output_folder(request.config.rootpath, request.node.nodeid)
    options = campaign_options(
        target_from(wanted.declared_in, wanted.target),
        _defaults(request.config, wanted, out),
        sources,
        command=f"pytest {request.node.nodeid}",
    )
    with EventsLog(options.out) as log:

        def emit(event: "Event") -> None:
            log(event)
            seen(event)

        if Campaign(options, emit).run() == Exit.INTERRUPTED:
            raise KeyboardInterrupt


def _defaults(config: "pytest.Config", wanted: Wanted, out: Path) -> "Defaults":
    """What the test declares, under what the command line of pytest says."""
    from kvfuzz.front.config import Defaults

    values: dict[str, Any] = {
        name: config.getoption(f"kvfuzz_{name}", default=None)
        for name in ("max_cases", "budget", "seed")
    }
    over = {name: value for name, value in values.items() if value is not None}
    declared: dict[str, Any] = {
        name: getattr(wanted, name)
        for name in ("where", "max_cases", "budget", "seed", "lane", "arch", "op")
    }
    return Defaults(**declared | over, out=os.path.relpath(out))


def target_from(folder: Path, target: str) -> str:
    """`target` as seen from the current folder, where it is a path relative to `folder`."""
    file, _, function = target.rpartition(":")
    if not file.endswith(".py"):
        return target
    path = folder / file
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{function}"


def output_folder(root: Path, test: str) -> Path:
    """The folder of one test, kept out of version control."""
    base = root / FOLDER
    ignore = base / ".gitignore"
    try:
        base.mkdir(exist_ok=True)
        if not ignore.exists():
            ignore.write_text("*\n")
    except OSError:
        pass  # the campaign says in one line which folder cannot be written
    return base / re.sub(r"[^\w.\[\]-]+", "-", test)
