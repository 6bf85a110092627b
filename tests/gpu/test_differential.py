"""The cpu lane against a GPU: copies byte for byte, conversions code for code, NaN as a class.

All codes of fp16, bf16 and fp8, and 2**20 of fp32, are copied, cast, quantised as our
reshape_and_cache does and dequantised as our gather_cache does. Inputs beyond the largest finite
value of the target are a test of their own: what overflow gives is the hardware's choice. `FAULTS`
has what a GPU is known to get wrong, code by code; what stands there must be so.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvfuzz
from kvfuzz.engine.worker.lanes import GpuLane
from kvfuzz.model.dtypes import DTYPES

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("conversions.py")
SIDES = tuple(os.environ.get("KVFUZZ_DIFFERENTIAL_SIDES", "gpu cpu").split())
"""Two processes to compare. `cpu cpu` tries the test itself where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What Triton's code for a GPU gets wrong: exactly these results for exactly these inputs."""

    arch: str
    """Architectures it was seen on, by how their names begin."""
    experiment: str
    codes: dict[int, int]
    """Input code to the code that comes out."""
    source: str

    def __str__(self) -> str:
        return f"{self.experiment} on {self.arch}"


FAULTS = (
    Fault(  # infinities and NaN become the numbers that their exponent would make
        arch="sm90",
        experiment="cast-e5m2-bf16",
        codes={
            0x7C: 0x4780,
            0x7D: 0x47A0,
            0x7E: 0x47C0,
            0x7F: 0x47E0,
            0xFC: 0xC780,
            0xFD: 0xC7A0,
            0xFE: 0xC7C0,
            0xFF: 0xC7E0,
        },
        source="Triton 3.6.0 on an H200; triton-lang/triton#11784",
    ),
)


def _conversions():
    spec = importlib.util.spec_from_file_location("kvfuzz_test_conversions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


conversions = _conversions()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A folder of results for each side."""
    import torch

    if "gpu" in SIDES and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    package = str(Path(kvfuzz.__file__).parents[1])  # this one, whichever is installed
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = []
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        done = subprocess.run(
            [sys.executable, str(SCRIPT), side, str(folder)],
            env={**environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"the {side} side ended early:\n{done.stderr[-4000:]}"
        folders.append(folder)
    return folders


def _results(outcomes, name):
    results = []
    for side, folder in zip(SIDES, outcomes, strict=True):
        error = json.loads((folder / "errors.json").read_text()).get(name)
        assert error is None, f"{name} does not run on the {side} side: {error}"
        results.append(np.load(folder / f"{name}.npy"))
    return results


def _values(codes, dtype):
    """What codes mean, in fp64."""
    if dtype == "fp32":
        with np.errstate(invalid="ignore"):  # signalling NaN
            return codes.view(np.float32).astype(np.float64)
    table = np.array([DTYPES[dtype].decode(code) for code in range(1 << 8 * codes.itemsize)])
    return table[codes]


def _say(experiment, where, inputs, first, second):
    """The differences in `where`: how many, and the first three of them in bits."""
    at = np.flatnonzero(where)
    width = 2 * inputs.itemsize
    lines = [f"{experiment.name}: {len(at)} of {len(inputs)} inputs differ"]
    for index in at[:3]:
        value = _values(inputs[index : index + 1], experiment.source)[0]
        outs = [
            f"{side} 0x{codes[index]:0{2 * codes.itemsize}X} "
            f"({_values(codes[index : index + 1], experiment.target)[0]!r})"
            for side, codes in zip(SIDES, (first, second), strict=True)
        ]
        lines.append(f"  input 0x{inputs[index]:0{width}X} ({value!r}): {', '.join(outs)}")
    return "\n".join(lines)


def _beyond(experiment, inputs):
    """Which inputs lie beyond what the target can hold; infinity does, NaN does not."""
    largest = DTYPES[experiment.target].max_finite
    scale = np.float64(np.float32(experiment.scale))
    values = _values(inputs, experiment.source)
    if experiment.how == "quantise":
        values = values / scale
    elif experiment.how == "dequantise":
        values = values * scale
    return np.abs(values) > largest


def _arch():
    """The GPU's architecture as kvfuzz names it: sm90, gfx942; nothing where none is compared."""
    return GpuLane().arch if "gpu" in SIDES else ""


def _known(experiment, side, inputs, codes):
    """Where a side gives what a fault of this GPU says it gives."""
    known = np.zeros(len(inputs), bool)
    for fault in FAULTS:
        if side == "gpu" and fault.experiment == experiment.name and _arch().startswith(fault.arch):
            for given, wrong in fault.codes.items():
                known |= (inputs == given) & (codes == wrong)
    return known


COPIES = [each for each in conversions.EXPERIMENTS if each.how == "copy"]
OTHERS = [each for each in conversions.EXPERIMENTS if each.how != "copy"]


@pytest.mark.parametrize("experiment", COPIES, ids=lambda each: each.name)
def test_a_copy_keeps_every_bit(outcomes, experiment):
    inputs = conversions.patterns(experiment.source)
    first, second = _results(outcomes, experiment.name)
    assert not (first != inputs).any(), _say(experiment, first != inputs, inputs, first, inputs)
    assert not (first != second).any(), _say(experiment, first != second, inputs, first, second)


@pytest.mark.parametrize("region", ["in range", "beyond"])
@pytest.mark.parametrize("experiment", OTHERS, ids=lambda each: each.name)
def test_a_conversion_gives_the_same_code_on_both_lanes(outcomes, experiment, region):
    inputs = conversions.patterns(experiment.source)
    first, second = _results(outcomes, experiment.name)
    nan = [np.isnan(_values(codes, experiment.target)) for codes in (first, second)]
    differs = (first != second) & ~(nan[0] & nan[1])
    for side, codes in zip(SIDES, (first, second), strict=True):
        differs &= ~_known(experiment, side, inputs, codes)
    beyond = _beyond(experiment, inputs)
    where = differs & (beyond if region == "beyond" else ~beyond)
    assert not where.any(), _say(experiment, where, inputs, first, second)


@pytest.mark.parametrize("experiment", OTHERS, ids=lambda each: each.name)
def test_nan_in_is_nan_out_on_both_lanes(outcomes, experiment):
    inputs = conversions.patterns(experiment.source)
    nan = np.isnan(_values(inputs, experiment.source))
    for side, codes in zip(SIDES, _results(outcomes, experiment.name), strict=True):
        lost = nan & ~np.isnan(_values(codes, experiment.target))
        lost &= ~_known(experiment, side, inputs, codes)
        assert not lost.any(), f"{side}: {_say(experiment, lost, inputs, codes, codes)}"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_known_fault_is_there_still(outcomes, fault):
    if not _arch() or not _arch().startswith(fault.arch):
        pytest.skip(f"no {fault.arch} here")
    (experiment,) = (each for each in OTHERS if each.name == fault.experiment)
    inputs = conversions.patterns(experiment.source)
    results = _results(outcomes, experiment.name)
    known = _known(experiment, "gpu", inputs, results[SIDES.index("gpu")])
    gone = np.isin(inputs, list(fault.codes)) & ~known
    assert not gone.any(), (
        "the GPU no longer gives what FAULTS says: remove the entry if these codes are right now, "
        f"else correct it ({fault.source})\n{_say(experiment, gone, inputs, *results)}"
    )
