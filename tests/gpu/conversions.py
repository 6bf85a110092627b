"""Copies and conversions of every input pattern, on one lane: `conversions.py SIDE FOLDER`.

SIDE is gpu or cpu; one lane runs in a process, so each side is a process of its own. Results go to
FOLDER/NAME.npy as raw codes, errors to FOLDER/errors.json by NAME. `EXPERIMENTS` says what NAME
was given, so that a test can name the input of a difference.
"""

# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from kvfuzz.kernels.builtin.gather_cache import gather_cache
from kvfuzz.kernels.builtin.reshape_and_cache import reshape_and_cache

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WIDE, FP8 = ("fp32", "fp16", "bf16"), ("e4m3fn", "e5m2")
SCALES = (1.0, 0.7, 2.0**-4)
ROW = 64  # elements of one head of one token
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Experiment:
    """All patterns of `source` become `target`: `how` is copy, cast, quantise or dequantise."""

    how: str
    source: str
    target: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Names the result's file."""
        scaled = f"-by-{self.scale}" if self.how in ("quantise", "dequantise") else ""
        return f"{self.how}-{self.source}-{self.target}{scaled}"


EXPERIMENTS = (
    *(Experiment("copy", each, each) for each in TORCH),
    *(
        Experiment("cast", source, target)
        for source in TORCH
        for target in TORCH
        if source != target and not (source in FP8 and target in FP8)
    ),
    *(Experiment("quantise", m, c, s) for m in WIDE for c in FP8 for s in SCALES),
    *(Experiment("dequantise", c, m, s) for c in FP8 for m in WIDE for s in SCALES),
)


@triton.jit
def cast(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


def patterns(source: str) -> np.ndarray:
    """Input codes of a format: all of them, and of fp32 2**20.

    Those have every sign and exponent, and among random mantissas the ties, and what lies next to
    them, of formats that keep 2, 3, 7 or 10 bits.
    """
    size = TORCH[source].itemsize
    if size < 4:
        return np.arange(1 << 8 * size).astype(CODES[size])
    rng = np.random.default_rng(11)
    mantissas = rng.integers(0, 1 << 23, (512, 2048), dtype=np.uint32)
    for place, kept in enumerate((2, 3, 7, 10)):
        drop = np.uint32(23 - kept)
        ties = (mantissas[:, :384] >> drop << drop) | np.uint32(1 << (22 - kept))
        ties += np.repeat(np.array([-1, 0, 1], np.int32), 128).view(np.uint32)
        mantissas[:, 384 * place : 384 * (place + 1)] = ties
    mantissas[:, -2:] = 0, 0x7FFFFF
    exponents = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    return (exponents | (mantissas & np.uint32(0x7FFFFF))).ravel()


def tensor_of(codes: np.ndarray, name: str, device: torch.device) -> torch.Tensor:
    """A tensor with these raw codes."""
    signed = codes.view(f"i{codes.itemsize}") if codes.itemsize > 1 else codes
    return torch.from_numpy(signed.copy()).to(device).view(TORCH[name])


def codes_of(tensor: torch.Tensor) -> np.ndarray:
    """The raw codes of a tensor, in one dimension."""
    size = tensor.element_size()
    return tensor.contiguous().view(SIGNED[size]).cpu().numpy().view(CODES[size]).ravel()


def padded(codes: np.ndarray, to: int) -> np.ndarray:
    """With zeros behind, up to a multiple of `to`."""
    return np.append(codes, np.zeros(-len(codes) % to, codes.dtype))


def run(experiment: Experiment, device: torch.device) -> np.ndarray:
    """The codes that come out, one for each pattern."""
    codes = patterns(experiment.source)
    if experiment.how in ("copy", "cast"):
        source = tensor_of(padded(codes, BLOCK), experiment.source, device)
        target = torch.zeros(len(source), dtype=TORCH[experiment.target], device=device)
        cast[(len(source) // BLOCK,)](source, target, BLOCK=BLOCK)
        return codes_of(target)[: len(codes)]
    rows = tensor_of(padded(codes, ROW), experiment.source, device).view(-1, 1, ROW)
    scale = torch.tensor([experiment.scale], dtype=torch.float32, device=device)
    tokens = len(rows)
    results = torch.zeros(rows.shape, dtype=TORCH[experiment.target], device=device)
    if experiment.how == "quantise":
        slots = torch.arange(tokens, dtype=torch.int64, device=device)
        caches = results.view(tokens, 1, 1, ROW), torch.zeros_like(results).view(tokens, 1, 1, ROW)
        reshape_and_cache(rows, rows, *caches, slots, scale, scale, "NHD")
    else:
        cache = rows.view(tokens, 1, 1, ROW)
        table = torch.arange(tokens, dtype=torch.int32, device=device).view(1, tokens)
        zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        values = torch.zeros_like(results)
        gather_cache(
            cache, cache, results, values, table, zeros[:1], starts, zeros, scale, scale, "NHD"
        )
    return codes_of(results)[: len(codes)]


def main(side: str, folder: str) -> None:
    """Run every experiment on one side; one that fails is noted and the others go on."""
    if side == "cpu":
        from kvfuzz.cpu import CpuLane

        # Of AMD's formats only those are compared that a CUDA device has, so any arch will do.
        CpuLane(arch="gfx950").activate()
    device = torch.device("cuda" if side == "gpu" else "cpu")
    errors = {}
    for experiment in EXPERIMENTS:
        try:
            np.save(Path(folder) / f"{experiment.name}.npy", run(experiment, device))
        except Exception as error:  # what one side cannot compile is for the test to say
            errors[experiment.name] = f"{type(error).__name__}: {error}"
    (Path(folder) / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
