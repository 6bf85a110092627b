"""A campaign from its first draw to its seed."""

import json

import msgspec
import pytest

from kvfuzz.engine.replay import replay
from kvfuzz.engine.store import read_seed
from kvfuzz.errors import Exit, InfrastructureError, NotCheckedError, UsageError
from kvfuzz.model.axes import facts
from kvfuzz.model.lower import lower
from kvfuzz.model.seed import SCHEMA

MUTANT = "mutant:hardcoded_block_stride"
GATHER = "kernels/builtin/gather_cache.py"


def test_a_broken_kernel_is_found_reduced_saved_and_replays_to_the_same_bytes(campaign, tmp_path):
    code, (found,), summary = campaign(MUTANT)
    assert code == Exit.FINDING
    assert summary.ended_by == "finding"
    seed = read_seed(tmp_path / "out" / "seeds" / f"{found.seed.id}.json")
    assert seed == found.seed
    assert seed.case.geometry.num_blocks <= 3
    assert seed.case.geometry.num_kv_heads == 1
    assert len(msgspec.json.encode(seed)) < 4096
    again = replay(seed)
    assert (again.exit_code, again.same_bytes) == (Exit.FINDING, True)
    mended = replay(seed, target="builtin:gather_cache")
    assert mended.exit_code == Exit.CLEAN


def test_the_finding_names_whose_byte_was_read(campaign):
    _, (found,), _ = campaign(MUTANT)
    violation = found.verdict.failed[0].violation
    assert violation.traced
    assert violation.origin.buffer == "kv_cache"
    assert violation.origin.coordinate != violation.place.coordinate


@pytest.mark.nightly
def test_the_same_seed_draws_the_same_cases_and_ci_variables_change_nothing(campaign, monkeypatch):
    def run(out):
        _, _, summary = campaign("builtin:gather_cache", max_cases=40, random_seed=7, out=out)
        return summary.facts

    first = run("a")
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert run("b") == first
    _, _, other = campaign("builtin:gather_cache", max_cases=40, random_seed=8, out="c")
    assert other.facts != first


def test_keep_going_reports_one_bug_once_by_whatever_path_it_shows(campaign):
    code, found, summary = campaign("mutant:one_head", keep_going=True, max_cases=60)
    assert code == Exit.FINDING
    assert [each.seed.property for each in found] == ["oracle"]
    assert summary.cases == 60
    assert summary.failed["oracle"] > 20


THREE_BUGS = {
    "every sequence from its start": (
        "position = start + row - tl.load(cu_seqlens_kv_ptr + sequence)",
        "position = row - tl.load(cu_seqlens_kv_ptr + sequence)",
    ),
    "V with K's scale": (
        "v = v.to(tl.float32) * tl.load(v_scale_ptr + v_scale_at)",
        "v = v.to(tl.float32) * tl.load(k_scale_ptr + k_scale_at)",
    ),
    "no mask on the store of V": (
        "tl.store(value_ptr + value_at, v.to(value_ptr.dtype.element_ty), mask=inside_v)",
        "tl.store(value_ptr + value_at, v.to(value_ptr.dtype.element_ty))",
    ),
}


@pytest.mark.nightly
def test_three_bugs_in_one_kernel_are_three_findings_of_one_campaign(campaign, edited):
    broken = edited(GATHER, "gather_cache", *THREE_BUGS.values())
    code, found, _ = campaign(broken, keep_going=True, max_cases=400)
    assert code == Exit.FINDING
    shown = [facts(each.seed.case) for each in found]
    late = [
        each for each in shown if each["start_block"] == "later" or each["first_offset"] == "inside"
    ]
    scaled = [each for each in shown if each["scale"] in ("power_of_two", "general")]
    odd = [each for each in shown if each["head_size"] in ("80", "96", "192", "576")]
    assert (len(late), len(scaled), len(odd), len(found)) == (1, 1, 1, 3)


