"""Each mutant of a kernel for pages of one row a token is caught by the property that it names."""

import pytest

from kvfuzz.engine.explore import Deadline, Exploration, Trial
from kvfuzz.engine.findings import size_of
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.model.ops.latent_axes import FORMS_OF

MUTANTS = [mutant for mutant in mutants() if mutant.patches in FORMS_OF]
MOST_CASES = 400


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_by_the_property_it_names(judge, mutant):
    judged = judge(f"mutant:{mutant.name}")
    domain = judged.target.info.domain

    def caught(case, _):
        failed = judged.verdict(case).failed
        return Trial(mutant.caught_by in {result.name for result in failed})

    search = Exploration(mutant.patches, domain, caught, random_seed=0, size_of=size_of)
    found = search.next_failure(Deadline(600, MOST_CASES), shrink_s=0)
    assert found is not None, f"not caught by {mutant.caught_by} in {MOST_CASES} cases"
