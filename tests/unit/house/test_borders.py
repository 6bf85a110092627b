"""The process border is the import border of kvfuzz's own modules.

Read off the syntax tree for every module, and off `sys.modules` in both processes.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvfuzz

PACKAGE = Path(kvfuzz.__file__).parent
PARENT_ONLY = {"hypothesis", "click", "rich", "pebble", "pytest"}
WORKER_ONLY = {"torch", "triton", "conch"}

# layer -> which layers it may import; `model` is what both processes share.
MAY_IMPORT = {
    "model": {"model"},
    "strategies": {"model", "strategies"},
    "reports": {"model", "reports"},
    "oracles": {"model", "oracles"},
    "kernels": {"model", "kernels"},
    "cpu": {"cpu"},
    "engine.worker": {"model", "oracles", "kernels", "cpu", "engine.worker"},
    "engine": {"model", "strategies", "engine", "engine.worker.entry"},
    "front": {"model", "reports", "engine", "engine.worker.entry", "front", "kernels.catalogue"},
}
OUTSIDE = {
    "model": {"msgspec"},
    "strategies": {"msgspec", "numpy", "hypothesis"},
    "reports": {"msgspec", "rich"},
    "oracles": {"msgspec", "torch"},
    "kernels": {"msgspec", "torch", "triton", "conch"},
    "cpu": {"numpy", "torch", "triton"},
    "engine.worker": {"msgspec", "numpy", "torch", "triton"},
    "engine": {"msgspec", "hypothesis", "pebble"},
    "front": {"msgspec", "click", "rich", "pytest", "hypothesis"},
}
# What the parent imports of the worker's side must itself be free of torch and triton.
SHARED_WITH_PARENT = (
    "kvfuzz.engine.worker",
    "kvfuzz.engine.worker.entry",
    "kvfuzz.kernels.catalogue",
)


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        if "__pycache__" not in path.parts:
            name = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
            yield name.removesuffix(".__init__"), path


def _layer(module: str) -> str | None:
    for layer in sorted(MAY_IMPORT, key=len, reverse=True):
        if module == layer or module.startswith(layer + "."):
            return layer
    return None


def _imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = [(name, path) for name, path in _modules() if _layer(name)]


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_a_module_imports_only_what_its_layer_may(name, path):
    layer = _layer(name)
    for imported in _imports(path):
        top = imported.partition(".")[0]
        if top == "kvfuzz":
            inner = imported.removeprefix("kvfuzz").removeprefix(".")
            target = _layer(inner)
            if target is None:  # kvfuzz itself, kvfuzz.errors
                continue
            allowed = MAY_IMPORT[layer]
            named = any(inner == each or inner.startswith(each + ".") for each in allowed)
            assert named, f"{name} ({layer}) imports {imported}"
            if layer in ("engine", "front") and target == "engine.worker":
                assert inner.startswith("engine.worker.entry"), f"{name} imports {imported}"
        elif top not in sys.stdlib_module_names:
            assert top in OUTSIDE[layer], f"{name} ({layer}) imports {imported}"


def test_the_table_knows_every_module():
    outside = {name for name, _ in _modules() if not _layer(name)}
    assert outside == {"__init__", "__main__", "errors", "liveness"}


def test_siblings_are_reached_by_symlinks_and_top_level_names_stay_free():
    for sibling in ("strategies", "oracles", "kernels", "reports"):
        link = PACKAGE / sibling
        if link.is_symlink():  # an installed wheel has real folders
            assert link.resolve() == PACKAGE.resolve().parent / sibling
    assert not (PACKAGE.resolve().parent / "kernels" / "__init__.py").exists()
    assert not (PACKAGE.resolve().parent / "tests" / "__init__.py").exists()


def _loaded_after(code: str) -> set[str]:
    listing = "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code + listing], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_parent_never_loads_torch_or_triton():
    code = (
        "import kvfuzz.engine.campaign, kvfuzz.engine.replay, kvfuzz.front.cli, "
        "kvfuzz.kernels.catalogue\n"
        "from kvfuzz.kernels.catalogue import list_targets; list_targets()"
    )
    assert not _loaded_after(code) & WORKER_ONLY


def test_the_worker_never_loads_hypothesis():
    code = (
        "import msgspec\n"
        "from kvfuzz.engine.worker import entry\n"
        "from kvfuzz.model.target import TargetSpec\n"
        "config = entry.WorkerConfig(TargetSpec('builtin:gather_cache'), 'cpu', 'gfx942')\n"
        "entry.describe(msgspec.msgpack.encode(config))"
    )
    loaded = _loaded_after(code)
    assert "triton" in loaded
    assert not loaded & PARENT_ONLY


def test_the_console_entry_point_loads_nothing_heavy_before_it_is_called():
    # A worker imports the main module again, which is this one.
    assert not _loaded_after("import kvfuzz, kvfuzz.front.entry") & (PARENT_ONLY | WORKER_ONLY)


def test_the_pytest_plugin_loads_nothing_heavy():
    loaded = _loaded_after("import kvfuzz.front.pytest_plugin")
    assert not loaded & ({"hypothesis", "click", "rich", "pebble"} | WORKER_ONLY)
