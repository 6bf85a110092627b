"""Events on a console: a live line on a terminal, a plain log anywhere else."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvfuzz.model.events import Event, Found, Note, Progress, Started, Summary
from kvfuzz.reports.campaign import header_lines, summary_lines
from kvfuzz.reports.finding import HEADING, finding_text
from kvfuzz.reports.text import count, printable, seconds

PLAIN_PROGRESS_S = 5.0
"""Off a terminal, progress is one line at most this often."""


class Progressing:
    """The one line that says how far a campaign is."""

    def __init__(self) -> None:
        self.budget_s = 0.0

    def line(self, progress: Progress) -> str:
        """Phase, cases, rate, time."""
        rate = progress.cases / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
        spent = f"{seconds(progress.elapsed_s)} of {seconds(self.budget_s)}"
        if progress.phase == "shrink":
            return f"shrinking a finding  after {count(progress.cases, 'case')}  {spent}"
        return f"{progress.phase:<7} {count(progress.cases, 'case')}  {rate:,.1f}/s  {spent}"


class ConsoleReport:
    """A sink that prints header, progress, findings and summary to `stream`."""

    def __init__(
        self,
        stream: TextIO,
        *,
        target: str = "",
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        # Not rich's own guess: FORCE_COLOR, which many CI systems set, would make it a terminal.
        self._is_terminal = stream.isatty() if live is None else live
        self._console = Console(
            file=stream,
            force_terminal=self._is_terminal,
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        self._is_live = self._is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._started: Started | None = None
        self._progress = Progressing()
        self._clock = clock
        self._last_line = clock()
        self._target = target

    def __enter__(self) -> "ConsoleReport":
        if self._is_live and self._target:
            self._show(f"loading {printable(self._target)}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hide()

    def __call__(self, event: Event) -> None:
        """Show `event`."""
        match event:
            case Started():
                self._started = event
                self._progress.budget_s = event.budget_s
                self.write(*header_lines(event))
            case Progress():
                self._advance(self._progress.line(event))
            case Found():
                self.write("", *finding_text(event).splitlines())
            case Note():
                self.write(f"note: {printable(event.message)}")
            case Summary():
                self.write("", *summary_lines(event, self._started))

    def write(self, *lines: str) -> None:
        """Print lines, below which the live line goes on."""
        self._hide()
        for line in lines:
            if self._is_terminal and line.startswith(HEADING):
                self._console.print(Text(line, "bold red"), crop=False)
            else:
                self._stream.write(line + "\n")
        self._stream.flush()

    def _advance(self, line: str) -> None:
        if self._is_live:
            self._show(line)
        elif self._clock() - self._last_line >= PLAIN_PROGRESS_S:
            self._last_line = self._clock()
            self.write(line)

    def _show(self, line: str) -> None:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            # Written to the stream as it is, so that what others print is not rearranged.
            self._live = Live(
                text,
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        else:
            self._live.update(text, refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