def test_a_finding_says_under_which_levels_it_shows(campaign):
    narrow = "block_size=16|32,head_size=8|16,num_kv_heads=1|2,reach=near,block_ids=shuffled"
    _, found, _ = campaign("mutant:fp8_round_trip", where=narrow, keep_going=True, max_cases=20)
    assert len(found) == 1
    extent = found[0].extent
    assert set(extent["cache_dtype"]) <= {"e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"}
    assert "order" not in extent


def test_a_saved_seed_is_replayed_first_and_a_mended_kernel_goes_on(campaign, edited):
    broken = edited(GATHER, "gather_cache", ("k_at = k_token + head", "k_at = k_token - head"))
    code, (found,), _ = campaign(broken)
    assert code == Exit.FINDING
    _, (again,), summary = campaign(broken)
    assert again.seed.id == found.seed.id
    assert summary.cases == 1
    mended = edited(GATHER, "gather_cache")
    code, _, summary = campaign(mended, max_cases=5)
    assert code == Exit.CLEAN
    assert summary.cases == 6


def test_saved_seeds_outside_where_are_left_alone(campaign):
    _, (found,), _ = campaign("mutant:shuffle_block_stride")
    assert found.seed.case.scene.attention.order == "shuffle"
    code, _, _ = campaign("mutant:shuffle_block_stride", where="order=nhd", max_cases=20)
    assert code == Exit.CLEAN


def test_a_target_that_refuses_too_much_is_not_checked(campaign, edited):
    target = edited(
        GATHER,
        "gather_cache",
        (
            "if num_tokens == 0:",
            "if True:\n        raise NotImplementedError\n    if num_tokens == 0:",
        ),
    )
    with pytest.raises(NotCheckedError, match="refused 30 of 30 cases"):
        campaign(target, max_cases=30)


def test_levels_that_exclude_each_other_are_usage(campaign):
    with pytest.raises(UsageError, match=r"nothing to draw: .*layout=hybrid, strides=dense"):
        campaign("builtin:gather_cache", where="layout=hybrid,strides=dense", max_cases=50)


NARROW = (
    "cache_dtype=bf16,block_size=4|16,head_size=8|16,num_kv_heads=1|2,layout=kv_first|hybrid,"
    "order=nhd|hnd,sequences=1|2,block_ids=identity|shuffled,reach=near"
)


def test_until_coverage_ends_when_every_combination_of_three_levels_was_shown(campaign):
    code, _, summary = campaign("builtin:gather_cache", where=NARROW, until_coverage=True)
    assert (code, summary.ended_by) == (Exit.CLEAN, "coverage")
    assert (summary.combinations.open, summary.combinations.given_up) == (0, 0)
    assert summary.combinations.shown > 500


def test_until_coverage_is_not_checked_where_the_budget_ends_first(campaign):
    with pytest.raises(NotCheckedError, match=r"--until-coverage: \d+ of at most \d+ combinations"):
        campaign("builtin:gather_cache", where=NARROW, until_coverage=True, max_cases=5)


def test_formats_that_nothing_fits_are_usage(campaign):
    with pytest.raises(UsageError, match="nothing to draw"):
        campaign("builtin:gather_cache", where="layout=content_packed,order=shuffle")


def test_a_case_whose_campaign_was_killed_is_run_first_by_the_next(
    campaign, tmp_path, gather_scene
):
    from kvfuzz.engine.journal import Journal

    out = tmp_path / "out"
    out.mkdir()
    Journal(out).about_to_run(MUTANT, lower(gather_scene))
    (own,) = out.glob("journal-*.json")
    own.rename(out / "journal-4194303.json")
    code, (found,), summary = campaign(MUTANT)
    assert (code, summary.cases) == (Exit.FINDING, 1)
    assert found.shrunk_from_bytes == lower(gather_scene).nbytes > found.seed.case.nbytes
    assert not list(out.glob("journal-*"))


