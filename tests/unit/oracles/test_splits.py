"""prefix_split: a writer that remembers its last launch passes alone, and not in chunks."""

from kvfuzz.engine.worker.judge import Judge
from kvfuzz.kernels.resolve import resolve_kernel
from kvfuzz.model.any_case import check_case
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import TargetSpec
from kvfuzz.oracles.splits import chunked, cuts
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

OP = "reshape_and_cache"
SMALL = Domain(allowed={"reach": ("near",), "block_size": ("4", "8"), "head_size": ("8", "16")})

# A writer that rounds up how many rows it had the last time: right for the first write of a cache.
FORGETFUL = """
from kvfuzz.kernels.builtin.reshape_and_cache import reshape_and_cache as right

LAST = {}

def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
                      kv_cache_layout, cache_dtype):
    cache = key_cache.data_ptr()
    if LAST.get("cache") == cache and LAST["key"] != key.data_ptr():
        slot_mapping = slot_mapping[:-1]  # "the last token is cached already"
        key, value = key[:-1], value[:-1]
    LAST.update(cache=cache, key=key.data_ptr())
    if len(slot_mapping):
        right(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_layout)
"""


def _cases(count):
    within = space(OP, SMALL)
    cases = [drawn_case(Drawn(seed), within) for seed in range(count)]
    return [case for case in cases if chunked(case) is not None]


def test_chunks_are_the_rows_in_order_and_each_once():
    for case in _cases(60):
        other = chunked(case)
        check_case(other)
        slots = case.integers(case.steps[0], "slot_mapping")
        assert len(other.steps) > 1
        parts = [slot for step in other.steps for slot in other.integers(step, "slot_mapping")]
        assert parts == list(slots)
        key = case.bound_field(case.steps[0], "key")
        places = []
        for step in other.steps:
            field = other.bound_field(step, "key")
            for row in range(field.extents["token"]):
                places.append(field.byte({"token": row, "head": 0, "dim": 0}))
        assert places == [
            key.byte({"token": row, "head": 0, "dim": 0}) for row in range(len(slots))
        ]
        ends = cuts(case, len(slots))
        assert ends == sorted(set(ends))


def _outcomes(target, lane, cases):
    judge = Judge(target, None, lane)
    found = []
    for case in cases:
        results = {each.name: each for each in judge.verdict(case).results}
        found.append(results)
        lane.rest()
    return found


def test_our_writer_leaves_the_same_bytes_in_chunks(cpu_lane):
    target = resolve_kernel(TargetSpec(f"builtin:{OP}"))
    for results in _outcomes(target, cpu_lane, _cases(25)):
        assert results["prefix_split"].outcome == "passed"


def test_a_writer_that_remembers_its_last_launch_is_found_by_this_alone(cpu_lane, tmp_path):
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL)
    target = resolve_kernel(TargetSpec(f"{file}:{OP}"))
    failing = [
        results
        for results in _outcomes(target, cpu_lane, _cases(25))
        if results["prefix_split"].outcome == "failed"
    ]
    assert failing
    for results in failing:
        assert results["oracle"].outcome == results["complete"].outcome == "passed"
        said = results["prefix_split"].violation.message
        assert said.startswith(
            "written in chunks, a byte of the cache is another; here it is right"
        )
