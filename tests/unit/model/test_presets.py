"""The presets are the models: counts, sizes that vLLM prints, and plans that engines could mean."""

from collections import Counter

import msgspec
import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model import plan_check
from kvfuzz.model.cache_plan import FORMS, Allocation, CachePlan, Placement
from kvfuzz.model.page_rules import group_layers, kernel_block_size
from kvfuzz.model.presets import Preset, cache_layers, preset_named, presets

# By key: layers of the model, and layers that own a cache by kind.
COUNTS = {
    "whisper-large-v3": (32, {"full": 32, "cross": 32}),
    "nemotron-parse": (10, {"full": 10, "cross": 10}),
    "bart-large": (12, {"full": 12, "cross": 12}),
    "qwen3-next-80b-a3b": (48, {"full": 12, "mamba": 36}),
    "qwen3.5-27b": (64, {"full": 16, "mamba": 48}),
    "qwen3.5-35b-a3b": (40, {"full": 10, "mamba": 30}),
    "qwen3.5-4b": (32, {"full": 8, "mamba": 24}),
    "qwen3.5-397b-a17b": (60, {"full": 15, "mamba": 45}),
    "jamba-1.5-mini": (32, {"full": 4, "mamba": 28}),
    "nemotron-h-8b": (52, {"full": 4, "mamba": 24}),
    "nemotron-nano-9b-v2": (56, {"full": 4, "mamba": 27}),
    "nemotron-3-nano-30b-a3b": (52, {"full": 6, "mamba": 23}),
    "granite-4.0-h-small": (40, {"full": 4, "mamba": 36}),
    "falcon-h1-7b": (44, {"full": 44, "mamba": 44}),
    "falcon-h1-0.5b": (36, {"full": 36, "mamba": 36}),
    "zamba2-7b": (81, {"full": 13, "mamba": 81}),
    "lfm2-2.6b": (30, {"full": 8, "mamba": 22}),
    "gemma-3n-e4b": (35, {"full": 4, "sliding": 16}),
    "gemma-3n-e2b": (30, {"full": 4, "sliding": 16}),
    "gemma-4-e2b": (35, {"full": 3, "sliding": 12}),
    "gemma-4-26b-a4b": (30, {"full": 5, "sliding": 25}),
    "gemma-3-4b": (34, {"full": 5, "sliding": 29}),
    "gemma-3-27b": (62, {"full": 10, "sliding": 52}),
    "gpt-oss-20b": (24, {"full": 12, "sliding": 12}),
    "mistral-7b-v0.1": (32, {"sliding": 32}),
    "deepseek-v3": (61, {"mla": 61}),
    "deepseek-v3.2": (61, {"mla": 2 * 61}),
    "kimi-k2": (61, {"mla": 61}),
    "glm-4.7-flash": (47, {"mla": 47}),
    "falcon-7b": (32, {"full": 32}),
    "llama-3.1-8b": (32, {"full": 32}),
    "llama-4-scout": (48, {"full": 12, "chunked": 36}),
}
INCOMPLETE = ["falcon-h1-0.5b"]
COMPLETE = [key for key in COUNTS if key not in INCOMPLETE]

FULL_AT = {
    "nemotron-h-8b": [7, 18, 29, 40],
    "nemotron-nano-9b-v2": [14, 21, 30, 39],
    "nemotron-3-nano-30b-a3b": [5, 12, 19, 26, 33, 42],
    "jamba-1.5-mini": [4, 12, 20, 28],
    "granite-4.0-h-small": [5, 15, 25, 35],
    "zamba2-7b": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77],
    "lfm2-2.6b": [2, 5, 9, 13, 17, 21, 24, 27],
    "qwen3-next-80b-a3b": list(range(3, 48, 4)),
    "llama-4-scout": list(range(3, 48, 4)),
    "gemma-3n-e4b": list(range(4, 35, 5)),
    "gemma-4-26b-a4b": [5, 11, 17, 23, 29],
    "gemma-3-27b": list(range(5, 60, 6)),
    "gpt-oss-20b": list(range(1, 24, 2)),
}


def test_the_catalogue_has_the_models():
    assert list(presets()) == list(COUNTS)
    assert len({preset.model for preset in presets().values()}) == len(COUNTS)


