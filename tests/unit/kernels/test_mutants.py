import ast
import dataclasses
import inspect

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.kernels.own import FUNCTIONS, PLAN_FUNCTIONS, load
from kvfuzz.model.verdict import PLAN_PROPERTY_NAMES, PROPERTY_NAMES


def _each(chosen):
    return pytest.mark.parametrize("mutant", chosen, ids=lambda mutant: mutant.name)


OF_KERNELS = [mutant for mutant in mutants() if mutant.patches in FUNCTIONS]
OF_PLANS = [mutant for mutant in mutants() if mutant.patches in PLAN_FUNCTIONS]

every_mutant = _each(mutants())


def test_a_mutant_patches_a_kernel_or_an_op_on_plans():
    assert len(OF_KERNELS) + len(OF_PLANS) == len(mutants())
    assert {mutant.patches for mutant in OF_KERNELS} == FUNCTIONS.keys()
    assert {mutant.patches for mutant in OF_PLANS} == PLAN_FUNCTIONS.keys()


@every_mutant
def test_a_patch_changes_exactly_one_line_of_a_built_in_function(mutant):
    before = mutant.path.read_text().splitlines()
    after = mutant.source().splitlines()
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


@every_mutant
def test_a_patched_source_is_python(mutant):
    ast.parse(mutant.source())


@every_mutant
def test_a_mutant_says_what_it_models_and_what_catches_it(mutant):
    assert mutant.models
    names = PROPERTY_NAMES if mutant.patches in FUNCTIONS else PLAN_PROPERTY_NAMES
    assert mutant.caught_by in names


@_each(OF_KERNELS)
def test_a_loaded_mutant_has_the_patched_source_to_compile(mutant):
    function = load(mutant, mutant.source())
    kernel = function.__globals__[f"{mutant.patches}_kernel"]
    assert inspect.signature(function) == inspect.signature(FUNCTIONS[mutant.patches])
    assert inspect.getsource(function) in mutant.source()
    assert inspect.getsource(kernel.fn) in mutant.source()


@_each(OF_PLANS)
def test_a_loaded_mutant_of_a_plan_op_is_the_patched_function(mutant):
    function, whole = load(mutant, mutant.source()), PLAN_FUNCTIONS[mutant.patches]
    assert function is not whole
    assert inspect.signature(function) == inspect.signature(whole)
    assert function.__code__.co_filename == f"<kvfuzz mutant {mutant.name}>"


def test_mutant_names_are_unique():
    assert len({mutant.name for mutant in mutants()}) == len(mutants())


def test_every_property_has_a_mutant():
    """But for those that need more than one line: a memory of the last launch (of `prefix_split`,
    tests/unit/oracles/test_splits.py has one), a partner."""
    caught_by = {mutant.caught_by for mutant in OF_KERNELS if not mutant.survives}
    assert caught_by == set(PROPERTY_NAMES) - {"determinism", "roundtrip", "prefix_split"}


def test_every_property_of_plans_has_a_mutant():
    """But for an exception, which needs more than one line."""
    assert {mutant.caught_by for mutant in OF_PLANS} == set(PLAN_PROPERTY_NAMES) - {"crash"}


def test_a_patch_whose_line_is_gone_is_refused():
    broken = dataclasses.replace(mutants()[0], old="no such line")
    with pytest.raises(UsageError, match=r"old='no such line' occurs 0 times in gather_cache\.py"):
        broken.source()


def test_a_patch_whose_line_is_ambiguous_is_refused():
    broken = dataclasses.replace(mutants()[0], old="tl.load(")
    with pytest.raises(UsageError, match=r"occurs \d+ times in .*expected exactly once"):
        broken.source()
