"""The guide: boundary rows, covering rows, then cases near those that showed something new."""

import pytest

from kvfuzz.engine.guide import Guide
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.lower import lower
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.rows import is_costly

DOMAIN = Domain(
    allowed={"cache_dtype": ("bf16",), "block_size": ("4", "16"), "head_size": ("8", "80")}
).narrowed("gather_cache")


def draws(guide, count, *, learn=True, news=lambda n: False):
    """(phase, integers, facts) of the next cases."""
    seen = []
    for n in range(count):
        choices = guide.draw()
        shown = facts(lower(drawn_scene(choices, guide.space)))
        seen.append((guide.phase, choices.values, shown))
        if learn:
            guide.learn(shown, new_outcomes=news(n))
    return seen


@pytest.mark.nightly
def test_phases_follow_each_other_and_covering_ends_with_nothing_open():
    guide = Guide(space("gather_cache", DOMAIN), 0)
    phases = [phase for phase, _, _ in draws(guide, 600)]
    assert phases == sorted(phases, key=("boundary", "covering", "random").index)
    assert set(phases) == {"boundary", "covering", "random"}
    assert (guide.covering.open, guide.covering.given_up) == (0, 0)


@pytest.mark.nightly
def test_the_same_number_draws_the_same_cases_and_another_draws_others():
    def integers(seed):
        guide = Guide(space("gather_cache", DOMAIN), seed)
        return [values for _, values, _ in draws(guide, 80, news=lambda n: n % 7 == 0)]

    first = integers(5)
    assert integers(5) == first
    other = integers(6)
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


@pytest.mark.nightly
def test_random_cases_are_often_near_one_that_showed_something_new():
    guide = Guide(space("gather_cache", DOMAIN), 0)
    cases = draws(guide, 900)
    random = [values for phase, values, _ in cases if phase == "random"]
    earlier = {values for phase, values, _ in cases if phase != "random"}

    def is_near(values):
        return any(
            len(values) == len(each) and 1 <= sum(map(int.__ne__, values, each)) <= 4
            for each in earlier
        )

    near = sum(map(is_near, random))
    assert len(random) / 5 < near < len(random)


def test_what_is_never_learnt_is_asked_for_a_few_times_and_then_given_up():
    guide = Guide(space("gather_cache", DOMAIN), 0)
    draws(guide, 100, learn=False)
    assert guide.phase == "covering"
    assert guide.covering.given_up > 10


def _costly(guide, count):
    """How many of the next random cases are costly."""
    while guide.phase != "random":
        guide.draw()
    return sum(is_costly(guide.space.drawn_row(guide.draw())) for _ in range(count))


def _at_random(domain):
    """A guide whose boundary and covering rows are over."""
    guide = Guide(space("gather_cache", domain.narrowed("gather_cache")), 3)
    guide._boundary = iter(())
    guide.covering.next_row = lambda: None
    return guide


def test_costly_rows_are_drawn_again_most_times_and_stay_possible():
    within, count = space("gather_cache", Domain().narrowed("gather_cache")), 1500
    unfiltered = sum(is_costly(within.drawn_row(Drawn(seed))) for seed in range(count))
    assert unfiltered > count / 5
    assert unfiltered / 20 < _costly(_at_random(Domain()), count) < unfiltered / 3


def test_where_every_row_is_costly_they_are_drawn_all_the_same():
    far = Domain(allowed={"reach": ("past_2g_bytes",), "block_size": ("16",)})
    assert _costly(_at_random(far), 20) == 20
