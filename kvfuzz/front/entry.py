"""The console script. Imports nothing at module level that a worker must not have.

A worker imports this module once more, as its main module; click, rich and the engine (which loads
hypothesis) come with the first command.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from kvfuzz.errors import Exit

BISECT_SKIP = 125
"""What `git bisect run` takes for `cannot be tested`; any other code from 1 to 127 means bad."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Python ends with 1 on an exception, which here means a finding; so every exception that is
    not a verdict gets a code of its own.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(argv)
    bisecting = argv[:1] == ["replay"] and "--bisect" in argv
    if bisecting and code not in (Exit.CLEAN, Exit.FINDING, Exit.INTERRUPTED):
        return BISECT_SKIP
    return code


def _run(argv: list[str]) -> int:
    try:
        from kvfuzz.front.cli import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader is gone; the interpreter must not fail once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.INFRASTRUCTURE
    except Exception:
        traceback.print_exc()
        print("kvfuzz: a bug in kvfuzz itself, see the traceback above", file=sys.stderr)
        return Exit.INFRASTRUCTURE
