"""Fixtures that several test folders share."""

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import kvfuzz
from kvfuzz.model.layout import Geometry
from kvfuzz.model.plan import AttentionLayer, Batch, Plan, Sequence, StateLayer
from kvfuzz.model.scene import Scene

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
ONE = 0x3F800000
ROOT = Path(kvfuzz.__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked nightly, unless `-m` names it."""
    if "nightly" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="a long run; -m nightly runs it")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(skip)


@pytest.fixture
def scene_with() -> Callable[..., Scene]:
    """Replace parts of a scene by name, wherever they live in it."""

    def replace(scene: Scene, **changes: object) -> Scene:
        states = changes.pop("state_blocks", scene.state_blocks)
        layer = _replaced(scene.attention, changes)
        batch = _replaced(scene.batch, changes)
        layers = (layer, StateLayer("layer.1", layer.allocation, states)) if states else (layer,)
        return msgspec.structs.replace(scene, plan=Plan(layers), batch=batch, **changes)

    return replace


def _replaced(part: msgspec.Struct, changes: dict[str, object]) -> msgspec.Struct:
    mine = {name: changes.pop(name) for name in list(changes) if name in part.__struct_fields__}
    return msgspec.structs.replace(part, **mine)


@pytest.fixture
def gather_scene() -> Scene:
    """Two sequences over shuffled blocks, the first starting inside a block."""
    geometry = Geometry(num_blocks=5, block_size=16, num_kv_heads=2, head_size=32)
    layer = AttentionLayer("layer.0", "kv_cache", "blocks_first", "nhd", geometry, "bf16")
    return Scene(
        op="gather_cache",
        layer="layer.0",
        plan=Plan((layer,)),
        batch=Batch((Sequence((3, 1), 13, 6), Sequence((4,), 0, 2)), table_width=3),
        model_dtype="bf16",
        k_scale=ONE,
        v_scale=ONE,
        fill_seed=7,
    )


@pytest.fixture
def write_scene(gather_scene: Scene, scene_with: Callable[..., Scene]) -> Scene:
    """The same tokens stored, between two padding rows."""
    return scene_with(gather_scene, op="reshape_and_cache", padding=(0, 4), row_gap=64)


@pytest.fixture(scope="module")
def cpu_lane() -> Iterator[object]:
    """The cpu lane, active in this process for the tests of one module."""
    import torch

    from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane

    torch.set_num_threads(1)  # as in a worker: cases are small, and tests share the cores
    lane = CheckedCpuLane("gfx942")
    yield lane
    lane.close()


@pytest.fixture
def judge(cpu_lane):
    """Make the judge of a target by name."""
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    def make(name: str, **sources: str) -> Judge:
        target = resolve(TargetSpec(name, sources))
        partner = target.info.partner
        return Judge(target, resolve(TargetSpec(partner, sources)) if partner else None, cpu_lane)

    return make


@pytest.fixture
def campaign(tmp_path: Path):
    """Run a campaign to its end; returns its exit code, its findings and its summary."""
    from kvfuzz.engine.campaign import Campaign, Options
    from kvfuzz.model.axes import parse_where
    from kvfuzz.model.events import Found, Summary
    from kvfuzz.model.target import TargetSpec

    def run(target: str, *, where: str = "", sources=None, out: str = "out", **options):
        events = []
        configured = Options(
            target=TargetSpec(target, sources or {}),
            out=tmp_path / out,
            where=parse_where(where),
            budget_s=options.pop("budget_s", 120.0),
            **options,
        )
        exit_code = Campaign(configured, events.append).run()
        found = [event for event in events if isinstance(event, Found)]
        (summary,) = [event for event in events if isinstance(event, Summary)]
        return exit_code, found, summary

    return run


def _sources_module():
    path = Path(__file__).parent / "thirdparty" / "sources.py"
    spec = importlib.util.spec_from_file_location("kvfuzz_test_sources", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def vllm():
    """The `sources` argument for a vLLM release, whose tree must have been fetched."""
    sources = _sources_module()

    def tree(release: str) -> dict[str, str]:
        folder = sources.tree(release)
        if not sources.is_complete(folder):
            pytest.fail(
                f"no complete tree of vLLM {release}: python tests/thirdparty/sources.py {release}"
            )
        return {"vllm": str(folder)}

    return tree


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., str]:
    """Copy a file of ours to k.py with one text replaced; returns `k.py:function`."""

    def edit(source: str, function: str, *changes: tuple[str, str]) -> str:
        path = tmp_path / "k.py"
        shutil.copy(ROOT / source, path)
        text = path.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {source}"
            text = text.replace(old, new)
        path.write_text(text)
        return f"{path}:{function}"

    return edit