@pytest.mark.parametrize("key", COUNTS)
def test_a_preset_has_as_many_caches_of_each_kind_as_the_model(key):
    preset = preset_named(key)
    count, kinds = COUNTS[key]
    assert len(preset.layers) == count
    if key in INCOMPLETE:
        return
    layers = cache_layers(preset)
    assert Counter(layer.kind for layer in layers if not layer.shares) == kinds
    assert len([layer for layer in layers if layer.shares]) == preset.shared


@pytest.mark.parametrize(("key", "indices"), FULL_AT.items())
def test_full_attention_is_where_the_model_has_it(key, indices):
    layers = preset_named(key).layers
    assert [index for index, letters in enumerate(layers) if "f" in letters] == indices


def test_exactly_these_presets_are_incomplete_and_say_why():
    assert [key for key, preset in presets().items() if preset.incomplete] == INCOMPLETE
    with pytest.raises(
        UsageError, match=r"Falcon-H1-0\.5B-Instruct is incomplete: .*mamba_d_ssm.*choose another"
    ):
        cache_layers(preset_named("falcon-h1-0.5b"))


@pytest.mark.parametrize("key", COUNTS)
def test_a_preset_says_where_its_numbers_come_from(key):
    preset = preset_named(key)
    assert 1 <= len(preset.sources) <= 2
    assert ("s" in preset.pattern) == (preset.window > 0)
    assert ("c" in preset.pattern) == (preset.chunk > 0)
    assert ("m" in preset.pattern) == (preset.state != "")


@pytest.mark.parametrize(
    ("key", "given", "tokens", "padding"),
    [
        ("qwen3-next-80b-a3b", {}, 544, 1.49),
        ("qwen3-next-80b-a3b", {"align": True}, 576, 7.46),
        ("qwen3-next-80b-a3b", {"cache_dtype": "e4m3fn"}, 1072, 0),
        ("qwen3.5-27b", {}, 784, 0.13),
        ("qwen3.5-27b", {"cache_dtype": "e4m3fn"}, 1568, 0.13),
        ("qwen3.5-27b", {"num_spec": 7}, 832, 1.71),
        ("qwen3.5-27b", {"num_spec": 7, "align": True}, 832, 1.71),
        ("qwen3.5-27b", {"num_spec": 3, "cache_dtype": "e4m3fn"}, 1600, 0.25),
        ("qwen3.5-35b-a3b", {}, 1056, 0.76),
        ("qwen3.5-35b-a3b", {"cache_dtype": "e4m3fn"}, 2096, 0),
        ("qwen3.5-4b", {}, 528, 0.76),
        ("qwen3.5-4b", {"cache_dtype": "e4m3fnuz"}, 1056, 0.76),
        ("qwen3.5-397b-a17b", {}, 2096, 0.58),
        ("qwen3.5-397b-a17b", {"cache_dtype": "e4m3fn"}, 4176, 0.19),
        ("jamba-1.5-mini", {}, 80, 5.26),
        ("jamba-1.5-mini", {"state_dtype": "fp32"}, 144, 2.86),
        ("jamba-1.5-mini", {"num_spec": 7}, 80, 5.26),  # Mamba-1 does not speculate
        ("nemotron-h-8b", {}, 1040, 0.1),
        ("nemotron-h-8b", {"state_dtype": "bf16"}, 528, 0.19),
        ("nemotron-nano-9b-v2", {}, 1312, 1.08),
        ("nemotron-nano-9b-v2", {"state_dtype": "bf16"}, 672, 2.13),
        ("nemotron-3-nano-30b-a3b", {}, 2096, 0.58),
        ("nemotron-3-nano-30b-a3b", {"state_dtype": "fp16"}, 1072, 1.13),
        ("nemotron-3-nano-30b-a3b", {"state_dtype": "fp16", "cache_dtype": "e5m2"}, 2128, 0.38),
        ("granite-4.0-h-small", {}, 528, 0.69),
        ("granite-4.0-h-small", {"align": True}, 528, 0.69),  # only GDN has a grid
        ("falcon-h1-7b", {}, 1568, 0.71),
        ("zamba2-7b", {}, 48, 43.05),
        ("lfm2-2.6b", {}, 16, 300),
        ("lfm2-2.6b", {"block_size": 64}, 64, 1500),
    ],
)
def test_a_hybrid_has_the_block_and_the_padding_that_vllm_gives_it(key, given, tokens, padding):
    layers = cache_layers(preset_named(key), **given)
    assert {layer.block_size for layer in layers} == {tokens}
    (page,) = {layer.page_stride for layer in layers}
    (state,) = {layer.page_bytes for layer in layers if layer.kind == "mamba"}
    assert round(100 * (page / state - 1), 2) == padding
    assert {layer.page_padded for layer in layers if layer.kind == "mamba"} == {
        page if padding else 0
    }
    assert not any(layer.page_padded for layer in layers if layer.is_attention)


