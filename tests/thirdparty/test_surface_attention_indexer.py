"""The DSA indexer of vLLM scores every cached key: rocm_fp8_paged_mqa_logits_triton.

A page is the fp8 keys of its slots and then their fp32 scales. The score of a key is the sum over
heads of w max(0, q k), times the key's scale.
"""

import pytest
import torch
from attention_batches import FP8, Shape, allocate
from attention_reference import FP32

pytestmark = pytest.mark.thirdparty

FILE = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
RELEASES = ("0.33.0",)
HEADS, SIZE, PAGE, MAX_LEN = 16, 32, 64, 256
NEXT_N = {"decode": 1, "speculative": 2}
CASES = [
    pytest.param(variant, release, id=f"fp8_paged_mqa_logits-{variant}-{release}")
    for variant in NEXT_N
    for release in RELEASES
]


def _launch(on, module, next_n):
    sequences = ((70, next_n), (130 - next_n, next_n), (128 - next_n, next_n), (5, next_n))
    batch = allocate(on, Shape(sequences, block_size=PAGE))
    make = torch.Generator().manual_seed(0)
    pages = torch.full((len(batch.key_cache), PAGE * (SIZE + 4)), 0xFF, dtype=torch.uint8)
    keys, scales = [], []
    for mine, length in zip(batch.blocks, map(sum, sequences), strict=True):
        key = torch.randn((length, SIZE), generator=make).to(FP8)
        scale = 0.5 + torch.rand((length, 1), generator=make)
        keys.append(key.double())
        scales.append(scale.double())
        position = torch.arange(length)[:, None]
        page, slot = torch.tensor(mine)[position // PAGE], position % PAGE
        pages[page, slot * SIZE + torch.arange(SIZE)] = key.view(torch.uint8)
        where = PAGE * SIZE + slot * 4 + torch.arange(4)
        pages[page, where] = scale.view(torch.uint8)
    rows = len(sequences) * next_n
    query = torch.randn((len(sequences), next_n, HEADS, SIZE), generator=make).to(FP8)
    weights = torch.randn((rows, HEADS), generator=make)
    logits = module.rocm_fp8_paged_mqa_logits_triton(
        on.given("indexer_query", query),
        on.given("pages", pages).view(len(pages), PAGE, 1, SIZE + 4),
        on.given("weights", weights),
        batch.seq_lens,
        batch.block_table,
        MAX_LEN,
    )
    return query.double().flatten(0, 1), weights.double(), keys, scales, logits


def _scores(query, weights, keys, scales):
    """Scores `[keys]` of a query row, and how far off fp32 sums may be."""
    products = keys @ query.T
    score = (products.clamp(min=0) * weights).sum(-1) * scales[:, 0]
    size = ((keys.abs() @ query.abs().T) * weights.abs()).sum(-1) * scales[:, 0]
    return score, (SIZE + HEADS + 4) * FP32 * size


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        module = tree(release).load(FILE)
        return launcher.once((variant, release), lambda on: _launch(on, module, NEXT_N[variant]))

    return make


@pytest.mark.parametrize(("variant", "release"), CASES)
def test_it_scores_every_key_that_a_query_token_sees(outcome, variant, release):
    done = outcome(variant, release)
    assert done.strays == []
    assert done.changed == []
    query, weights, keys, scales, logits = done.result
    next_n = NEXT_N[variant]
    for row, got in enumerate(logits.double()):
        mine = row // next_n
        seen = len(keys[mine]) - next_n + row % next_n + 1
        score, off = _scores(query[row], weights[row], keys[mine][:seen], scales[mine][:seen])
        assert ((got[:seen] - score).abs() <= off).all()
        # The kernel writes nothing else: callers mask, or fill before.
        assert got[seen:].isnan().all()


@pytest.mark.parametrize(("variant", "release"), CASES)
def test_a_key_or_scale_read_from_another_slot_would_show(outcome, variant, release):
    query, weights, keys, scales, logits = outcome(variant, release).result
    last = NEXT_N[variant] - 1
    for mine, (key, scale) in enumerate(zip(keys, scales, strict=True)):
        row = mine * (last + 1) + last
        got = logits[row, : len(key)].double()
        for wrong in ((key.roll(1, 0), scale), (key, scale.roll(1, 0))):
            score, off = _scores(query[row], weights[row], *wrong)
            assert ((got - score).abs() > off).all()
