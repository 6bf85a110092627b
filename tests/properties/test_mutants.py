"""Each mutant of a kernel is caught by the property that its entry names, or says why it survives.

Those of ops on a cache plan are in test_plan_views.py, those of ops on pages in test_pages.py
and test_scripts.py.
"""

import pytest
from nights import by_night

from kvfuzz.engine.explore import Deadline, Exploration, Trial
from kvfuzz.engine.findings import size_of
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.scene import OPS

OF_KERNELS = [each for each in mutants() if each.patches in {*OPS, *BY_OP}]
CATCHABLE = [mutant for mutant in OF_KERNELS if not mutant.survives]
SURVIVORS = [mutant for mutant in OF_KERNELS if mutant.survives]
MOST_CASES = 400
SLOW = {*ATTENTION_OPS, MLA_OP}
"""Ops of which a case takes a few tenths of a second; most of their mutants wait for the night."""
ONE_IN = 8
LONG = (
    "mla_decode_rows_of_query",
    "mla_decode_output_rows_dense",
    "decode_output_row",
    "block_size_bounded_by_strides",
    "k_scale_head_stride_for_v",
    "reciprocal_scale",
)
"""Mutants that take minutes, or tens of seconds."""


def _marked(number, mutant):
    waits = mutant.name in LONG or (mutant.patches in SLOW and number % ONE_IN)
    return by_night(mutant, id=mutant.name) if waits else pytest.param(mutant, id=mutant.name)


@pytest.mark.parametrize("mutant", [_marked(*each) for each in enumerate(CATCHABLE)])
def test_a_mutant_is_caught_by_the_property_it_names(judge, mutant):
    judged = judge(f"mutant:{mutant.name}")
    domain = judged.target.info.domain

    def caught(case, _):
        failed = judged.verdict(case).failed
        return Trial(mutant.caught_by in {result.name for result in failed})

    search = Exploration(mutant.patches, domain, caught, random_seed=0, size_of=size_of)
    found = search.next_failure(Deadline(600, MOST_CASES), shrink_s=0)
    assert found is not None, f"not caught by {mutant.caught_by} in {MOST_CASES} cases"


@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_a_mutant_that_survives_does_and_says_why(judge, mutant):
    judged = judge(f"mutant:{mutant.name}")
    failed = []

    def caught(case, _):
        failed.extend(judged.verdict(case).failed)
        return Trial(bool(failed))

    domain = judged.target.info.domain
    search = Exploration(mutant.patches, domain, caught, random_seed=0, size_of=size_of)
    assert search.next_failure(Deadline(600, 100), shrink_s=0) is None, "drop its `survives`"
    assert len(mutant.survives) > 20


def test_the_catalogue_names_are_unique_and_the_bugs_are_described():
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names)
    for mutant in mutants():
        assert len(mutant.models) > 20, mutant.name
