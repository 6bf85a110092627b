"""Kernel coverage: outcomes add up over cases, and the report names what never happened."""

from kvfuzz.model.coverage import Coverage, Exercised, Site
from kvfuzz.reports.kernel_coverage import MOST_ROWS, coverage_lines

LINE, STORE = Site("gather", "k.py", 3, "line"), Site("gather", "k.py", 9, "line")
BRANCH = Site("gather", "k.py", 4, "branch")
MASK, MASK_OF_STORE = Site("gather", "k.py", 5, "mask"), Site("gather", "k.py", 9, "mask")


def test_outcomes_of_two_workers_add_up():
    coverage = Coverage()
    coverage.add([Exercised(BRANCH, ("taken",), ("not taken",))])
    coverage.add([Exercised(BRANCH, ("not taken",), ("taken",)), Exercised(LINE, ("run",), ())])
    line, branch = coverage.all()
    assert line == Exercised(LINE, ("run",), ())
    assert (branch.site, set(branch.seen), branch.missing) == (BRANCH, {"taken", "not taken"}, ())


def test_the_report_counts_and_names_what_never_happened():
    lines = coverage_lines(
        (
            Exercised(LINE, ("run",), ()),
            Exercised(BRANCH, ("taken",), ("not taken",)),
            Exercised(MASK, ("all", "some"), ("none",)),
            Exercised(STORE, (), ("run",)),
            Exercised(MASK_OF_STORE, (), ("all", "some", "none")),
        ),
        indent=2,
    )
    assert lines == [
        "  gather  1 of 2 lines, 1 of 2 sides of branches, 2 of 6 mask cases",
        "    k.py:4  branch always taken",
        "    k.py:5  no program had every lane off",
        "    k.py:9  never ran",
    ]


def test_a_long_list_is_cut_and_says_so():
    never = tuple(
        Exercised(Site("k", "k.py", line, "branch"), ("taken",), ("not taken",))
        for line in range(1, 30)
    )
    lines = coverage_lines(never, indent=0)
    assert len(lines) == 1 + MOST_ROWS
    assert "and 22 more" in lines[-1]


def test_a_campaign_reports_what_its_kernels_ran(campaign):
    _, _, summary = campaign("builtin:gather_cache", max_cases=40)
    lines = [each for each in summary.exercised if each.site.kind == "line"]
    assert {each.site.kernel for each in lines} == {"gather_cache_kernel"}
    assert sum(bool(each.seen) for each in lines) / len(lines) > 0.9
    assert {each.site.kind for each in summary.exercised} == {"line", "mask"}


def test_lines_in_a_row_that_never_ran_are_one_row_of_the_report():
    ran = {3: ("run",), 7: ("run",), 12: ("run",)}
    lines = tuple(
        Exercised(Site("k", file, line, "line"), ran.get(line, ()), () if line in ran else ("run",))
        for file, numbers in (("helper.py", (14,)), ("k.py", (2, 3, 4, 6, 7, 9, 12)))
        for line in numbers
    )
    mask = Exercised(Site("k", "k.py", 6, "mask", 5), (), ("all", "none"))
    assert coverage_lines((*lines, mask), indent=0)[1:] == [
        "  helper.py:14  never ran",
        "  k.py:2        never ran",
        "  k.py:4-6      never ran",
        "  k.py:9        never ran",
    ]


def test_what_each_specialisation_of_a_kernel_can_do_adds_up():
    coverage = Coverage()
    coverage.add([Exercised(MASK, ("all",), ())])
    assert coverage.all() == (Exercised(MASK, ("all",), ()),)
    coverage.add([Exercised(MASK, (), ("some",))])
    assert coverage.all() == (Exercised(MASK, ("all",), ("some",)),)
    coverage.add([Exercised(MASK, ("some",), ())])
    assert coverage.all() == (Exercised(MASK, ("all", "some"), ()),)


def test_a_head_of_no_elements_is_possible_and_never_drawn(campaign):
    """Our kernels take sizes at run time, so that a mask over a head might leave all of it out."""
    _, _, summary = campaign("builtin:reshape_and_cache", max_cases=40)
    masks = [each for each in summary.exercised if each.site.kind == "mask"]
    assert len(masks) >= 4
    assert {each.missing for each in masks} == {("none",)}
    assert {frozenset(each.seen) for each in masks} == {frozenset(("all", "some"))}
