"""`kvfuzz prove`: what its arguments mean, what it says of them, and its exit codes."""

import io
import json
import re
import sys
from types import SimpleNamespace

import msgspec
import pytest
from cache_plans import attention
from msgspec.structs import replace

from kvfuzz.engine.worker import proving
from kvfuzz.engine.worker.entry import Description, Environment
from kvfuzz.engine.worker.plan_judge import PlanJudge
from kvfuzz.errors import Exit
from kvfuzz.front import proving as front
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import Domain
from kvfuzz.model.planning import separate
from kvfuzz.model.presets import presets
from kvfuzz.model.verdict import PropertyResult, Verdict

COMPLETE = [key for key, preset in presets().items() if not preset.incomplete]


class InThisProcess:
    """A worker's answers without its process, which takes seconds to start."""

    domain: Domain | None = None
    finds_nothing = False

    def __init__(self, config, *, case_timeout_s):
        self._config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def describe(self):
        self._judge = PlanJudge(resolve(self._config.target), SimpleNamespace(name="cpu"))
        info = self._judge.target.info
        if self.domain is not None:
            info = replace(info, domain=self.domain)
        return Description(info, Environment("3.6.0", "2.9.0", "cpu", "gfx942"))

    def prove(self, case, *, every_count=True):
        return proving.prove(self._judge.target, case, every_count=every_count)

    def prove_tensors(self, file):
        return proving.prove_tensors(file)

    def check(self, case):
        if self.finds_nothing:
            return Verdict((PropertyResult("crash", "passed"),))
        return self._judge.verdict(case)


@pytest.fixture
def here(monkeypatch):
    """Let `kvfuzz prove` ask this process; returns what stands for the worker."""

    class Worker(InThisProcess):
        pass

    monkeypatch.setattr(front, "Worker", Worker)
    return Worker


def _one_line(ended, code, *parts):
    assert ended.err.startswith("kvfuzz: ")
    assert ended.err.count("\n") == 1
    for part in parts:
        assert part in ended.err
    assert ended.code == code


TENSORS = {
    "num_blocks": 3,
    "groups": [["a"], ["b"]],
    "allocations": {"kv": 96},
    "views": [
        ["a", "k", "kv", "bf16", [3, 4], [32, 2], 0],
        ["a", "v", "kv", "bf16", [3, 4], [32, 2], 16],
        ["b", "latent", "kv", "bf16", [3, 2, 4], [32, 16, 2], 0],
    ],
}


def _file(tmp_path, raw):
    path = tmp_path / "f.json"
    path.write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    return path.name


def _with_views(*views, **changes):
    return {**TENSORS, **changes, "views": list(views)}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["preset:qwen3-nxt-80b"],
            ["no preset 'qwen3-nxt-80b'", "did you mean qwen3-next-80b-a3b?"],
        ),
        (["drawn:0"], ["drawn:0: expected drawn:COUNT, for instance drawn:200"]),
        (["drawn:"], ["drawn:: expected drawn:COUNT"]),
        (["drawn:-3"], ["drawn:-3: expected drawn:COUNT"]),
        (["drawn:many"], ["drawn:many: expected drawn:COUNT"]),
        (
            ["gone.json"],
            ["gone.json: no such file", "neither preset:NAME, presets nor drawn:COUNT"],
        ),
        (["preset:llama-4-scout", "--layout", "LBHN"], ["layout='LBHN', expected one of separate"]),
        (
            ["preset:llama-4-scout", "--form", "head_slots"],
            ["form='head_slots' with layout=separate, expected one of ('kv_first',"],
        ),
        (
            ["preset:llama-4-scout", "--layout", "packed", "--form", "kv_first"],
            ["form='kv_first' with layout=packed, expected one of ('blocks_first',)"],
        ),
        (
            ["preset:qwen3-next-80b-a3b", "--layout", "LHBNC"],
            ["kv_layout=LHBNC with pages of several (heads, bytes)"],
        ),
        (["preset:llama-4-scout", "--cache-dtype", "bf61"], ["cache_dtype='bf61'", "did you mean"]),
        (["drawn:1", "--target", "builtin:cache_view"], ["did you mean builtin:cache_views?"]),
        (["drawn:1", "--source", "vllm"], ["--source vllm", "expected PROJECT=DIR"]),
        (["drawn:1", "--source", "vllm=/nowhere"], ["no folder /nowhere"]),
    ],
)
def test_what_means_nothing_is_named(kvfuzz, here, arguments, parts):
    _one_line(kvfuzz("prove", *arguments), Exit.USAGE, *parts)