def test_a_journal_of_another_version_is_left_alone(campaign, tmp_path, gather_scene):
    from kvfuzz.engine.journal import Entry

    out = tmp_path / "out"
    out.mkdir()
    old = out / "journal-4194303.json"
    old.write_bytes(msgspec.json.encode(Entry("builtin:gather_cache", lower(gather_scene), 1)))
    code, _, summary = campaign("builtin:gather_cache", max_cases=5)
    assert (code, summary.cases) == (Exit.CLEAN, 5)
    assert old.exists()


def test_a_crash_and_a_hang_cost_one_case_each_and_the_campaign_goes_on(campaign, tmp_path):
    path = tmp_path / "k.py"
    path.write_text(
        "import os, signal, time\n"
        "def gather_cache(key_cache, value_cache, key, value, block_table, cu_seqlens_kv,\n"
        "                 token_to_batch, kv_cache_layout):\n"
        "    if kv_cache_layout == 'SHUFFLE':\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if kv_cache_layout == 'HND':\n"
        "        time.sleep(3600)\n"
    )
    code, found, summary = campaign(
        f"{path}:gather_cache",
        where="cache_dtype=bf16,block_size=16,head_size=8,num_kv_heads=1,order=hnd|shuffle",
        keep_going=True,
        max_cases=4,
        case_timeout_s=1,
        shrink_s=0.1,
        reduce_s=0.1,
    )
    messages = [each.verdict.failed[0].violation.message for each in found]
    assert code == Exit.FINDING
    assert any("SIGSEGV" in message for message in messages)
    assert any("hung" in message for message in messages)
    assert summary.cases == 4


def test_events_and_seeds_are_plain_json(campaign, tmp_path):
    _, (found,), _ = campaign(MUTANT)
    raw = json.loads((tmp_path / "out" / "seeds" / f"{found.seed.id}.json").read_text())
    assert raw["schema"] == SCHEMA
    assert not any("/" in str(value) for value in raw["provenance"].values())


def test_a_broken_file_among_the_seeds_is_noted_and_left_alone(campaign, tmp_path):
    seeds = tmp_path / "out" / "seeds"
    seeds.mkdir(parents=True)
    broken = seeds / "0123456789abcdef.json"
    broken.write_text("{half")
    code, _, _ = campaign("builtin:gather_cache", max_cases=5)
    assert code == Exit.CLEAN
    assert broken.read_text() == "{half"


@pytest.mark.parametrize("after_a_finding", [True, False])
def test_a_worker_lost_for_good_keeps_what_was_found(campaign, monkeypatch, after_a_finding):
    from kvfuzz.engine.pool import Worker

    honest, calls = Worker.check, []

    def lost(self, case, *, explain=False, **manner):
        calls.append(explain)
        if (True in calls[:-1]) == after_a_finding and len(calls) > 1:
            raise InfrastructureError("the device is gone")
        return honest(self, case, explain=explain, **manner)

    monkeypatch.setattr(Worker, "check", lost)
    if after_a_finding:
        code, found, summary = campaign(MUTANT, keep_going=True, max_cases=50)
        assert (code, len(found), summary.ended_by) == (Exit.FINDING, 1, "error")
    else:
        with pytest.raises(InfrastructureError, match="the device is gone"):
            campaign("builtin:gather_cache", max_cases=50)


def test_a_bug_that_shows_near_the_start_of_a_cache_is_found_there(campaign):
    """Far out block 0 of a range is as wrong as any other: a case need not shrink to near."""
    for seed in range(3):
        _, (found,), _ = campaign("mutant:hardcoded_block_stride", random_seed=seed, out=f"o{seed}")
        assert facts(found.seed.case)["reach"] == "near"


@pytest.mark.nightly
def test_a_bug_that_shows_far_only_is_found_all_the_same(campaign):
    _, (found,), summary = campaign("mutant:int32_block_offset", max_cases=300)
    assert found.seed.property == "no_overflow"
    assert summary.facts["reach"]["near"] >= 10