@pytest.mark.parametrize(
    ("key", "given", "kernel"),
    [
        ("qwen3.5-27b", {}, 16),
        ("qwen3.5-4b", {}, 16),
        ("qwen3-next-80b-a3b", {}, 32),
        ("qwen3.5-35b-a3b", {}, 32),
        ("qwen3-next-80b-a3b", {"align": True}, 64),
    ],
)
def test_a_hybrids_block_is_split_for_backends_that_list_their_blocks(key, given, kernel):
    tokens = cache_layers(preset_named(key), **given)[0].block_size
    assert kernel_block_size(tokens, [(16, 32, 64)]) == kernel


@pytest.mark.parametrize(
    ("key", "blocks", "page"),
    [
        ("gemma-4-e2b", {"full": 16, "sliding": 32}, 32_768),
        ("gemma-4-26b-a4b", {"full": 32, "sliding": 16}, 131_072),
        ("llama-3.1-8b", {"full": 16}, 65_536),
        ("falcon-7b", {"full": 16}, 4_096),
        ("deepseek-v3", {"mla": 64}, 73_728),
        ("whisper-large-v3", {"full": 16, "cross": 16}, 81_920),
    ],
)
def test_attention_of_two_widths_gets_one_page_by_its_blocks(key, blocks, page):
    layers = cache_layers(preset_named(key))
    assert {layer.kind: layer.block_size for layer in layers} == blocks
    assert {layer.page_stride for layer in layers} == {page}


def _plan(layers):
    owners = [layer for layer in layers if not layer.shares]
    return CachePlan(
        num_blocks=2,
        layers=layers,
        groups=group_layers(layers),
        allocations=tuple(Allocation(each.name, 2 * each.page_stride) for each in owners),
        placements=tuple(
            Placement(each.name, (each.name,), block_stride=each.page_stride) for each in owners
        ),
    )


@pytest.mark.parametrize("form", FORMS[:4])
@pytest.mark.parametrize("key", COMPLETE)
def test_a_preset_makes_a_plan_that_an_engine_could_mean(key, form):
    preset = preset_named(key)
    layers = cache_layers(preset, form=form, cache_dtype="e4m3fn")
    plan_check.check(_plan(layers))
    own = {"mla": "latent", "mamba": "states"}
    assert all(layer.form == own.get(layer.kind, form) for layer in layers)
    strides = {layer.page_stride for layer in layers}
    assert len(strides) == (2 if key == "deepseek-v3.2" else 1)


@pytest.mark.parametrize(
    ("key", "full", "sliding"),
    [
        ("gemma-3n-e4b", 19, 18),
        ("gemma-3n-e2b", 19, 18),
        ("gemma-4-e2b", 14, 13),
    ],
)
def test_the_last_layers_read_the_last_cache_of_their_kind(key, full, sliding):
    layers = {layer.name: layer for layer in cache_layers(preset_named(key))}
    first = max(full, sliding) + 1
    target = {"full": f"layers.{full}.self_attn", "sliding": f"layers.{sliding}.self_attn"}
    for index, layer in enumerate(layers.values()):
        assert layer.shares == (target[layer.kind] if index >= first else "")
        if layer.shares:
            assert layers[layer.shares].kind == layer.kind
            assert not layers[layer.shares].shares


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("whisper-large-v3", {"full": [32], "cross": [32]}),
        ("qwen3-next-80b-a3b", {"full": [12], "mamba": [12] * 3}),
        ("nemotron-nano-9b-v2", {"full": [4], "mamba": [4] * 6 + [3]}),
        ("zamba2-7b", {"full": [13], "mamba": [12] * 4 + [11] * 3}),
        ("lfm2-2.6b", {"full": [8], "mamba": [8, 7, 7]}),
        ("gemma-4-e2b", {"full": [7], "sliding": [19, 3, 3, 3]}),
        ("mistral-7b-v0.1", {"sliding": [32]}),
        ("deepseek-v3.2", {"mla": [122]}),
        ("llama-4-scout", {"full": [12], "chunked": [12] * 3}),
    ],
)
def test_the_layers_make_the_groups_that_vllm_makes(key, sizes):
    layers = {layer.name: layer for layer in cache_layers(preset_named(key))}
    found = {}
    for group in group_layers(layers.values()):
        found.setdefault(layers[group[0]].kind, []).append(len(group))
    assert {kind: sorted(each, reverse=True) for kind, each in found.items()} == sizes


