import sys

import pytest

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.stubs import Stub, StubUsedError


@pytest.fixture
def tree(tmp_path):
    """A function from file contents to a SourceTree of the package `engine`."""

    def make(files, known=None):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return SourceTree("engine", tmp_path, known=known or {}, also=("accelerator",))

    return make


def test_what_is_named_comes_from_the_tree_and_the_rest_is_stubbed(tree):
    module = tree(
        {"engine/ops/kernel.py": "from engine.config import Config\ndef two(): return 2\n"}
    ).load("engine/ops/kernel.py")
    assert module.two() == 2
    assert isinstance(module.Config, Stub)


def test_stubs_serve_as_bases_annotations_and_subscripts(tree):
    text = """
from dataclasses import dataclass
from typing import ClassVar
import accelerator
import engine.envs as envs
from engine.backend import Backend, Builder, Support
from . import neighbour
from ..config import Config

@dataclass
class Metadata:
    config: Config
    other: Config | None = None

class Mine(Backend):
    support: ClassVar[list[Support]] = [Support.ALWAYS]

class MyBuilder(Builder[Metadata]):
    def build(self, config: list[Config]) -> Config | int: ...
"""
    module = tree({"engine/ops/kernel.py": text}).load("engine/ops/kernel.py")
    assert module.Metadata(config=1).other is None
    assert module.MyBuilder().build([]) is None
    assert repr(module.Mine.support) == "[<stub of engine.backend.Support.ALWAYS>]"
    assert repr(module.envs.FLAG) == "<stub of engine.envs.FLAG>"
    assert repr(module.Config) == "<stub of engine.config.Config>"
    assert repr(module.neighbour) == "<stub of engine.ops.neighbour>"


@pytest.mark.parametrize(
    ("use", "how"),
    [
        ("Config(1)", "called"),
        ("Config.default()", "called"),
        ("1 if Config else 2", "tested for truth"),
        ("Config == 3", "compared"),
        ("Config < 3", "compared"),
        ("Config + 1", "used as a number"),
        ("2 * Config", "used as a number"),
        ("int(Config)", "used as a number"),
        ("range(Config)", "used as a number"),
        ("list(Config)", "iterated over"),
        ("len(Config)", "measured"),
        ("1 in Config", "searched"),
        ("isinstance(1, Config)", "used in isinstance"),
    ],
)
def test_a_stub_fails_loudly_when_it_is_used(tree, use, how):
    text = f"from engine.config import Config\ndef call(): return {use}\n"
    module = tree({"engine/kernel.py": text}).load("engine/kernel.py")
    with pytest.raises(
        StubUsedError, match=rf"engine\.config\.Config.* was {how}, but only a stub"
    ):
        module.call()


def test_an_import_inside_a_function_finds_the_stub_too(tree):
    text = "def call():\n    from engine.late import function\n    return function()\n"
    module = tree({"engine/kernel.py": text}).load("engine/kernel.py")
    with pytest.raises(StubUsedError, match=r"engine\.late\.function was called"):
        module.call()


def test_known_values_are_real(tree):
    known = {"engine.config": {"SIZE": 16}}
    text = "from engine.config import SIZE\nimport engine.config\nagain = engine.config.SIZE\n"
    module = tree({"engine/kernel.py": text}, known).load("engine/kernel.py")
    assert (module.SIZE, module.again) == (16, 16)


def test_an_installed_package_of_the_same_name_is_left_alone(tree):
    before = {name: module for name, module in sys.modules.items() if "json" in name}
    loader = SourceTree("json", tree({"json/kernel.py": "import json.tool\n"}).root, known={})
    module = loader.load("json/kernel.py")
    assert isinstance(module.json.tool.anything, Stub)
    assert before == {name: module for name, module in sys.modules.items() if name in before}
    assert "json.kernel" not in sys.modules


def test_a_file_is_executed_once_and_later_imports_find_it(tree):
    files = {
        "engine/one.py": "import itertools\nvalue = next(itertools.count())\n",
        "engine/two.py": "from engine.one import value\nfrom engine import one\n",
    }
    loader = tree(files)
    one = loader.load("engine/one.py")
    assert loader.load("engine/one.py") is one
    two = loader.load("engine/two.py")
    assert two.value == 0
    assert two.one is one


def test_the_first_candidate_that_exists_is_loaded(tree):
    loader = tree({"engine/old/kernel.py": "era = 'old'\n"})
    assert loader.load("engine/new/kernel.py", "engine/old/kernel.py").era == "old"


def test_a_missing_file_is_named_with_what_to_do(tree):
    loader = tree({"engine/other.py": ""})
    with pytest.raises(
        NotCheckedError,
        match=r"--source engine=.*: no engine/new\.py or engine/old\.py there; "
        r"pass the folder of a release or checkout that contains engine/",
    ):
        loader.load("engine/new.py", "engine/old.py")


def test_a_file_that_fails_to_load_says_why_and_leaves_no_module(tree):
    loader = tree({"engine/kernel.py": "raise RuntimeError('no device')\n"})
    before = set(sys.modules)
    with pytest.raises(
        NotCheckedError, match=r"engine\.kernel does not load: RuntimeError: no device"
    ):
        loader.load("engine/kernel.py")
    assert set(sys.modules) == before
