"""The reference of attention against plain arithmetic, and what its bound lets through."""

import math

import msgspec
import pytest
import torch

from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.kernels.builtin.unified_attention import QUANTISED
from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.attention import ATTENTION_OPS, UNIFIED
from kvfuzz.model.target import IN_FP32, Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.attention_bound import Scoring, attend
from kvfuzz.oracles.expectation import expect
from kvfuzz.oracles.numerics import Numerics
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

EXACT = msgspec.structs.replace(IN_FP32, tile=16)
FEW = {"sequences": ("1", "2"), "block_size": ("2", "4"), "head_size": ("8", "16")}


def cases(op, count, **levels):
    within = space(op, Domain(allowed={**FEW, "reach": ("near",), **levels}))
    return [drawn_case(Drawn(seed), within) for seed in range(count)]


def memory_of(case):
    return {
        buffer.name: before_the_first_launch(case, buffer, torch.device("cpu"))
        for buffer in case.buffers
    }


def element(case, step, images, parameter, **coordinate):
    """One element, by its formula, as a Python number."""
    field = case.bound_field(step, parameter)
    byte = field.byte({axis: coordinate[axis] for axis in field.extents})
    size = DTYPES[field.dtype].itemsize
    code = int.from_bytes(bytes(images[field.buffer][byte : byte + size].tolist()), "little")
    return DTYPES[field.dtype].decode(code)


def attention_by_hand(case, step, images, sequence, row, head):
    """The first element of one output, token by token, in Python's floats."""
    scene = case.scene
    run, n = scene.batch.sequences[sequence], scene.attention.geometry.block_size
    position, kv_head = run.start + row, head // scene.queries_per_kv
    first = sum(each.length for each in scene.batch.sequences[:sequence])
    scale = DTYPES["fp32"].decode(scene.softmax_scale)
    scores, values = [], []
    for token in range(position + 1):
        if scene.window and token <= position - scene.window:
            continue
        at = {"block": run.block_ids[token // n], "token": token % n, "head": kv_head}
        scales = [1.0, 1.0]
        if DTYPES[scene.attention.cache_dtype].is_quantised:
            scales = [element(case, step, images, name, **at) for name in ("k_scale", "v_scale")]
        score = sum(
            element(case, step, images, "query", token=first + row, head=head, dim=dim)
            * element(case, step, images, "key_cache", **at, dim=dim)
            for dim in range(scene.attention.geometry.head_size)
        )
        if "q_scale" in step.fields:
            score *= element(case, step, images, "q_scale", head=0)
        score *= scales[0] * scale
        if scene.softcap:
            score = scene.softcap * math.tanh(score / scene.softcap)
        if scene.alibi:
            score += element(case, step, images, "alibi_slopes", head=head) * (token - position)
        scores.append(score)
        values.append(element(case, step, images, "value_cache", **at, dim=0) * scales[1])
    if "sinks" in step.fields:
        scores.append(element(case, step, images, "sinks", head=head))
        values.append(0.0)
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("op", ATTENTION_OPS)
def test_the_reference_is_what_the_formula_says(op):
    seen = set()
    quantised = cases(op, 3, query=("quantised",))
    for case in (*cases(op, 6), *cases(op, 2, alibi_slopes=("some",)), *quantised):
        images = memory_of(case)
        every = expect(case, images, Quantise(), EXACT).stored
        assert len(every) == len(case.steps)
        for step, stored in zip(case.steps, every, strict=True):
            row = 0
            for number, run in enumerate(case.scene.batch.sequences):
                for index in {0, run.length - 1} if run.length else ():
                    for head in {0, case.scene.num_query_heads - 1}:
                        found = float(stored.within.value[row + index, head, 0])
                        wanted = attention_by_hand(case, step, images, number, index, head)
                        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
                row += run.length
            assert row == len(stored.within.value)
        seen |= {each for each, level in facts(case).items() if level in ("some", "cuts")}
    assert {"window", "alibi_slopes"} <= seen


def test_a_number_in_the_bound_is_right_and_one_beyond_it_or_a_nan_is_wrong():
    for case in cases(UNIFIED, 6, model_dtype=("fp32",)):
        images = memory_of(case)
        expected = expect(case, images, Quantise(), EXACT)
        (stored,) = expected.stored
        value, bound = stored.within
        for factor, right in ((0.4, True), (3.0, False), (math.nan, False)):
            after = expected.images["output"].clone()
            codes = (value + factor * bound).float().view(torch.int32).to(torch.int64)
            image.write(after, stored.at, "fp32", codes & 0xFFFFFFFF)
            assert (expected.missed({"output": after}) == []) is right
            assert bool(expected.wrong("output", after).any()) is not right
        assert expected.unbounded == 0


def test_exact_numbers_have_the_bound_of_a_division_and_a_rounding():
    bounded = 0
    for case in cases(UNIFIED, 12, numbers=("exact",), model_dtype=("fp32",)):
        (stored,) = expect(case, memory_of(case), Quantise(), EXACT).stored
        value, bound = stored.within
        few = 2.0**-18 * value.abs() + 1e-12
        bounded += int((bound <= few).all())
    assert bounded == 12


def test_of_very_large_scores_no_bound_is_given():
    numerics = Numerics(EXACT, DTYPES["fp32"], is_quantised=False)
    random = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(n, 1, 64, generator=random).double() * 1e6 for n in (2, 9))
    distance, seen = torch.zeros(2, 9).double(), torch.ones(2, 9, dtype=torch.bool)
    how = Scoring(1.0, 0.0, None, None)
    values = torch.ones(9, 1, 4).double()
    bound = attend(query, keys, values, distance, seen, how, numerics).output.bound
    assert bound.isinf().all()


def test_tokens_in_front_of_a_window_are_dead_and_hold_numbers():
    for case in cases(UNIFIED, 8, window=("cuts",), phase=("decode",)):
        expected = expect(case, memory_of(case), Quantise(), EXACT)
        read, front = (
            {at for e in each if e.parameter == "key_cache" for at in e.at.flatten().tolist()}
            for each in (expected.loaded, expected.numbers)
        )
        assert front
        assert not read & front


def test_our_kernels_know_every_format_that_stands_for_code_times_scale():
    known = {TORCH_DTYPES[name] for name, dtype in DTYPES.items() if dtype.is_quantised}
    assert set(QUANTISED) == known
