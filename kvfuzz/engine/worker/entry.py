"""What the parent asks of the worker: describe the target, check a case, try a lane out.

The parent imports this module to name its functions, so torch, triton and the target are imported
inside them, in the worker alone. Messages are msgspec's binary form of the model's types.
"""

import gc
import math
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Case
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.proof import TensorsFile
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.target import TargetInfo, TargetSpec
from kvfuzz.model.vocabulary import Levels

if TYPE_CHECKING:
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.engine.worker.plan_judge import PlanJudge
    from kvfuzz.engine.worker.script_judge import ScriptJudge
    from kvfuzz.model.verdict import Verdict


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is for, from its first task to its end."""

    target: TargetSpec
    lane: str
    arch: str
    where: dict[str, Levels] = {}
    """The levels that a campaign keeps to; a property runs no case outside them either."""


class Environment(msgspec.Struct, frozen=True):
    """Where and with which versions verdicts are obtained; `arch` is what the lane runs."""

    triton: str
    torch: str
    lane: str
    arch: str


class Description(msgspec.Struct, frozen=True):
    """A loaded target and the environment that it runs in."""

    info: TargetInfo
    environment: Environment


DIED_WITHOUT_ERROR = 113
"""Exit code of a worker whose target called os._exit(0): the pool would take 0 for a normal end."""
LOST_DEVICE = 114
"""Exit code of a worker whose GPU answers no more, as after an access to no memory at all."""


def settle(environment: dict[str, str]) -> None:
    """Make a fresh process a worker that its target cannot easily get out of.

    It has the parent's `environment` as it is now. Prints go to stderr, off the parent's output; an
    exit without an error becomes one.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    leave = os._exit
    os._exit = lambda status: leave(status or DIED_WITHOUT_ERROR)


@lru_cache(maxsize=1)
def _judge(config: bytes) -> "Judge | PlanJudge | ScriptJudge":
    import torch

    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.engine.worker.lanes import open_lane
    from kvfuzz.engine.worker.plan_judge import PlanJudge
    from kvfuzz.engine.worker.script_judge import ScriptJudge
    from kvfuzz.kernels.plan_targets import PlanAdapter
    from kvfuzz.kernels.resolve import resolve, resolve_kernel
    from kvfuzz.kernels.stateful import StatefulAdapter

    # Cases are small: threads cost more than they bring, and shards share the cores.
    torch.set_num_threads(1)
    wanted = msgspec.msgpack.decode(config, type=WorkerConfig)
    lane = open_lane(wanted.lane, wanted.arch)
    target = resolve(wanted.target, arch=lane.arch)
    judge: Judge | PlanJudge | ScriptJudge
    if isinstance(target, PlanAdapter):
        judge = PlanJudge(target, lane)
    elif isinstance(target, StatefulAdapter):
        judge = ScriptJudge(target, lane)
    else:
        partner = None
        if target.info.partner:
            spec = msgspec.structs.replace(wanted.target, name=target.info.partner, op="")
            partner = resolve_kernel(spec, arch=lane.arch)
        judge = Judge(target, partner, lane, wanted.where)
    # What was imported stays: a collection that walks it costs as much as a dozen cases. Compiling
    # makes many objects and few cycles, so that the young ones need no look every 700.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return judge


def describe(config: bytes) -> bytes:
    """Load the target; msgpack of Description."""
    import torch
    import triton

    judge = _judge(config)
    environment = Environment(
        triton=triton.__version__,
        torch=str(torch.__version__),
        lane=judge.lane.name,
        arch=judge.lane.arch,
    )
    return msgspec.msgpack.encode(Description(judge.target.info, environment))


def check_up(lane: str, arch: str) -> bytes:
    """Try a lane out; msgpack of Checkup."""
    from kvfuzz.engine.worker.checkup import examine

    return msgspec.msgpack.encode(examine(lane, arch))


def prove(config: bytes, case: bytes, every_count: bool) -> bytes:
    """Prove what the target makes of a plan case; msgpack of Proof.

    Raises UsageError for a target that makes no views.
    """
    from kvfuzz.engine.worker import proving
    from kvfuzz.engine.worker.plan_judge import PlanJudge

    judge = _judge(config)
    if not isinstance(judge, PlanJudge) or judge.target.info.op != "cache_views":
        op = judge.target.info.op
        raise UsageError(f"{judge.target.info.name} is a {op}: only views can be proved right")
    decoded = msgspec.msgpack.decode(case, type=PlanCase)
    return msgspec.msgpack.encode(proving.prove(judge.target, decoded, every_count=every_count))


def prove_tensors(file: bytes) -> bytes:
    """Prove views that an engine printed; msgpack of Proof."""
    from kvfuzz.engine.worker import proving

    return msgspec.msgpack.encode(
        proving.prove_tensors(msgspec.msgpack.decode(file, type=TensorsFile))
    )


def check(
    config: bytes,
    case: bytes,
    in_turn: bool,
    explain: bool,
    patience_s: float = math.inf,
) -> bytes:
    """Execute and judge one case (`Judge.verdict`); msgpack of Verdict."""
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.engine.worker.plan_judge import PlanJudge

    judge = _judge(config)
    verdict: Verdict
    if isinstance(judge, Judge):
        verdict = judge.verdict(
            msgspec.msgpack.decode(case, type=Case | OpCase),
            in_turn=in_turn,
            explain=explain,
            patience_s=patience_s,
        )
    elif isinstance(judge, PlanJudge):
        verdict = judge.verdict(msgspec.msgpack.decode(case, type=PlanCase))
    else:
        script = msgspec.msgpack.decode(case, type=ScriptCase)
        verdict = judge.verdict(script, patience_s=patience_s)
    judge.lane.rest()
    return msgspec.msgpack.encode(verdict)
