"""One random number draws the same cases in any process, environment and checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvfuzz

PROGRAM = """
import hashlib, sys, msgspec
from kvfuzz.engine.guide import Guide
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.lower import lower
from kvfuzz.strategies import drawn_scene, space
digest = hashlib.sha256()
for op in ("gather_cache", "reshape_and_cache"):
    guide = Guide(space(op, Domain().narrowed(op)), int(sys.argv[1]))
    for _ in range(150):
        case = lower(drawn_scene(guide.draw(), guide.space))
        guide.learn(facts(case))
        digest.update(msgspec.json.encode(case))
print(digest.hexdigest())
"""


def drawn(seed, *, package=None, **environment):
    """The digest of 300 cases, drawn in a process of its own."""
    without = ("CI", "GITHUB_ACTIONS")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    first = str(package or Path(kvfuzz.__file__).parents[1])
    path = os.pathsep.join(filter(None, (first, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed)],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def usual():
    """What the number 11 draws."""
    return drawn(11)


def test_ci_variables_and_the_order_of_hashes_change_nothing(usual):
    assert drawn(11, CI="true", GITHUB_ACTIONS="true", PYTHONHASHSEED="7") == usual


def test_another_number_draws_other_cases(usual):
    assert drawn(12) != usual


def test_a_checkout_with_other_python_code_draws_the_same(usual, tmp_path):
    """Hypothesis' own generator mixes in the constants of local modules."""
    root = Path(kvfuzz.__file__).parents[1]
    for folder in ("kvfuzz", "strategies", "oracles", "kernels", "reports"):
        shutil.copytree(root / folder, tmp_path / folder, symlinks=True)
    other = tmp_path / "kvfuzz" / "errors.py"
    other.write_text(other.read_text() + '\nUNRELATED = (544, 2129, 3.75, "x" * 77)\n')
    (tmp_path / "kvfuzz" / "unrelated.py").write_text("SIZES = (13, 1711, 99999)\n")
    assert drawn(11, package=tmp_path) == usual