def test_layers_are_named_for_their_place_in_the_model():
    names = [layer.name for layer in cache_layers(preset_named("zamba2-7b"))]
    assert names[6:8] == ["layers.6.self_attn", "layers.6.mamba"]
    names = [layer.name for layer in cache_layers(preset_named("nemotron-h-8b"))]
    assert names[:5] == [
        "layers.0.mamba",
        "layers.2.mamba",
        "layers.4.mamba",
        "layers.6.mamba",
        "layers.7.self_attn",
    ]
    names = [layer.name for layer in cache_layers(preset_named("whisper-large-v3"))]
    assert names[:2] == ["layers.0.self_attn", "layers.0.cross_attn"]


def test_the_indexers_rows_have_132_bytes_whatever_the_format():
    for cache_dtype in ("bf16", "e4m3fnuz"):
        latent, indexer = cache_layers(preset_named("deepseek-v3.2"), cache_dtype=cache_dtype)[:2]
        assert (latent.head_size, latent.head_size_v, latent.cache_dtype) == (576, 0, cache_dtype)
        assert indexer.name == "layers.0.indexer"
        assert indexer.page_bytes == 64 * 132


def test_a_state_has_the_models_format_and_the_temporal_part_its_own():
    states = preset_named("qwen3.5-27b").states(num_spec=2)
    assert [(state.dtype, state.shape) for state in states] == [
        ("bf16", (5, 10240)),
        ("fp32", (48, 128, 128)),
    ]
    assert preset_named("jamba-1.5-mini").states("fp16", 2)[1].dtype == "fp16"
    assert preset_named("lfm2-2.6b").states("fp32", 2) == preset_named("lfm2-2.6b").states()
    assert preset_named("llama-3.1-8b").states("fp32", 2) == ()


def test_a_model_without_states_does_not_notice_what_they_are_asked_for():
    plain = preset_named("llama-3.1-8b")
    assert cache_layers(plain, state_dtype="fp32", align=True, num_spec=3) == cache_layers(plain)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("qwen3-next", r"no preset 'qwen3-next'; did you mean qwen3-next-80b-a3b\?"),
        ("llama-3.1", r"no preset 'llama-3\.1'; did you mean llama-3\.1-8b\?"),
    ],
)
def test_an_unknown_preset_names_the_nearest_one(key, said):
    with pytest.raises(UsageError, match=said):
        preset_named(key)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_dtype": "e4m3"}, r"cache_dtype='e4m3'; did you mean e4m3fn\?"),
        ({"state_dtype": "float32"}, r"state_dtype='float32'; did you mean fp32\?"),
        ({"form": "latent"}, r"form='latent'; "),
        ({"form": "block_first"}, r"form='block_first'; did you mean blocks_first\?"),
        ({"num_spec": -1}, r"num_spec=-1, block_size=0, expected at least 0"),
        ({"block_size": -16}, r"num_spec=0, block_size=-16, expected at least 0"),
    ],
)
def test_what_no_cache_has_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        cache_layers(preset_named("qwen3.5-27b"), **given)


@pytest.mark.parametrize("pattern", ["12*", "3f", "f()", "12*q", "(f", "(f-)"])
def test_a_pattern_that_is_none_is_refused(pattern):
    preset = msgspec.structs.replace(preset_named("llama-3.1-8b"), pattern=pattern)
    with pytest.raises(UsageError, match=r"meta-llama/Llama-3\.1-8B: pattern=.*expected letters"):
        _ = preset.layers


@pytest.mark.parametrize("changed", [{"colour": 1}, {"dtype": "fp8"}, {"heads": {"full": [1]}}])
def test_fields_that_no_preset_has_are_refused(changed):
    table = {"model": "m", "pattern": "f", "num_attention_heads": 1, "sources": [], "heads": {}}
    msgspec.convert(table, Preset)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table | changed, Preset)
