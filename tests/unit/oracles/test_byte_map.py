"""Byte maps say what counting bytes one by one says, on small views of any strides."""

import random
from collections import Counter

import numpy as np
import pytest
from cache_plans import bytes_of_view

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView
from kvfuzz.oracles.byte_map import (
    MOST_RUNS,
    Runs,
    blocks_of,
    disagreement,
    merged,
    overlap,
    runs_of,
    together,
)


def _view(rng, num_blocks, *, dense=False):
    """A view of up to 300 elements: strides of any order, with or without gaps and overlaps."""
    dtype = rng.choice(("e4m3fn", "bf16", "fp32"))
    size = itemsize(dtype)
    inner = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    shape = (num_blocks * rng.randint(1, 2), *inner)
    axes = list(range(len(shape)))
    rng.shuffle(axes)
    strides, stride = [0] * len(shape), size
    for axis in axes:
        strides[axis] = stride
        stride *= shape[axis] + (0 if dense else rng.choice((0, 0, 0, 1)))
    if not dense and rng.random() < 0.4:
        strides[rng.randrange(len(strides))] = size * rng.randint(0, 6)
    return LayerView("a", "k", "kv", dtype, shape, tuple(strides), size * rng.randint(0, 9))


def _counted(runs):
    return Counter(
        (byte, int(block))
        for start, end, block in zip(runs.starts, runs.ends, runs.blocks, strict=True)
        for byte in range(start, end)
    )


def _some(seed, count=400, **options):
    rng = random.Random(seed)
    for _ in range(count):
        num_blocks = rng.randint(1, 4)
        yield rng, num_blocks, _view(rng, num_blocks, **options)


def test_the_runs_of_a_view_are_its_elements_one_by_one():
    for _, num_blocks, view in _some(1):
        runs = runs_of(view, num_blocks, range(num_blocks))
        naive = bytes_of_view(view, num_blocks)
        assert _counted(runs) == naive, view
        assert runs.nbytes == naive.total()
        assert list(runs.starts) == sorted(runs.starts)


def test_the_runs_of_some_blocks_are_those_of_all_that_are_theirs():
    for rng, num_blocks, view in _some(2):
        some = rng.sample(range(num_blocks), rng.randint(1, num_blocks))
        naive = bytes_of_view(view, num_blocks)
        expected = Counter({at: count for at, count in naive.items() if at[1] in some})
        assert _counted(runs_of(view, num_blocks, some)) == expected, view


def test_bytes_that_follow_each_other_are_one_run():
    view = LayerView("a", "k", "kv", "bf16", (3, 4, 2, 8), (256, 32, 16, 2), 0)
    assert list(runs_of(view, 3, [0, 1, 2]).ends) == [128, 384, 640]
    permuted = LayerView("a", "k", "kv", "bf16", (3, 2, 4, 8), (256, 16, 32, 2), 0)
    assert list(runs_of(permuted, 3, [0, 2]).ends) == [128, 640]


def test_an_overlap_is_the_first_byte_that_is_two_elements():
    seen = Counter()
    for rng, num_blocks, view in _some(3, count=800):
        runs = runs_of(view, num_blocks, range(num_blocks))
        if rng.random() < 0.5:
            runs = together([runs, runs_of(_view(rng, num_blocks), num_blocks, range(num_blocks))])
        counted = _counted(runs)
        owners: dict[int, list[int]] = {}
        for (byte, block), count in counted.items():
            owners.setdefault(byte, []).extend([block] * count)
        twice = {byte: blocks for byte, blocks in owners.items() if len(blocks) > 1}
        found = overlap(runs)
        seen[found is None] += 1
        if found is None:
            assert not twice, view
            continue
        byte, one, other = found
        assert byte == min(twice), view
        left = Counter(twice[byte])
        left.subtract([one, other])
        assert min(left.values()) >= 0, view
    assert min(seen.values()) > 100


def test_merging_keeps_every_byte_and_its_block_in_the_fewest_runs():
    merged_some = 0
    for rng, num_blocks, view in _some(4):
        runs = runs_of(view, num_blocks, range(num_blocks))
        more = runs_of(_view(rng, num_blocks), num_blocks, range(num_blocks))
        for each in (runs, together([runs, more])):
            if overlap(each) is not None:
                continue
            fewer = merged(each)
            assert _counted(fewer) == _counted(each)
            follows = (fewer.starts[1:] == fewer.ends[:-1]) & (
                fewer.blocks[1:] == fewer.blocks[:-1]
            )
            assert not follows.any()
            merged_some += fewer.starts.size < each.starts.size
    assert merged_some > 20


def test_merging_nothing_is_nothing():
    none = np.empty(0, np.int64)
    assert merged(Runs(none, none, none)).nbytes == 0
    assert overlap(Runs(none, none, none)) is None


def test_a_disagreement_is_of_the_lowest_block_that_has_one():
    seen = Counter()
    for rng, num_blocks, view in _some(5, count=1500):
        one = runs_of(view, num_blocks, range(num_blocks))
        other = runs_of(_view(rng, num_blocks, dense=True), num_blocks, range(num_blocks))
        if overlap(one) is not None:
            continue
        one, other = merged(one), merged(other)
        mine, theirs = dict(_counted(one).keys()), dict(_counted(other).keys())
        wrong = {
            byte: (mine[byte], theirs[byte])
            for byte in mine.keys() & theirs.keys()
            if mine[byte] != theirs[byte]
        }
        found = disagreement(one, other)
        seen[found is None] += 1
        if found is None:
            assert not wrong, view
            continue
        byte, first, second = found
        assert wrong[byte] == (first, second)
        lowest = min(block for _, block in wrong.values())
        assert second == lowest
        assert byte == min(at for at, (_, block) in wrong.items() if block == lowest)
    assert min(seen.values()) > 50


def test_maps_that_share_no_byte_do_not_disagree():
    runs = runs_of(LayerView("a", "k", "kv", "bf16", (2, 4), (8, 2), 0), 2, [0, 1])
    beside = runs_of(LayerView("b", "k", "kv", "bf16", (2, 4), (8, 2), 16), 2, [0, 1])
    assert disagreement(runs, beside) is None
    assert disagreement(runs, runs) is None


@pytest.mark.parametrize("num_blocks", [1, 2, 6, 64, 1000])
def test_of_few_runs_all_blocks_are_looked_at(num_blocks):
    runs = MOST_RUNS // num_blocks
    assert blocks_of(num_blocks, runs) == list(range(num_blocks))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 65, 1000, 1 << 20])
def test_of_many_runs_the_first_some_inside_and_the_last_are_looked_at(num_blocks):
    some = blocks_of(num_blocks, MOST_RUNS + 1)
    assert some == sorted(set(some))
    assert len(some) <= 10
    assert {0, num_blocks // 2, num_blocks - 1} <= set(some)
    assert some[-1] == num_blocks - 1
