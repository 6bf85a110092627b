"""The lane against Triton's interpreter, byte for byte, where no float narrows."""

import importlib.util
import inspect
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from triton.runtime import interpreter

import kvfuzz
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.lower import lower
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.choices import Drawn

HERE = Path(__file__).parent
OPS = ("gather_cache", "reshape_and_cache")
MOST_PROGRAMS = 64
"""The interpreter takes milliseconds a program; larger scenes add nothing that a program sees."""
HAS_FNUZ = "fp8e5b16" in inspect.getsource(interpreter._patch_lang_core)
"""The interpreter of Triton 3.6 refuses pointers to FNUZ fp8 (triton-lang/triton#9643)."""


def load(name):
    spec = importlib.util.spec_from_file_location(f"kvfuzz_test_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_a_child(script, *arguments):
    command = [sys.executable, str(HERE / f"{script}.py"), *map(str, arguments)]
    package = str(Path(kvfuzz.__file__).parents[1])  # this one, whichever is installed
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def drawn(op, count, random_seed):
    """Cases of `op` that copy, or that read fp8 as fp32: neither rounds."""
    allowed = {"reach": ("near",)}  # the interpreter has no uncommitted memory
    if op == "reshape_and_cache":
        allowed["cache_dtype"] = ("fp32", "bf16", "fp16")
    domain = Domain(allowed=allowed, source="formats that are copied or widened")
    within = space(op, domain)
    scenes = (drawn_scene(Drawn((random_seed << 32) + n), within) for n in itertools.count())
    return list(itertools.islice((lower(each) for each in scenes if _fits(op, each)), count))


def _fits(op, scene):
    cache, model = (DTYPES[each] for each in (scene.attention.cache_dtype, scene.model_dtype))
    if cache.is_quantised and (op != "gather_cache" or model.name != "fp32"):
        return False
    if cache.name.endswith("fnuz") and not HAS_FNUZ:
        return False
    return scene.batch.num_rows * scene.attention.geometry.num_kv_heads <= MOST_PROGRAMS


def check(lane, tmp_path, op, count, random_seed):
    differential = load("differential")
    cases = drawn(op, count, random_seed)
    assert len(cases) == count
    (tmp_path / "cases").write_bytes(msgspec.msgpack.encode(cases))
    in_a_child("differential", tmp_path / "cases", tmp_path / "digests")
    theirs = json.loads((tmp_path / "digests").read_text())
    adapters = differential.builtin_adapters()

    def allocate(name, data):
        buffer = lane.allocate(name, data.numel())
        buffer.copy_(data)
        return buffer

    for case, expected in zip(cases, theirs, strict=True):
        after = differential.run_case(case, adapters, allocate)
        lane.release_all()
        found = differential.digests(after)
        differing = [name for name in found if found[name] != expected[name]]
        assert not differing, f"{differing} differ from the interpreter's in {case.scene}"


def first_difference(operands, ours, theirs):
    at = int(np.flatnonzero(ours.view(f"u{ours.itemsize}") != theirs.view(f"u{ours.itemsize}"))[0])
    a, b = operands[:, at]
    return f"{a!r} and {b!r} give {ours[at]!r} here, {theirs[at]!r} there"


@pytest.mark.parametrize("op", OPS)
def test_twenty_five_drawn_cases_leave_the_bytes_that_the_interpreter_leaves(lane, tmp_path, op):
    check(lane, tmp_path, op, 25, random_seed=3)


@pytest.mark.nightly
@pytest.mark.parametrize("op", OPS)
def test_a_thousand_drawn_cases_leave_the_bytes_that_the_interpreter_leaves(lane, tmp_path, op):
    check(lane, tmp_path, op, 1000, random_seed=4)


def test_arithmetic_gives_the_bits_that_the_interpreter_gives(lane, tmp_path):
    kernels = load("arithmetic_kernels")
    operands = kernels.inputs(seed=5)
    np.savez(tmp_path / "inputs.npz", **operands)
    in_a_child("arithmetic_kernels", tmp_path / "inputs.npz", tmp_path / "outputs.npz")
    ours = kernels.results(operands)
    with np.load(tmp_path / "outputs.npz") as theirs:
        assert sorted(theirs) == sorted(ours)
        differing = {
            name: first_difference(operands[name], ours[name], theirs[name])
            for name in ours
            if ours[name].tobytes() != theirs[name].tobytes()
        }
    assert not differing
