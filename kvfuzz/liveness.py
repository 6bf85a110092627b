"""Whether a process lives: journals and scratch directories are their owner's while it does."""

import os


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has the id `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:  # no process has such an id
        return False
    except OSError:  # it exists and is somebody else's
        return True
    return True
