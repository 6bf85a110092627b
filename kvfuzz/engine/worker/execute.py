"""Execute a case on a lane: make its buffers and views, run its steps, note what happened."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.engine.worker.lanes import GUARD_BYTES, GUARD_VALUE, Lane, Manner, Seen
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.model.axes import Domain
from kvfuzz.model.case import Program, Step, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.held import Held, held
from kvfuzz.model.target import Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.liveness import near_elements
from kvfuzz.oracles.observation import Run

PLAIN = Manner()
EVERYTHING = Domain()


def view(buffer: Tensor, of: TensorView) -> Tensor:
    """The tensor that `of` describes over the uint8 `buffer`."""
    element = itemsize(of.dtype)
    rest = buffer.numel() % element
    whole = (buffer[:-rest] if rest else buffer).view(TORCH_DTYPES[of.dtype])
    strides = [stride // element for stride in of.strides]
    return whole.as_strided(of.shape, strides, whole.storage_offset() + of.offset // element)


def execute(
    case: Program,
    adapters: Mapping[str, Adapter],
    lane: Lane,
    quantise: Quantise,
    *,
    filled_before: Mapping[str, Tensor] | None = None,
    manner: Manner = PLAIN,
    where: Domain = EVERYTHING,
) -> tuple[Run, Seen]:
    """Run every step of `case`; `adapters` maps a step's `by` to who executes it.

    `filled_before` are the bytes that buffers hold first instead of their fills: those of a
    variant, or what an earlier run with the same buffers has computed already. They are read only.
    """
    known = filled_before or {}
    before = {
        buffer.name: known[buffer.name]
        if buffer.name in known
        else before_the_first_launch(case, buffer, lane.device)
        for buffer in case.buffers
    }
    try:
        buffers = {
            name: lane.allocate(name, data, held(case, name)) for name, data in before.items()
        }
        calls = [(adapters[step.by], _tensors(case, step, buffers), step) for step in case.steps]

        def run_steps() -> None:
            for adapter, tensors, step in calls:
                adapter.call(tensors, step.scalars)

        seen = lane.observe(run_steps, manner)
        written = buffers if seen.written is None else seen.written
        after = {
            name: image_of(buffer, held(case, name))
            if name in written
            else image_after(buffer, held(case, name), before[name])
            for name, buffer in buffers.items()
        }
        _forget(case, before, after, seen.written)
        sizes = {buffer.name: buffer.nbytes for buffer in case.buffers}
        guards = {name: broken_guard(lane.guard(name), nbytes) for name, nbytes in sizes.items()}
        broken = {name: at for name, at in guards.items() if at is not None}
        outside = {name: lane.written_outside(name) for name in sizes if manner.far}
    finally:
        lane.release()
    error, refused, unsupported = _classified(seen, [adapter for adapter, _, _ in calls])
    run = Run(
        case=case,
        target=adapters["target"].info,
        quantise=quantise,
        where=where,
        before=before,
        after=after,
        written=seen.written,
        read=seen.read,
        torch_ops=seen.torch_ops,
        strays=seen.strays,
        launches=seen.launches,
        overflows=seen.overflows,
        races=seen.races,
        crossed=seen.crossed,
        synchronising=seen.synchronising,
        outside={name: at for name, at in outside.items() if at is not None},
        read_outside=seen.read_outside,
        guards_broken=broken,
        error=error,
        refused=refused,
        unsupported=unsupported,
    )
    return run, seen


def _forget(
    case: Program,
    before: Mapping[str, Tensor],
    after: dict[str, Tensor],
    written: Mapping[str, Tensor] | None,
) -> None:
    """Put back what unused elements held, and say that they were not written."""
    for field in case.unused:
        name, elements = field.buffer, near_elements(case, field, before[field.buffer].device)
        at = image.element_bytes(elements, field.dtype)
        if after[name] is not before[name]:
            after[name][at] = before[name][at]
        if written is not None and name in written:
            written[name][at] = False


def image_of(buffer: Tensor, kept: Held) -> Tensor:
    """A copy of the held bytes of `buffer`; uint8 `[kept.size]`."""
    if kept.is_whole:
        return buffer.clone()
    return torch.cat([buffer[start:stop] for start, stop in kept.spans])


def image_after(buffer: Tensor, kept: Held, before: Tensor) -> Tensor:
    """The held bytes of a buffer that no kernel wrote, after a run: `before` itself where nobody
    else did either. Then no property needs to compare two copies of it."""
    for first, (start, stop) in zip(kept.firsts, kept.spans, strict=True):
        if not image.same(buffer[start:stop], before[first : first + stop - start]):
            return image_of(buffer, kept)
    return before


def _tensors(case: Program, step: Step, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    views = {parameter: case.tensor(name) for parameter, name in step.tensors.items()}
    return {parameter: view(buffers[each.buffer], each) for parameter, each in views.items()}


def broken_guard(guard: Tensor, nbytes: int) -> int | None:
    """The first changed byte of both guard zones, relative to the start of their buffer."""
    if not guard.numel():
        return None
    changed = torch.nonzero(guard != GUARD_VALUE)
    if not len(changed):
        return None
    at = int(changed[0]) - GUARD_BYTES
    return at if at < 0 else at + nbytes


def _classified(seen: Seen, adapters: list[Adapter]) -> tuple[str, str, str]:
    """The exception of a run as (error, refused, unsupported); at most one is not empty."""
    if seen.error is None:
        return "", "", ""
    text = one_line(seen.error)
    if seen.unsupported:
        return "", "", text
    declared = tuple(kind for adapter in adapters for kind in adapter.refusals)
    # A lane that records no launches takes the target's word that none came before.
    if not seen.launches and isinstance(seen.error, declared):
        return "", text, ""
    return text, "", ""


def one_line(error: BaseException) -> str:
    """`Type: message` of an exception.

    A message of several lines gives its first and its last: a compiler begins with where and ends
    with why. What it was raised from is named, too.
    """
    said = _message(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ends = [lines[0], lines[-1]] if len(lines) > 1 else lines
    text = ": ".join([type(error).__name__, *(end[:300] for end in ends)])
    if error.__cause__ is not None and _message(error.__cause__) not in said:
        text += f" (from {one_line(error.__cause__)})"
    return text


def _message(error: BaseException) -> str:
    """The message of an exception as text that UTF-8 can hold, whatever its class does."""
    try:
        said = str(error)
    except Exception as another:
        return f"no message: its __str__ raises {type(another).__name__}"
    return said.encode("utf-8", "backslashreplace").decode("utf-8")
