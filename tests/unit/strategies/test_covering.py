"""Covering rows: all valid combinations of three levels, in few rows, counted by facts."""

import itertools

import numpy as np
import pytest

from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.fill import GOLDEN, MASK, mix
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import OPS
from kvfuzz.model.target import TargetSpec
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.covering import Covering
from kvfuzz.strategies.greedy import Noise

TARGETS = ("builtin:gather_cache", "builtin:reshape_and_cache", "conch:reshape_and_cache")
SMALL = Domain(
    allowed={
        "layout": ("kv_first", "hybrid"),
        "cache_dtype": ("bf16", "e4m3fnuz"),
        "block_size": ("1", "16"),
        "num_kv_heads": ("1",),
        "head_size": ("8",),
        "order": ("nhd",),
        "nesting": ("layer_first",),
        "page": ("exact",),
        "value_size": ("same",),
        "granularity": ("tensor", "head"),
        "model_dtype": ("bf16",),
        "reach": ("near",),
        "last_offset": ("edge",),
        "table": ("tight",),
        "sequences": ("1", "2"),
        "block_ids": ("identity", "adjacent", "shuffled"),
    }
)


def covered(covering, within, *, most=5000):
    """Draw rows until nothing is open; the cases' facts are what counts."""
    rows = []
    while (row := covering.next_row()) is not None:
        assert len(rows) < most
        case = lower(drawn_scene(Drawn(len(rows), within.integers(row)), within))
        covering.mark(facts(case))
        rows.append(row)
    return rows


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_covered_in_at_most_1_3_times_the_product_of_its_largest_axes(target):
    info = resolve(TargetSpec(target)).info
    within = space(info.op, info.domain)
    covering = Covering(within)
    rows = covered(covering, within)
    assert (covering.open, covering.given_up) == (0, 0)
    assert len(rows) <= 1.3 * covering.bound


@pytest.mark.nightly
def test_what_is_struck_off_is_shown_by_no_row_and_all_else_is_shown():
    op = OPS[1]
    within = space(op, SMALL.narrowed(op))
    covering = Covering(within)
    covered(covering, within)

    def all_rows(row=()):
        if len(row) == len(within.axes):
            yield within.named(row)
            return
        for level in within.possible(row):
            yield from all_rows((*row, level))

    combinations = {
        tuple(sorted(each)) for row in all_rows() for each in itertools.combinations(row.items(), 3)
    }
    assert covering.shown == len(combinations)


def test_a_case_that_shows_something_else_leaves_what_was_asked_for_open():
    within = space("gather_cache", Domain().narrowed("gather_cache"))
    covering = Covering(within)
    for seed in range(50):
        covering.next_row()
        covering.mark(facts(lower(drawn_scene(Drawn(seed), within))))
        if covering.asked_in_vain:
            break
    assert covering.asked_in_vain
    before = covering.open
    covering.give_up()
    assert (covering.open, covering.given_up) == (before - 1, 1)


def test_levels_outside_the_space_count_for_nothing():
    within = space("gather_cache", SMALL.narrowed("gather_cache"))
    covering = Covering(within)
    shown = facts(lower(drawn_scene(Drawn(3), within)))
    full = covering.mark(shown)
    assert covering.mark({**shown, "layout": "blocks_first"}) == 0
    assert full == np.prod([len(shown), len(shown) - 1, len(shown) - 2]) // 6


def test_noise_is_the_counter_hash_of_fills():
    noise = Noise(5)
    counter, drawn = mix(5), [*noise.uniform(3), *noise.uniform(2)]
    expected = [mix((counter + n * GOLDEN) & MASK) >> 11 for n in range(1, 6)]
    assert drawn == [each / 2**53 for each in expected]


@pytest.mark.nightly
def test_two_random_numbers_cover_by_different_rows():
    within = space("gather_cache", SMALL.narrowed("gather_cache"))
    one, other = (covered(Covering(within, seed), within) for seed in (1, 2))
    assert one != other
    assert one == covered(Covering(within, 1), within)
