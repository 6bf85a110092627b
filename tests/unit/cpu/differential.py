"""Cases run by the real kernels without the lane: by Triton's interpreter, in a child process.

The interpreter serves as a second opinion where no float narrows; it rounds fp8 and bf16 wrongly.
As a script it reads a list of cases (msgpack) and writes one digest for each buffer of each case:
`differential.py CASES DIGESTS`. The tests use its functions for the lane's side.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Allocate = Callable[[str, Any], Any]


def without_nonfinite(data: Any, element: str) -> Any:
    """uint8 `data` with another code for each that the interpreter reads as a number and is none.

    It knows no NaN and no infinity in fp8: 0x7F of e4m3fn is 480 to it.
    """
    import torch

    from kvfuzz.model.dtypes import DTYPES

    values = [DTYPES[element].decode(code) for code in range(256)]
    codes = [code if math.isfinite(value) else 0x38 for code, value in enumerate(values)]
    return torch.tensor(codes, dtype=torch.uint8)[data.long()]


def run_case(case: Any, adapters: dict[str, Any], allocate: Allocate) -> dict[str, bytes]:
    """The bytes of every buffer after the case's own steps; `allocate` makes a buffer of data."""
    import torch

    from kvfuzz.engine.worker.execute import view
    from kvfuzz.engine.worker.fill import filled
    from kvfuzz.model.dtypes import DTYPES
    from kvfuzz.model.held import whole

    cache = case.tensor(case.steps[0].tensors["key_cache"])
    buffers = {}
    for each in case.buffers:
        data = filled(each.fill, each.name, whole(each.nbytes), torch.device("cpu"))
        if each.name == cache.buffer and DTYPES[cache.dtype].is_quantised:
            data = without_nonfinite(data, cache.dtype)
        buffers[each.name] = allocate(each.name, data)
    for step in case.steps:
        views = {parameter: case.tensor(name) for parameter, name in step.tensors.items()}
        tensors = {parameter: view(buffers[each.buffer], each) for parameter, each in views.items()}
        adapters[step.op].call(tensors, step.scalars)
    return {name: buffer.numpy().tobytes() for name, buffer in buffers.items()}


def builtin_adapters() -> dict[str, Any]:
    """Our kernels by op."""
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    return {
        op: resolve(TargetSpec(f"builtin:{op}")) for op in ("gather_cache", "reshape_and_cache")
    }


def digests(buffers: dict[str, bytes]) -> dict[str, str]:
    """A digest for each buffer."""
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in buffers.items()}


def main(cases_file: str, digests_file: str) -> None:
    """Run the cases in the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from kvfuzz.model.case import Case

    cases = msgspec.msgpack.decode(Path(cases_file).read_bytes(), type=list[Case])
    adapters = builtin_adapters()
    found = [digests(run_case(case, adapters, lambda _name, data: data)) for case in cases]
    Path(digests_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
