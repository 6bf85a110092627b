"""The references satisfy every relation on drawn cases, and a byte that is flipped breaks it.

No kernel runs: a run's bytes after are what the references say.
"""

import dataclasses

import pytest
import torch

from kvfuzz.engine.explore import Deadline, Exploration, Trial
from kvfuzz.engine.findings import size_of
from kvfuzz.engine.worker.execute import view
from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.case import check
from kvfuzz.model.held import held
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.model.round_trip import touched
from kvfuzz.model.steps import check_steps
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.verdict import Violation
from kvfuzz.model.vocabulary import LAYOUTS, NESTINGS, ORDERS
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, NotChecked, Variant
from kvfuzz.oracles.relocated import renaming
from kvfuzz.oracles.strides import free_strides
from kvfuzz.oracles.table import PROPERTIES

RELATIONS = {
    each.name: each
    for each in PROPERTIES
    if each.name
    in (
        "dead_bytes",
        "size1_stride",
        "scale_homogeneity",
        "layout_equivariance",
        "block_permutation",
        "batch_invariance",
    )
}
CASES = 40
"""Of each op; enough for every relation to be decided many times."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As in a worker: cases are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _executed(variant, domain=None):
    """A run of a target that does exactly what the references say."""
    case = variant.case
    info = TargetInfo("x", case.steps[0].op, domain or Domain(), Quantise(), "", "")
    before = {
        each.name: before_the_first_launch(case, each, torch.device("cpu")) for each in case.buffers
    }
    before |= variant.images
    run = Run(case, info, Quantise(), Domain(), before, before)
    return dataclasses.replace(run, after=run.expectation.images)


def _runs(base, relation):
    wanted = relation.variants(base)
    if isinstance(wanted, NotChecked):
        return wanted
    return {BASE: base, **{name: _executed(variant) for name, variant in wanted.items()}}


def _drawn(op):
    found = []

    def keep(case, _):
        found.append(case)
        return Trial(failed=False)

    domain = Domain(allowed={"block_size": ("1", "8", "16", "48"), "reach": ("near",)})
    search = Exploration(op, domain, keep, random_seed=5, size_of=size_of)
    search.next_failure(Deadline(600, CASES), shrink_s=0)
    return found


@pytest.fixture(scope="module", params=["gather_cache", "reshape_and_cache"])
def drawn(request):
    return [_executed(Variant(case)) for case in _drawn(request.param)]


@pytest.mark.parametrize("name", RELATIONS)
def test_the_references_satisfy_a_relation_on_drawn_cases(drawn, name):
    decided = 0
    for base in drawn:
        runs = _runs(base, RELATIONS[name])
        if not isinstance(runs, NotChecked):
            decided += 1
            assert RELATIONS[name].judge(runs) is None, base.case.scene
    assert decided >= CASES // 5


@pytest.mark.parametrize("name", RELATIONS)
def test_a_wrong_byte_of_the_other_run_breaks_a_relation(drawn, name):
    """All that must be written is wrong, so that whichever byte it looks at is."""
    broken = 0
    for base in drawn:
        runs = _runs(base, RELATIONS[name])
        if isinstance(runs, NotChecked):
            continue
        other = next(each for each in reversed(runs) if each != BASE)
        must = runs[other].expectation.must
        after = {
            buffer: torch.where(must[buffer], data ^ 0x10, data) if buffer in must else data
            for buffer, data in runs[other].after.items()
        }
        runs[other] = dataclasses.replace(runs[other], after=after)
        broken += isinstance(RELATIONS[name].judge(runs), Violation)
    assert broken >= CASES // 5


@pytest.mark.parametrize("name", RELATIONS)
def test_the_other_cases_are_sound_and_hold_the_other_bytes_they_say(drawn, name):
    for base in drawn:
        wanted = RELATIONS[name].variants(base)
        for variant in {} if isinstance(wanted, NotChecked) else wanted.values():
            check(variant.case)
            check_steps(variant.case)
            for buffer, image in variant.images.items():
                assert image.shape == (held(variant.case, buffer).size,)
                assert image.dtype == torch.uint8


def _others(drawn, name):
    for base in drawn:
        wanted = RELATIONS[name].variants(base)
        if not isinstance(wanted, NotChecked):
            yield base, wanted


def test_the_other_layout_is_a_plainer_one_of_the_same_tokens(drawn):
    pairs = set()
    for base, wanted in _others(drawn, "layout_equivariance"):
        here = base.case.scene.attention
        there = wanted["plainer_layout"].case.scene.attention
        hard, plain = (
            (
                LAYOUTS.index(each.layout),
                ORDERS.index(each.order),
                NESTINGS.index(each.nesting),
                each.page_padding,
            )
            for each in (here, there)
        )
        assert all(less <= more for less, more in zip(plain, hard, strict=True))
        assert plain != hard
        pairs.add((hard[:2], plain[:2]))
        if (here.order == "shuffle") != (there.order == "shuffle"):
            assert (there.layout, there.order) == ("kv_first", "nhd")
        step = base.case.steps[0]
        other = wanted["plainer_layout"].case
        assert touched(other, other.steps[0]) == touched(base.case, step)
    assert len(pairs) > 8


def test_a_layout_outside_the_domain_is_not_run(gather_scene, scene_with):
    """From content_packed, HND: NHD alone is left, and nothing once that is forbidden."""
    case = lower(scene_with(gather_scene, layout="content_packed", order="hnd"))
    packed = {"layout": ("content_packed",)}
    only = _executed(Variant(case), Domain(allowed=packed))
    wanted = RELATIONS["layout_equivariance"].variants(only)
    layer = wanted["plainer_layout"].case.scene.attention
    assert (layer.layout, layer.order) == ("content_packed", "nhd")
    none = _executed(Variant(case), Domain(allowed=packed, forbidden=({"order": ("nhd",)},)))
    found = RELATIONS["layout_equivariance"].variants(none)
    assert found == NotChecked("the target takes no plainer layout of this cache")


def test_blocks_are_renamed_by_a_permutation_to_the_lowest_ids(drawn):
    for base in drawn:
        names = renaming(base.case)
        n = base.case.geometry.block_size
        used = list(dict.fromkeys(slot // n for slot in touched(base.case, base.case.steps[0])))
        assert sorted(names) == sorted(names.values())
        assert [names[block] for block in used] == list(range(len(used)))


def test_renamed_state_blocks_stay_apart_from_the_others(gather_scene, scene_with):
    case = lower(scene_with(gather_scene, layout="hybrid", state_blocks=(0, 2)))
    wanted = RELATIONS["block_permutation"].variants(_executed(Variant(case)))
    other = wanted["renamed_blocks"].case
    n = other.geometry.block_size
    used = {slot // n for slot in touched(other, other.steps[0])}
    assert used == {0, 1, 2}
    assert not used & set(other.field("state").blocks)
    assert facts(other)["block_ids"] == "identity"


def test_a_stride_says_nothing_where_a_dimension_but_the_last_has_size_1(gather_scene, scene_with):
    scene = scene_with(
        gather_scene,
        geometry=Geometry(num_blocks=1, block_size=16, num_kv_heads=1, head_size=32),
        sequences=(Sequence((0,), 3, 1),),
        table_width=1,
    )
    caches = {(name, axis) for name in ("key_cache", "value_cache") for axis in (0, 2)}
    rows = {(name, axis) for name in ("key_out", "value_out") for axis in (0, 1)}
    assert _free(scene) == caches | rows | {("block_table", 0)}
    assert _free(scene_with(scene, order="shuffle")) == rows | {("block_table", 0)}


def _free(scene):
    return {(each.view.name, each.axis) for each in free_strides(lower(scene))}


def test_other_strides_view_the_same_elements(drawn):
    for base, wanted in _others(drawn, "size1_stride"):
        for mine, other in zip(
            base.case.tensors, wanted["other_strides"].case.tensors, strict=True
        ):
            buffer = torch.arange(base.case.buffer(mine.buffer).nbytes, dtype=torch.int64)
            one, two = (
                view(buffer.to(torch.uint8), each).contiguous().view(torch.uint8)
                for each in (mine, other)
            )
            assert torch.equal(one, two)
        assert base.case.tensors != wanted["other_strides"].case.tensors
