"""The rules of vLLM's block and page sizes, against sizes that vLLM printed and by hand."""

import msgspec
import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import CacheLayer, State
from kvfuzz.model.page_rules import (
    MultipleOf,
    common_page,
    group_layers,
    hybrid_block_size,
    is_uniform,
    kernel_block_size,
    mixed_block_size,
)


def _attention(name="a", kind="full", **changed):
    layer = CacheLayer(name, kind, "blocks_first", 16, 16, "bf16", 2, 64, 64)
    return msgspec.structs.replace(layer, **changed)


def _latent(name="l", **changed):
    return _attention(name, "mla", form="latent", num_kv_heads=1, head_size_v=0, **changed)


def _mamba(name="m", nbytes=4096):
    return CacheLayer(name, "mamba", "states", 16, 16, states=(State("bf16", (nbytes // 2,)),))


@pytest.mark.parametrize(
    ("mamba_page", "token_bytes", "tokens", "padding"),
    [
        (1_097_728, 2048, 544, 1.49),
        (3_207_168, 4096, 784, 0.13),
        (3_207_168, 2048, 1568, 0.13),
        (2_146_304, 2048, 1056, 0.76),
        (2_146_304, 1024, 2096, 0),
        (2_146_304, 4096, 528, 0.76),
        (2_695_168, 4096, 672, 2.13),
        (1_085_440, 1024, 1072, 1.13),
        (1_085_440, 512, 2128, 0.38),
        (8_192, 2048, 16, 300),
        (3_350_528, 4096, 832, 1.71),
        (801_792, 1024, 784, 0.13),  # Qwen3.5-27B on one of four ranks
        (533_504, 1024, 528, 1.34),  # Qwen3.5-397B-A17B on one of eight
        (4_268_032, 1024, 4176, 0.19),  # the same on one, with an fp8 cache
    ],
)
def test_a_block_holds_a_state_with_the_padding_that_vllm_prints(
    mamba_page, token_bytes, tokens, padding
):
    found, page = hybrid_block_size(mamba_page, token_bytes)
    assert found == tokens
    assert page == (tokens * token_bytes if padding else 0)
    assert round(100 * (found * token_bytes / mamba_page - 1), 2) == padding


def test_a_state_that_fills_its_page_exactly_is_not_padded():
    assert hybrid_block_size(64 * 100, 100) == (64, 0)
    assert hybrid_block_size(64 * 100 - 1, 100) == (64, 6400)
    assert hybrid_block_size(64 * 100 + 1, 100) == (80, 8000)


def test_without_a_state_nothing_changes():
    assert hybrid_block_size(0, 2048, block_size=24, kernel_sizes=(64,)) == (24, 0)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"checkpoint_grid": 64}, 576),
        ({"checkpoint_grid": 48}, 576),  # lcm(16, 48) = 48: 536 tokens come to 12 of them
        ({"block_size": 1024}, 1024),  # raised only
        ({"block_size": 48}, 576),
        ({"block_size": 48, "checkpoint_grid": 64}, 576),
        ({"kernel_sizes": (64,)}, 576),
        ({"kernel_sizes": (16, 64)}, 576),  # the second backend counts behind the first
        ({"kernel_sizes": (16, 48, 64)}, 576),
        ({"kernel_sizes": (16, 128)}, 640),
        ({"mla": True}, 640),
        ({"mla": True, "block_size": 256}, 768),
    ],
)
def test_a_block_is_a_multiple_of_all_that_it_has_to_be(given, tokens):
    assert hybrid_block_size(1_097_728, 2048, **given)[0] == tokens


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hybrid_block_size(8, 0), r"token_bytes=0, expected at least 1: give a larger"),
        (lambda: hybrid_block_size(-1, 8), r"mamba_page=-1, expected at least 0"),
        (lambda: hybrid_block_size(8, 8, block_size=0), r"block_size=0, expected at least 1"),
        (lambda: hybrid_block_size(8, 8, kernel_sizes=()), r"kernel_sizes=\(\), expected a pos"),
        (lambda: hybrid_block_size(8, 8, kernel_sizes=(16, 0)), r"kernel_sizes=\(16, 0\), exp"),
        (lambda: hybrid_block_size(8, 8, checkpoint_grid=-64), r"checkpoint_grid=-64, expected"),
        (lambda: mixed_block_size(4096, 2048), r"unquantized=2048, expected at least 4096"),
        (lambda: kernel_block_size(0, [[16]]), r"block_size=0, expected at least 1"),
        (lambda: kernel_block_size(16, [[0]]), r"kernel_size=0, expected at least 1"),
        (lambda: kernel_block_size(16, [[MultipleOf(0)]]), r"kernel_size=0, expected at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(call, said):
    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.parametrize(
    ("token_bytes", "unquantized", "given", "expected"),
    [
        (2048, 2048, {}, (16, 0)),
        (2048, 4096, {}, (32, 65_536)),
        (2048, 4096, {"block_size": 64}, (64, 131_072)),
        (2048, 4096, {"block_size": 1568, "mamba_page": 3_211_264}, (1568, 3_211_264)),
        (2048, 4096, {"mamba_page": 3_211_264}, (1568, 3_211_264)),
        (1000, 4096, {"kernel_size": 64}, (320, 320_000)),
    ],
)
def test_layers_that_stay_unquantized_fit_one_kernel_block_into_the_shared_page(
    token_bytes, unquantized, given, expected
):
    assert mixed_block_size(token_bytes, unquantized, **given) == expected


def test_pages_grow_to_the_largest_by_larger_blocks():
    wide = _attention("wide", head_size=256, head_size_v=256)
    narrow, wide_again = common_page([_attention("narrow", "sliding"), wide])
    assert (narrow.block_size, narrow.kernel_block_size, narrow.page_padded) == (64, 64, 0)
    assert narrow.page_bytes == wide.page_bytes
    assert wide_again is wide


def test_a_block_that_is_split_for_kernels_keeps_its_kernel_blocks():
    narrow, _ = common_page(
        [_attention("narrow", kernel_block_size=8), _attention("wide", num_kv_heads=6)]
    )
    assert (narrow.block_size, narrow.kernel_block_size) == (48, 8)


def test_a_page_that_does_not_divide_the_largest_is_padded():
    narrow, wide = common_page([_attention("narrow"), _attention("wide", num_kv_heads=3)])
    assert (narrow.block_size, narrow.page_padded) == (16, wide.page_bytes)


def test_padded_attention_gets_more_padding_and_no_larger_block():
    padded, wide = common_page(
        [_attention("padded", page_padded=9216), _attention("wide", num_kv_heads=9)]
    )
    assert (padded.block_size, padded.page_padded) == (16, wide.page_bytes)


def test_a_state_is_padded_even_where_it_divides_the_largest_page():
    (state, _) = common_page([_mamba(nbytes=4096), _attention()])
    assert (state.block_size, state.page_bytes, state.page_stride) == (16, 4096, 8192)


def test_an_mla_page_is_scaled_or_refused():
    latent, _ = common_page([_latent(), _attention()])
    assert latent.block_size == 64
    with pytest.raises(
        UsageError,
        match=r"layer l: page of 18432 bytes, expected one that divides the largest, 32768: MLA",
    ):
        common_page([_latent(head_size=576), _attention(num_kv_heads=8)])


def test_no_layers_have_no_page_and_no_groups():
    assert common_page([]) == group_layers([]) == ()


def test_layers_of_one_kind_and_block_are_uniform_whatever_their_pages():
    pair = [_latent("latent", head_size=576), _latent("indexer", head_size=132)]
    assert is_uniform(pair)
    assert group_layers(pair) == (("latent", "indexer"),)
    assert not is_uniform([_attention(), _attention(block_size=32)])
    assert not is_uniform([_attention(), _attention(kind="sliding")])


def _model(full, sliding):
    return [
        *(_attention(f"f{index}") for index in range(full)),
        *(_attention(f"s{index}", "sliding") for index in range(sliding)),
    ]


@pytest.mark.parametrize(
    ("full", "sliding", "sizes"),
    [
        (12, 12, [12, 12]),
        (13, 12, [13, 12]),  # gpt-oss with an Eagle drafter: 13 < 1.5 * 12
        (10, 14, [10, 14]),
        (10, 15, [10, 8, 7]),  # 15 is 1.5 * 10
        (5, 29, [5, 5, 5, 5, 5, 5, 4]),
        (10, 52, [10, 9, 9, 9, 9, 8, 8]),
        (3, 2, [2, 1, 2]),
    ],
)
def test_a_group_is_as_large_as_the_smallest_bucket_or_the_largest_if_close(full, sliding, sizes):
    assert [len(group) for group in group_layers(_model(full, sliding))] == sizes


def test_buckets_are_dealt_out_in_turns():
    assert group_layers(_model(2, 5)) == (("f0", "f1"), ("s0", "s3"), ("s1", "s4"), ("s2",))


def test_layers_of_one_kind_and_two_formats_are_two_buckets():
    groups = group_layers([_attention("a"), _attention("b", block_size=32), _attention("c")])
    assert groups == (("a",), ("c",), ("b",))


def test_a_layer_that_shares_a_cache_follows_its_target_behind_the_owners():
    shared = _attention("x", "sliding", shares="s1")
    assert group_layers([shared, *_model(2, 2)]) == (("f0", "f1"), ("s0", "s1", "x"))


@pytest.mark.parametrize("target", ["nothing", "x"])
def test_a_layer_shares_only_a_cache_that_another_owns(target):
    layers = [_attention("a"), _attention("x", shares="a"), _attention("y", shares=target)]
    with pytest.raises(UsageError, match=f"layer y: shares='{target}', expected a layer that own"):
        group_layers(layers)


LISTED = (16, 32, 64)


@pytest.mark.parametrize(
    ("tokens", "kernel"),
    [(784, 16), (528, 16), (544, 32), (1056, 32), (576, 64), (1568, 32), (2096, 16), (64, 64)],
)
def test_kernels_index_the_largest_listed_block_that_divides_the_managers(tokens, kernel):
    assert kernel_block_size(tokens, [LISTED]) == kernel


@pytest.mark.parametrize("tokens", [784, 528, 544, 16])
def test_a_block_stays_whole_where_every_backend_takes_it(tokens):
    assert kernel_block_size(tokens, [[MultipleOf(16)]]) == tokens
    assert kernel_block_size(tokens, [[MultipleOf(16)], [128, MultipleOf(8)]]) == tokens
    assert kernel_block_size(tokens, []) == tokens


def test_all_backends_have_to_take_the_same_kernel_block():
    assert kernel_block_size(576, [LISTED, [MultipleOf(16)]]) == 64
    assert kernel_block_size(576, [LISTED, [16, 32]]) == 32
    assert kernel_block_size(576, [LISTED, [MultipleOf(16)], [16]]) == 16


@pytest.mark.parametrize(
    ("tokens", "backends"), [(24, [LISTED]), (64, [[64], [32]]), (40, [[MultipleOf(16)]])]
)
def test_a_block_that_no_listed_size_divides_is_refused(tokens, backends):
    with pytest.raises(UsageError, match=f"block_size={tokens}: no kernel block size divides it"):
        kernel_block_size(tokens, backends)
