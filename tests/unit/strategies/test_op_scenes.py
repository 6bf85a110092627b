"""Scenes of ops on other things than K and V pages: each case shows its row, all levels occur."""

from collections import Counter
from copy import deepcopy

import msgspec
import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model.any_case import AnyCase, check_case
from kvfuzz.model.axes import AXIS, Domain, axes_of, facts
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.ops.table import BY_OP, FAMILIES, family_of
from kvfuzz.model.scene import OPS
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.boundaries import boundary_rows
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.ops.table import OP_BOUNDARIES

DRAWS = 400


@pytest.fixture(params=BY_OP)
def whole(request):
    """All rows of an op."""
    return space(request.param, Domain().narrowed(request.param))


def test_each_drawn_case_shows_its_row_and_every_level_occurs(whole):
    shown = {axis.name: Counter() for axis in axes_of(whole.op)}
    for seed in range(DRAWS):
        row = whole.drawn_row(Drawn(seed))
        case = drawn_case(Drawn(seed), whole)
        check_case(case)
        assert facts(case) == row, seed
        for axis, level in row.items():
            shown[axis][level] += 1
    for axis in axes_of(whole.op):
        assert shown[axis.name].keys() == set(axis.levels_for(whole.op)), axis.name


def test_a_case_survives_json_and_is_what_its_scene_means(whole):
    for seed in range(40):
        case = drawn_case(Drawn(seed), whole)
        read = msgspec.json.decode(msgspec.json.encode(case), type=AnyCase)
        assert read == case == lower_op(case.scene)


def test_a_case_that_was_edited_is_no_longer_what_its_scene_means(whole):
    case = drawn_case(Drawn(0), whole)
    buffers = (msgspec.structs.replace(case.buffers[0], name="other"), *case.buffers[1:])
    with pytest.raises(UsageError):
        check_case(msgspec.structs.replace(case, buffers=buffers))


def _integers(plain, path=()):
    """Where integers are in what a scene is in JSON."""
    items = (
        plain.items()
        if isinstance(plain, dict)
        else enumerate(plain)
        if isinstance(plain, list)
        else ()
    )
    if isinstance(plain, int) and not isinstance(plain, bool):
        yield path
    for key, value in items:
        yield from _integers(value, (*path, key))


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 62])
@pytest.mark.parametrize("op", [*OPS, *BY_OP])
def test_no_number_in_a_seed_breaks_lowering(op, number):
    """Each integer of a scene, replaced by an absurd one, is refused or does no harm: nothing of
    that size is counted through or allocated."""
    scene = drawn_case(Drawn(0), space(op, Domain().narrowed(op))).scene
    plain, refused = msgspec.to_builtins(scene), 0
    for path in _integers(plain):
        absurd = deepcopy(plain)
        at = absurd
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = number
        try:
            (lower_op if op in BY_OP else lower)(msgspec.convert(absurd, type(scene)))
        except UsageError:
            refused += 1
    assert refused


def test_every_boundary_that_an_op_has_has_a_row(whole):
    rows = list(boundary_rows(whole, Drawn(0)))
    levels = dict(zip(whole.axes, whole.levels, strict=True))
    possible = [
        boundary
        for boundary in OP_BOUNDARIES[whole.op]
        if all(level in levels[axis] for axis, level in boundary.levels.items())
    ]
    assert len(rows) == len(possible) >= 4
    for boundary, row in zip(possible, rows, strict=True):
        assert boundary.levels.items() <= row.items()


def test_axes_of_one_name_have_the_same_levels_in_every_family():
    for family in FAMILIES.values():
        for axis in family.axes:
            assert axis.levels == AXIS[axis.name].levels, axis.name


def _possible(search):
    """What a search comes to where everything possible will do."""
    answer = None
    while True:
        try:
            candidate = search.send(answer) if answer is not None else next(search)
        except StopIteration:
            return
        try:
            lower_op(candidate)
            answer = True
            yield candidate
        except UsageError:
            answer = False


def test_a_search_for_simpler_scenes_ends_and_gets_smaller(whole):
    for seed in range(12):
        scene = drawn_case(Drawn(seed), whole).scene
        family = family_of(scene)
        smallest, steps = scene, 0
        for candidate in _possible(family.simpler(scene)):
            smallest, steps = candidate, steps + 1
        assert steps < 500
        assert family.size(smallest) <= family.size(scene)
