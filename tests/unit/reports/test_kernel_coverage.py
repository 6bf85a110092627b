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
    never = tuple(Exercised(Site("k", "k.py", line, "line"), (), ("run",)) for line in range(1, 30))
    lines = coverage_lines(never, indent=0)
    assert len(lines) == 1 + MOST_ROWS
    assert "and 22 more" in lines[-1]


def test_a_campaign_reports_what_its_kernels_ran(campaign):
    _, _, summary = campaign("builtin:gather_cache", max_cases=40)
    lines = [each for each in summary.exercised if each.site.kind == "line"]
    assert {each.site.kernel for each in lines} == {"gather_cache_kernel"}
    assert sum(bool(each.seen) for each in lines) / len(lines) > 0.9
    assert {each.site.kind for each in summary.exercised} == {"line", "mask"}