def test_nothing_to_prove_is_a_usage_error_of_click(kvfuzz):
    assert kvfuzz("prove").code == Exit.USAGE
    assert kvfuzz("prove", "drawn:1", "--num-blocks", "0").code == Exit.USAGE


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"{", ["f.json: not JSON"]),
        (b"[1, 2]", ["f.json: ", "expected a seed, a plan (num_blocks,"]),
        (b'{"colour": "red"}', ["unknown field `colour`", "or tensors (num_blocks, groups,"]),
        (b'{"num_blocks": 3}', ["missing required field `layers`"]),
        (b'{"views": []}', ["missing required field `num_blocks`", "or tensors (num_blocks,"]),
        (
            _with_views(["a", "k", "kv", "bf16", [3, 4], [32, 2]]),
            ["f.json: Expected `array` of at least length 7, got 6 - at `$.views[0]`"],
        ),
        (
            {**msgspec.to_builtins(separate([[attention("a")]], 2)), "groups": []},
            ["impossible plan: groups of [], expected every layer in one group"],
        ),
    ],
    ids=["text", "array", "other", "plan", "tensors", "view", "impossible"],
)
def test_a_file_that_is_none_of_three_is_explained(kvfuzz, here, tmp_path, raw, parts):
    _one_line(kvfuzz("prove", _file(tmp_path, raw)), Exit.USAGE, *parts)


def test_a_seed_of_a_kernel_is_no_plan(kvfuzz, here, seed_file):
    ended = kvfuzz("prove", str(seed_file))
    _one_line(ended, Exit.USAGE, "seed.json: a seed of gather_cache, not of a plan")


def test_a_preset_is_proved_for_every_number_of_blocks(kvfuzz, here):
    ended = kvfuzz("prove", "preset:llama-4-scout")
    assert ended.code == Exit.CLEAN
    words = " ".join(ended.out.split())
    proved = "bounds, shape, aliasing, disjoint, page_bytes, sharing, oracle"
    assert f"proved preset:llama-4-scout, separate: {proved}" in words
    assert "for every number of blocks (" in words
    assert "1 plan on builtin:cache_views: 1 proved, " in words


def test_one_number_of_blocks_can_be_asked_for(kvfuzz, here):
    ended = kvfuzz("prove", "preset:llama-4-scout", "--num-blocks", "7")
    assert ended.code == Exit.CLEAN
    assert "for 7 blocks alone" in " ".join(ended.out.split())


@pytest.mark.parametrize("layout", ["separate", "packed", "BLHNC"])
def test_all_presets_are_those_that_are_complete(kvfuzz, here, layout):
    ended = kvfuzz("prove", "presets", "--layout", layout)
    assert ended.code == Exit.CLEAN
    named = re.findall(r"^proved +preset:(\S+), ", ended.out, re.MULTILINE)
    assert named == COMPLETE
    assert f"{len(COMPLETE)} plans on builtin:cache_views: {len(COMPLETE)} proved" in ended.out


def test_drawn_plans_are_the_same_for_the_same_seed(kvfuzz, here):
    def plans(*options):
        ended = kvfuzz("prove", "drawn:12", *options)
        assert ended.code == Exit.CLEAN
        assert "12 plans on builtin:cache_views: 12 proved" in ended.out
        return re.sub(r"\d+\.\d\d s", "", " ".join(ended.out.split()))

    assert plans() == plans("--seed", "0")


def test_a_plan_in_a_file_or_on_stdin_is_proved(kvfuzz, here, tmp_path, monkeypatch):
    data = msgspec.json.encode(separate([[attention("a")], [attention("w", kind="sliding")]], 2))
    assert kvfuzz("prove", _file(tmp_path, data)).code == Exit.CLEAN
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    ended = kvfuzz("prove", "-")
    assert ended.code == Exit.CLEAN
    assert "for every number of blocks" in " ".join(ended.out.split())


def test_a_plan_that_no_planning_makes_is_proved_for_its_own_count(kvfuzz, here, tmp_path):
    plan = separate([[attention("a")]], 2)
    roomy = tuple(replace(each, nbytes=each.nbytes + 64) for each in plan.allocations)
    data = msgspec.json.encode(replace(plan, allocations=roomy))
    ended = kvfuzz("prove", _file(tmp_path, data))
    assert ended.code == Exit.CLEAN
    assert "for 2 blocks alone" in " ".join(ended.out.split())


