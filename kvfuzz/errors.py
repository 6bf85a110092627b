"""What kvfuzz says when it cannot go on: one exception class per exit code, one line per message.

A message names the value, what was expected and what to do about it. Nothing here is raised for
a bug in a target: that is a finding, which is data (`kvfuzz.model.verdict`).
"""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command. A finding wins over infrastructure, that over not checked."""

    CLEAN = 0
    FINDING = 1
    USAGE = 2
    INFRASTRUCTURE = 3
    NOT_CHECKED = 4
    INTERRUPTED = 130


class KvfuzzError(Exception):
    """A condition that ends the command with one clear line and `exit_code`."""

    exit_code: Exit = Exit.USAGE


class UsageError(KvfuzzError):
    """The command line, a seed or a configuration asks for something that cannot be."""

    exit_code = Exit.USAGE


class InfrastructureError(KvfuzzError):
    """The machine failed: no device, a lost worker, a disk that cannot be written."""

    exit_code = Exit.INFRASTRUCTURE


class NotCheckedError(KvfuzzError):
    """Nothing was decided: the target, its source file or an optional package is absent."""

    exit_code = Exit.NOT_CHECKED
