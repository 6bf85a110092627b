"""Try every lane out, each in a worker of its own, since a process has one lane for life."""

from concurrent.futures import TimeoutError as FutureTimeout

import msgspec
from pebble import ProcessExpired

from kvfuzz.engine.pool import START_TIMEOUT_S, cause, one_worker
from kvfuzz.engine.worker.entry import check_up
from kvfuzz.errors import InfrastructureError
from kvfuzz.model.checkup import Checkup, LaneState
from kvfuzz.model.target import LANES


def check_lanes(arch: str) -> list[Checkup]:
    """What a fresh worker says about each lane; a worker that dies or hangs is its trouble."""
    return [_checked(lane, arch) for lane in LANES]


def _checked(lane: str, arch: str) -> Checkup:
    try:
        pool = one_worker()
    except InfrastructureError as error:
        return Checkup(LaneState(lane, trouble=str(error)))
    with pool:
        try:
            task = pool.schedule(check_up, args=(lane, arch), timeout=START_TIMEOUT_S)
            return msgspec.msgpack.decode(task.result(), type=Checkup)
        except ProcessExpired as death:
            trouble = f"the kernel {cause(death)}"
        except FutureTimeout:
            trouble = f"the worker gave no answer within {START_TIMEOUT_S:.0f} s"
        except KeyboardInterrupt:
            pool.stop()
            raise
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
    return Checkup(LaneState(lane, trouble=trouble))