def test_several_arguments_are_reported_one_after_the_other(kvfuzz, here, tmp_path):
    ended = kvfuzz("prove", _file(tmp_path, TENSORS), "preset:llama-4-scout", "drawn:2")
    assert ended.code == Exit.CLEAN
    order = ["f.json", "preset:llama-4-scout", "drawn plan 0", "drawn plan 1"]
    found = re.findall(r"^proved +(.+?)(?:,|:) ", ended.out, re.MULTILINE)
    assert found == order
    assert "4 plans on builtin:cache_views: 4 proved" in ended.out


def test_every_argument_is_read_before_the_first_is_proved(kvfuzz, here):
    ended = kvfuzz("prove", "preset:llama-4-scout", "gone.json")
    _one_line(ended, Exit.USAGE, "gone.json")
    assert ended.out == ""


def test_the_tensors_of_an_engine_are_proved_at_their_own_count(kvfuzz, here, tmp_path):
    ended = kvfuzz("prove", _file(tmp_path, TENSORS))
    assert ended.code == Exit.CLEAN
    words = " ".join(ended.out.split())
    assert "proved f.json: bounds, aliasing, disjoint, for 3 blocks alone" in words


REFUTED = [
    (
        _with_views(*TENSORS["views"][:2], ["b", "k", "kv", "bf16", [3, 4], [16, 2], 0]),
        "aliasing: with 3 blocks, a and b disagree on block 2: byte 32 is in block 2 of b and in "
        "block 1 of a",
    ),
    (
        _with_views(*TENSORS["views"], groups=[["a", "b"]]),
        "disjoint: with 3 blocks, a and b share a byte of block 0: byte 0 is in block 0 of b and "
        "in block 0 of a",
    ),
    (
        _with_views(["a", "k", "kv", "bf16", [3, 4], [4, 2], 0], groups=[["a"]]),
        "disjoint: with 3 blocks, k of a and k of a share a byte of block ",
    ),
    (
        _with_views(*TENSORS["views"], allocations={"kv": 87}),
        "bounds: v of a reaches byte 87 of kv, which has 87",
    ),
]


@pytest.mark.parametrize(("raw", "said"), REFUTED, ids=["aliasing", "disjoint", "twice", "bounds"])
def test_tensors_that_share_what_they_must_not_are_refuted_without_a_seed(
    kvfuzz, here, tmp_path, raw, said
):
    ended = kvfuzz("prove", _file(tmp_path, raw))
    assert ended.code == Exit.FINDING
    assert f"refuted f.json: {said}" in " ".join(ended.out.split())
    assert "tensors of an engine: 0 proved, 1 refuted" in ended.out
    assert not [*tmp_path.rglob("seeds/*")]


FIRST = TENSORS["views"][0]


@pytest.mark.parametrize(
    "raw",
    [
        _with_views(["a", "k", "other", "bf16", [3, 4], [32, 2], 0]),
        _with_views(["a", "k", "kv", "float16", [3, 4], [32, 2], 0]),
        _with_views(["a", "k", "kv", "bf16", [3, 4], [2], 0]),
        _with_views(["a", "k", "kv", "bf16", [], [], 0]),
        _with_views(FIRST, num_blocks=0),
        _with_views(FIRST, groups=[["a", "b"]]),
        _with_views(FIRST, groups=[["a"], ["a"]]),
    ],
    ids=[
        "an allocation that is not listed",
        "a dtype without a size",
        "fewer strides than axes",
        "no axes",
        "no blocks",
        "a layer without views",
        "a layer of two groups",
    ],
)
def test_tensors_that_mean_nothing_are_a_usage_error(kvfuzz, here, tmp_path, raw):
    ended = kvfuzz("prove", _file(tmp_path, raw))
    assert ended.code == Exit.USAGE
    assert "f.json" in ended.err


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (["a", "k", "kv", "bf16", [3, 4], [-32, 2], 0], "bounds"),
        (["a", "k", "kv", "bf16", [3, 4], [32, -2], 0], "bounds"),
        (["a", "k", "kv", "bf16", [3, 4], [-32, 2], 64], "aliasing"),
    ],
)
def test_strides_that_count_downwards_prove_nothing_that_does_not_hold(
    kvfuzz, here, tmp_path, view, name
):
    raw = _with_views(view, ["b", "k", "kv", "bf16", [3, 4], [32, 2], 0])
    ended = kvfuzz("prove", _file(tmp_path, raw))
    assert ended.code in (Exit.FINDING, Exit.USAGE), ended.out
    assert ended.code == Exit.USAGE or f"refuted f.json: {name}" in " ".join(ended.out.split())


