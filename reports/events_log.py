"""The event log: OUT/events.ndjson, one JSON object a line, appended and flushed line by line."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from kvfuzz.errors import InfrastructureError, UsageError
from kvfuzz.model.events import Event, Progress

NAME = "events.ndjson"
PROGRESS_S = 1.0
"""Progress is logged at most this often."""


class EventsLog:
    """A sink that appends events to the log of an output folder.

    The file is opened with the first event, when the campaign has made its folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: BinaryIO | None = None
        self._last_progress = -PROGRESS_S

    def __enter__(self) -> "EventsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, event: Event) -> None:
        """Append `event`. Raises InfrastructureError where the disk refuses."""
        if isinstance(event, Progress):
            if 0 <= event.elapsed_s - self._last_progress < PROGRESS_S:
                return
            self._last_progress = event.elapsed_s
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            self._file.write(msgspec.json.encode(event) + b"\n")
            self._file.flush()
        except OSError as error:
            raise InfrastructureError(
                f"{self._path}: cannot be written ({error.strerror})"
            ) from None


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, in order.

    A last line that was cut off when its process died is skipped. Raises UsageError for any other
    line that is no event.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Event)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise UsageError(f"{path}, line {number}: no event ({error})") from None
