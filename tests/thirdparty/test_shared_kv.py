"""vLLM's attention of a layer that shares another layer's cache, by AITER's backend, by release.

0.29.0 raises TypeError (#55887); up to 0.32.0 the scales of SHUFFLE caches are ignored.
"""

import pytest
from nights import by_night, more_by_night

from kvfuzz.errors import Exit
from kvfuzz.model.ops.shared_kv_matrix import shared_kv_matrix

pytestmark = pytest.mark.thirdparty

TARGET = "vllm:shared_kv_attention"
MATRIX = shared_kv_matrix()
FIXED = ["0.30.0", "0.32.0", "0.33.0"]
REAL_SCALES = "order=shuffle,scale=power_of_two|general"

CASES, BY_NIGHT = 20, 30

CLEAN = [
    by_night("0.30.0", "order=hnd"),
    ("0.30.0", "scale=none|unit"),
    by_night("0.32.0", "order=hnd"),
    by_night("0.32.0", "scale=none|unit"),
    ("0.33.0", ""),
    by_night("0.33.0", REAL_SCALES),
]


def test_0_29_0_indexes_a_key_that_is_none(campaign, vllm):
    code, (found,), summary = campaign(TARGET, sources=vllm("0.29.0"), max_cases=20)
    assert code == Exit.FINDING
    assert found.seed.property == "crash"
    assert "'NoneType' object is not subscriptable" in str(found.verdict)
    assert summary.cases <= 5


@pytest.mark.parametrize(
    ("release", "phase"),
    [
        ("0.30.0", "prefill"),
        by_night("0.30.0", "extend"),
        by_night("0.30.0", "decode"),
        by_night("0.32.0", "prefill"),
        ("0.32.0", "extend"),
        by_night("0.32.0", "decode"),
    ],
)
def test_up_to_0_32_0_scales_of_shuffle_caches_are_ignored(campaign, vllm, release, phase):
    where = f"{REAL_SCALES},phase={phase}"
    code, (found,), _ = campaign(TARGET, where=where, sources=vllm(release), max_cases=40)
    assert code == Exit.FINDING
    assert found.seed.property == "oracle"
    assert found.seed.case.nbytes < 4096


@pytest.mark.parametrize(("release", "where", "count"), more_by_night(CLEAN, CASES, BY_NIGHT))
def test_a_release_is_clean_where_it_is_right(campaign, vllm, release, where, count):
    code, _, summary = campaign(TARGET, where=where, sources=vllm(release), max_cases=count)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, count, 0)
    # Scores may be so far apart that no error bound can be given.
    assert summary.passed["oracle"] >= count - 3
    assert {"decode", "prefill", "extend"} <= summary.facts["phase"].keys()


@pytest.mark.parametrize("release", ["0.30.0", by_night("0.32.0"), "0.33.0"])
@pytest.mark.parametrize("name", MATRIX)
def test_the_cases_of_upstreams_test_pass(judge, vllm, release, name):
    from kvfuzz.model.ops.op_case import lower_op

    verdict = judge(TARGET, **vllm(release)).verdict(lower_op(MATRIX[name]))
    assert not verdict.failed
    outcomes = {result.name: result.outcome for result in verdict.results}
    for each in ("crash", "oracle", "complete", "frame", "immutable", "bounds", "dead_bytes"):
        assert outcomes[each] == "passed", each


@pytest.mark.parametrize("name", MATRIX)
def test_the_cases_of_upstreams_test_fail_before_the_fix(judge, vllm, name):
    from kvfuzz.model.ops.op_case import lower_op

    verdict = judge(TARGET, **vllm("0.29.0")).verdict(lower_op(MATRIX[name]))
    assert [result.name for result in verdict.failed] == ["crash"]


@pytest.mark.parametrize("release", ["0.29.0", *FIXED])
def test_the_generated_domain_contains_the_cases_of_upstreams_test(vllm, release):
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.axes import facts
    from kvfuzz.model.ops.op_case import lower_op
    from kvfuzz.model.target import TargetSpec
    from kvfuzz.strategies.rows import space

    info = resolve(TargetSpec(TARGET, vllm(release))).info
    within = space(info.op, info.domain.narrowed(info.op))
    for name, scene in MATRIX.items():
        shown = facts(lower_op(scene))
        assert info.domain.refusal(shown) is None, name
        row = [
            levels.index(shown[axis])
            for axis, levels in zip(within.axes, within.levels, strict=True)
        ]
        assert all(within.allows(row, at) for at in range(len(row))), name


def test_the_matrix_is_the_product_that_upstream_tests():
    assert len(MATRIX) == 18
    assert {name.split("/")[0] for name in MATRIX} == {"nhd", "nhd_window_16", "shuffle"}


def test_a_tree_whose_caches_have_another_shape_is_not_checked(vllm):
    from kvfuzz.errors import NotCheckedError
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    with pytest.raises(NotCheckedError):
        resolve(TargetSpec(TARGET, vllm("0.25.0")))
