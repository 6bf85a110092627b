"""What is drawn for ops on whole pages and states: possible, and what its row says."""

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import Domain, axes_of, facts
from kvfuzz.model.ops.state_axes import STATE_OP
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

OPS = (*PAGE_OPS, STATE_OP)
MANY = 400


def _whole(op):
    return space(op, Domain().narrowed(op))


@pytest.fixture(scope="module", params=OPS)
def many(request):
    """(op, rows, cases) of its whole domain."""
    within = _whole(request.param)
    rows = [within.drawn_row(Drawn(seed)) for seed in range(MANY)]
    return request.param, rows, [drawn_case(Drawn(seed), within) for seed in range(MANY)]


def test_near_caches_are_small(many):
    sizes = [case.nbytes for case in many[2] if facts(case)["reach"] == "near"]
    assert max(sizes) < 16 << 20


def test_a_source_is_copied_twice_and_a_cache_of_several_layers_is_drawn_at_times(many):
    op, _, cases = many
    scenes = [case.scene for case in cases]
    if op == "copy_blocks":
        assert sum(len(set(each.sources)) < len(each.sources) for each in scenes) > MANY / 50
    if op in PAGE_OPS:
        assert sum(each.layers > 1 and each.index > 0 for each in scenes) > MANY / 20


@pytest.mark.parametrize("op", OPS)
def test_each_level_can_be_asked_for_alone(op):
    for axis in axes_of(op):
        for level in axis.levels_for(op):
            within = space(op, Domain().narrowed(op, {axis.name: (level,)}))
            assert facts(drawn_case(Drawn(3), within))[axis.name] == level


def test_levels_that_no_such_case_has_are_refused():
    with pytest.raises(UsageError, match=r"--where order=x_packed: copy_blocks .*nhd\|hnd"):
        Domain().narrowed("copy_blocks", {"order": ("x_packed",)})
    with pytest.raises(UsageError, match=r"--where host=like: zero_blocks .*host=none"):
        Domain().narrowed("zero_blocks", {"host": ("like",)})
