"""Computed scales against NumPy's fp32 and Python's exact numbers."""

import math

import numpy as np
import pytest
import torch

from kvfuzz.model.target import Quantise
from kvfuzz.oracles.groups import group_scales, largest_of, next_powers_of_two

ABSMAX = np.array([0.0, 1e-9, 3e-5, 1e-4, 0.1, 1.0, 223.5, 448.0, 6e4, 3e30], np.float32)
INDEXER = Quantise(absmax_floor=1e-4, scale_floor=0.0, largest={"e4m3fnuz": 224.0})


@pytest.mark.parametrize("cache", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("how", [Quantise(), INDEXER], ids=["scale_floor", "absmax_floor"])
def test_scales_are_quotients_between_two_floors(cache, how):
    found = group_scales(torch.from_numpy(ABSMAX), cache, how).numpy()
    largest = np.float32(largest_of(cache, how))
    quotients = np.maximum(ABSMAX, np.float32(how.absmax_floor)) / largest
    assert found.tolist() == np.maximum(quotients, np.float32(how.scale_floor)).tolist()


def test_the_largest_number_is_the_declared_one_or_that_of_the_format():
    assert largest_of("e4m3fnuz", INDEXER) == 224.0
    assert largest_of("e4m3fnuz", Quantise()) == 240.0
    assert largest_of("e4m3fn", INDEXER) == 448.0


def test_the_next_power_of_two_is_exact_on_it_and_an_ulp_to_either_side():
    for exponent in (-126, -20, -1, 0, 1, 30, 126):
        power = np.float32(2.0) ** np.float32(exponent)
        around = [power, np.nextafter(power, np.float32(math.inf))]
        if exponent > -126:
            around.append(np.nextafter(power, np.float32(0)))
        found = next_powers_of_two(torch.tensor(np.array(around, np.float32)))
        assert found.tolist() == [power, 2 * power, power][: len(around)]
