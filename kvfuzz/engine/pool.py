"""One worker process: started on demand, killed when a case hangs, replaced when one dies.

A crash and a hang are verdicts about the case that caused them, so the parent turns them into a
failed `crash` property and goes on with a fresh worker.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import cache
from multiprocessing.forkserver import ensure_running
from types import TracebackType

import msgspec
from pebble import ProcessExpired, ProcessPool

from kvfuzz.engine.worker.entry import (
    DIED_WITHOUT_ERROR,
    LOST_DEVICE,
    Description,
    WorkerConfig,
    check,
    describe,
    prove,
    prove_tensors,
    settle,
)
from kvfuzz.errors import InfrastructureError, KvfuzzError
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.proof import Proof, TensorsFile
from kvfuzz.model.verdict import PropertyResult, Verdict, Violation

START_TIMEOUT_S = 180.0
"""What a target imports, on a cold disk. The server's own imports have no limit, only Ctrl-C."""
IMPATIENT = 4
"""By how much sooner a judge gives up that is asked again."""
FORKED = multiprocessing.get_context("forkserver")
"""Workers fork from a server that has imported torch and triton and done nothing else: one that
replaces another is there at once, and is as fresh. Their standard streams are those that this
process had when the first one started."""
FORKED.set_forkserver_preload(["kvfuzz.engine.worker.preload"])


@cache
def serve() -> None:
    """Have the server, which starts once, and wait for its imports.

    Raises InfrastructureError where they kill it.
    """
    with _unheard():
        ensure_running()
    first = FORKED.Process(target=os.getpid)
    try:
        first.start()
        first.join()
    except (EOFError, OSError) as error:
        raise InfrastructureError(
            f"no worker could be started ({type(error).__name__}: {error}); "
            "python -c 'import torch, triton' may show why"
        ) from error


@contextmanager
def _unheard() -> Iterator[None]:
    """SIGINT blocked, which the threads and processes that start meanwhile inherit.

    Ctrl-C reaches the whole process group; the parent alone is to act on it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def one_worker() -> ProcessPool:
    """A pool of one worker, which has started. Raises as `serve` does."""
    serve()
    pool = ProcessPool(1, context=FORKED, initializer=settle, initargs=[dict(os.environ)])
    with _unheard():
        pool.schedule(os.getpid).result()
    return pool


class Worker:
    """Executes and judges cases in a child process, one at a time."""

    def __init__(self, config: WorkerConfig, *, case_timeout_s: float) -> None:
        self._config = msgspec.msgpack.encode(config)
        self._timeout = case_timeout_s
        self._pool = one_worker()
        self._started = False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.stop()
        self._pool.join()

    def describe(self) -> Description:
        """Load the target and say what it is.

        Raises the KvfuzzError that the worker met, and InfrastructureError where it died.
        """
        try:
            task = self._pool.schedule(describe, args=(self._config,), timeout=START_TIMEOUT_S)
            description = msgspec.msgpack.decode(task.result(), type=Description)
        except ProcessExpired as death:
            raise InfrastructureError(
                f"the worker {cause(death)} while loading the target; "
                "run the target's file by itself to see why"
            ) from None
        except FutureTimeout:
            raise InfrastructureError(
                f"the worker did not load the target within {START_TIMEOUT_S:.0f} s"
            ) from None
        except (KvfuzzError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InfrastructureError(
                f"the worker failed while loading the target: {type(error).__name__}: {error}"
            ) from error
        self._started = True
        return description

    def prove(self, case: PlanCase, *, every_count: bool = True) -> Proof:
        """What is proved of the views that the target makes of a plan.

        Raises the KvfuzzError that the worker met, and InfrastructureError where it was lost.
        """
        return self._proof(prove, self._config, msgspec.msgpack.encode(case), every_count)

    def prove_tensors(self, file: TensorsFile) -> Proof:
        """What is proved of views that an engine printed. Raises as `prove` does."""
        return self._proof(prove_tensors, msgspec.msgpack.encode(file))

    def _proof(self, question: Callable[..., bytes], *arguments: object) -> Proof:
        try:
            return msgspec.msgpack.decode(self._asked("a proof", question, *arguments), type=Proof)
        except (ProcessExpired, FutureTimeout) as error:
            how = cause(error) if isinstance(error, ProcessExpired) else "gave no answer in time"
            raise InfrastructureError(f"the worker {how} while proving a plan") from None

    def check(self, case: AnyCase, *, in_turn: bool = False, explain: bool = False) -> Verdict:
        """The verdict on `case` as in `Judge.verdict`, the worker's death or silence included."""
        packed = msgspec.msgpack.encode(case)
        # What ends late may be a variant, or a comparison: asked again, the judge gives up early.
        for patience in (self._timeout, self._timeout / IMPATIENT):
            arguments = (self._config, packed, in_turn, explain, patience)
            try:
                answer = self._asked("a case", check, *arguments)
                return msgspec.msgpack.decode(answer, type=Verdict)
            except ProcessExpired as death:
                return _fatal(f"the target {cause(death)}")
            except FutureTimeout:
                continue
        return _fatal(f"the target hung: no end after {self._timeout:g} s, twice (--case-timeout)")

    def _asked(self, about: str, question: Callable[..., bytes], *arguments: object) -> bytes:
        """The worker's answer. Raises ProcessExpired or FutureTimeout where the worker is lost."""
        if not self._started:
            self.describe()
        try:
            task = self._pool.schedule(question, args=arguments, timeout=self._timeout)
            answer: bytes = task.result()
        except (ProcessExpired, FutureTimeout):
            self._started = False
            raise
        except (KvfuzzError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # The worker judges the target's exceptions itself, so this one is kvfuzz's own.
            raise InfrastructureError(
                f"kvfuzz itself failed on {about}: {type(error).__name__}: {error}"
            ) from error
        return answer


def cause(death: ProcessExpired) -> str:
    """How a worker's process ended, as the end of a sentence about what it ran."""
    code = death.exitcode
    if code == DIED_WITHOUT_ERROR:
        return "ended its process with os._exit(0)"
    if code == LOST_DEVICE:
        return "made the GPU unusable for its process (a memory fault; see its stderr)"
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed its process with {name}"
    return f"ended its process with exit code {code}"


def _fatal(message: str) -> Verdict:
    return Verdict((PropertyResult("crash", "failed", violation=Violation(message)),))