def test_what_is_outside_of_the_targets_domain_is_not_decided(kvfuzz, here):
    here.domain = Domain(allowed={"kinds": ("full",)}, source="a source")
    ended = kvfuzz("prove", "preset:llama-4-scout", "drawn:2")
    assert ended.code == Exit.NOT_CHECKED
    words = " ".join(ended.out.split())
    assert "not decided preset:llama-4-scout, separate: outside the domain of" in words
    assert "kinds=full+chunked is outside full" in words
    assert "3 plans on builtin:cache_views: 2 proved, 1 not decided" in words


def test_a_refuted_plan_wins_over_one_that_is_not_decided(kvfuzz, here):
    here.domain = Domain(allowed={"kinds": ("full",)}, source="a source")
    raw = ["preset:llama-4-scout", "drawn:40"]
    ended = kvfuzz("prove", *raw, "--target", "mutant:packed_sides_overlap")
    assert ended.code == Exit.FINDING
    assert re.search(r": \d+ proved, \d+ refuted, 1 not decided, ", ended.out)


def test_a_proof_that_counting_does_not_confirm_decides_nothing(kvfuzz, here):
    here.finds_nothing = True
    names = ("preset:whisper-large-v3", "preset:nemotron-parse")
    ended = kvfuzz("prove", *names, "--form", "mixed", "--target", MUTANT)
    assert ended.code == Exit.NOT_CHECKED
    words = " ".join(ended.out.split())
    assert "not decided preset:whisper-large-v3, separate: aliasing is refuted" in words
    assert "counting the bytes of that case finds nothing" in words
    assert "0 proved, 2 not decided" in words


MUTANT = "mutant:views_by_backend"


def test_a_refuted_plan_is_saved_as_a_small_seed_that_replay_fails(kvfuzz, tmp_path):
    """With the real worker, once."""
    ended = kvfuzz("prove", "preset:nemotron-parse", "--form", "mixed", "--target", MUTANT)
    assert ended.code == Exit.FINDING
    words = " ".join(ended.out.split())
    assert "refuted preset:nemotron-parse, separate: aliasing: with 3 blocks, " in words
    (seed,) = (tmp_path / "kvfuzz-out" / "seeds").glob("*.json")
    saved = json.loads(seed.read_bytes())
    assert (saved["property"], saved["op"], saved["target"]) == ("aliasing", "cache_views", MUTANT)
    assert saved["case"]["plan"]["num_blocks"] == 2
    assert len(saved["case"]["plan"]["layers"]) == 2
    (line,) = [each for each in ended.out.splitlines() if each.strip().startswith("kvfuzz replay ")]
    again = kvfuzz(*line.split()[1:])
    assert again.code == Exit.FINDING
    assert "aliasing" in again.out
    assert kvfuzz("replay", str(seed), "--target", "builtin:cache_views").code == Exit.CLEAN
    proved = kvfuzz("prove", str(seed))
    assert proved.code == Exit.CLEAN
    assert seed.name in proved.out


def test_the_views_of_a_kernel_cannot_be_proved(kvfuzz):
    ended = kvfuzz("prove", "drawn:1", "--target", "builtin:gather_cache")
    _one_line(ended, Exit.USAGE, "builtin:gather_cache is a gather_cache: only views can be proved")


def test_regions_cannot_be_proved(kvfuzz):
    ended = kvfuzz("prove", "drawn:1", "--target", "builtin:transfer_regions")
    _one_line(ended, Exit.USAGE, "builtin:transfer_regions is a transfer_regions: only views")


def test_the_views_of_a_function_in_a_file_are_proved(kvfuzz, here, edited):
    target = edited("kernels/builtin/cache_views.py", "cache_views")
    ended = kvfuzz("prove", "drawn:3", "--target", target)
    assert (ended.code, ended.err) == (Exit.CLEAN, "")
    assert "3 plans on file:cache_views: 3 proved" in ended.out
