"""The vllm adapters on small imitations of a source tree, one for each era of its layouts."""

import pytest
import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels import vllm, vllm_pages
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.target import TargetSpec

HEADER = """
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
if current_platform.is_rocm():
    from vllm.triton_utils import tl, triton
    def cp_mha_gather_cache(key_cache, value_cache, key, value, block_tables, k_scales, v_scales,
                            cu_seqlens_kv, token_to_batch, seq_starts, dequant, kv_cache_layout,
                            total_tokens):
        key.fill_([{formats}].index(kv_cache_layout))
        value.fill_(total_tokens if dequant else -1)
"""
SHUFFLE_WRITER = """
    def reshape_and_cache_shuffle_triton(key, value, key_cache, value_cache, slot_mapping,
                                         kv_cache_dtype, k_scales, v_scales):
        key_cache.fill_(2)
"""
FLASH = """
def triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping,
                                   kv_cache_dtype, k_scale, v_scale):
    {check}
    key_cache.fill_(1)
"""
K_FIRST = "def shape(): return (2, num_blocks, 1)\n"
BLOCKS_FIRST = "def shape(): return (num_blocks, 2, 1)\n"
PACKED = "def split(kv_cache): return kv_cache.transpose(1, 2).split(2, dim=-1)\n"


@pytest.fixture
def tree(tmp_path):
    """A function that writes an imitation and returns a function from target name to adapter."""

    def make(shape, *, shuffle=True, dequant="quantised", dense_heads=False, flash=vllm.FLASH[0]):
        formats = '"NHD", "SHUFFLE"' if shuffle else '"NHD"'
        backend = HEADER.format(formats=formats) + (SHUFFLE_WRITER if shuffle else "")
        backend += shape + f"def forward(): cp_mha_gather_cache(dequant={dequant},\n    total=1)\n"
        check = "assert head_stride == head_size" if dense_heads else "pass"
        files = {vllm.AITER_FA: backend, vllm.TRITON_ATTN: shape, flash: FLASH.format(check=check)}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def load(name, arch="gfx942"):
            return resolve(TargetSpec(f"vllm:{name}", {"vllm": str(tmp_path)}), arch=arch)

        return load

    return make


def test_without_a_source_tree_the_message_says_what_to_pass():
    with pytest.raises(NotCheckedError, match=r"needs --source vllm=DIR, a folder that contains"):
        resolve(TargetSpec("vllm:cp_mha_gather_cache"))


def test_a_tree_without_the_file_is_not_checked(tmp_path):
    with pytest.raises(NotCheckedError, match=r"no vllm/v1/attention/backends/rocm_aiter_fa\.py"):
        resolve(TargetSpec("vllm:cp_mha_gather_cache", {"vllm": str(tmp_path)}))


def test_a_tree_without_the_function_is_not_checked(tree):
    with pytest.raises(NotCheckedError, match=r"no function reshape_and_cache_shuffle_triton"):
        tree(K_FIRST, shuffle=False)("reshape_and_cache_shuffle")


@pytest.mark.parametrize(
    ("shape", "layouts", "orders"),
    [
        (K_FIRST, ("kv_first", "hybrid"), ("nhd", "shuffle")),
        (BLOCKS_FIRST, ("kv_first", "blocks_first", "hybrid"), ("nhd", "shuffle")),
        (
            PACKED,
            ("kv_first", "blocks_first", "hybrid", "content_packed"),
            ("nhd", "hnd", "shuffle"),
        ),
    ],
)
def test_the_gather_meets_the_layouts_of_its_era(tree, shape, layouts, orders):
    domain = tree(shape)("cp_mha_gather_cache").info.domain
    assert (domain.levels("layout"), domain.levels("order")) == (layouts, orders)
    assert domain.refusal({"layout": "content_packed", "order": "shuffle"})
    assert domain.levels("rows") == ("dense",)
    assert domain.refusal({"head_size": "80"})
    assert domain.refusal({"block_size": "8"})


def test_a_gather_that_knows_no_shuffle_is_given_none(tree):
    assert tree(K_FIRST, shuffle=False)("cp_mha_gather_cache").info.domain.levels("order") == (
        "nhd",
    )


def test_a_gather_that_is_never_asked_to_dequantise_gets_no_fp8(tree):
    domain = tree(K_FIRST, dequant="False")("cp_mha_gather_cache").info.domain
    assert domain.levels("cache_dtype") == ("bf16", "fp16")


@pytest.mark.parametrize(("arch", "dialect"), [("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn")])
def test_the_fp8_dialect_is_the_architectures(tree, arch, dialect):
    load = tree(BLOCKS_FIRST)
    for name in ("cp_mha_gather_cache", "reshape_and_cache_flash", "reshape_and_cache_shuffle"):
        domain = load(name, arch).info.domain
        fp8 = [level for level in domain.levels("cache_dtype") if level.startswith("e")]
        assert fp8 == [dialect]


def test_a_writer_that_asserts_dense_heads_is_given_nothing_else(tree):
    domain = tree(BLOCKS_FIRST, dense_heads=True)("reshape_and_cache_flash").info.domain
    assert domain.levels("order") == ("nhd",)
    assert "content_packed" not in domain.levels("layout")


def test_a_writer_is_given_packed_caches_where_its_backend_packs(tree):
    assert "content_packed" in tree(PACKED)("reshape_and_cache_flash").info.domain.levels("layout")


def test_the_older_place_of_the_writer_is_found(tree):
    assert tree(K_FIRST, flash=vllm.FLASH[1])("reshape_and_cache_flash").info.content


def step_tensors():
    names = (
        *("key", "value", "key_cache", "value_cache", "k_scale", "v_scale", "slot_mapping"),
        *("block_table", "cu_seqlens_kv", "token_to_batch", "seq_starts"),
    )
    return {name: torch.zeros(2) for name in names}


@pytest.mark.parametrize(("layout", "index"), [("NHD", 0), ("HND", 0), ("SHUFFLE", 1)])
def test_strided_caches_are_handed_over_as_nhd(tree, layout, index):
    tensors = step_tensors()
    scalars = {"kv_cache_layout": layout, "cache_dtype": "e4m3fnuz"}
    tree(PACKED)("cp_mha_gather_cache").call(tensors, scalars)
    assert tensors["key"].tolist() == [index, index]
    assert tensors["value"].tolist() == [2, 2]


@pytest.mark.parametrize(("layout", "writer"), [("NHD", 1), ("HND", 1), ("SHUFFLE", 2)])
def test_the_writer_is_the_one_for_the_format(tree, layout, writer):
    tensors = step_tensors()
    scalars = {"kv_cache_layout": layout, "cache_dtype": "bf16"}
    tree(PACKED)("reshape_and_cache").call(tensors, scalars)
    assert tensors["key_cache"].tolist() == [writer, writer]


def test_the_gathers_partner_writes_either_format_of_the_same_tree(tree):
    load = tree(PACKED)
    partner = load(load("cp_mha_gather_cache").info.partner.removeprefix("vllm:"))
    assert partner.info.domain.levels("order") == ("nhd", "hnd", "shuffle")
    assert partner.info.domain.refusal({"order": "shuffle", "head_size": "80"})
    assert partner.info.domain.refusal({"order": "shuffle", "layout": "content_packed"})
    assert partner.info.domain.refusal({"order": "hnd", "head_size": "80"}) is None


def test_without_the_flash_writer_the_gathers_partner_is_ours(tree, tmp_path):
    load = tree(K_FIRST)
    (tmp_path / vllm.FLASH[0]).unlink()
    assert load("cp_mha_gather_cache").info.partner == "builtin:reshape_and_cache"


def test_the_shuffle_writer_and_the_gather_are_partners(tree):
    load = tree(BLOCKS_FIRST)
    assert load("reshape_and_cache_shuffle").info.partner == "vllm:cp_mha_gather_cache"
    assert load("reshape_and_cache_shuffle").info.domain.levels("order") == ("shuffle",)


def test_writers_declare_a_division_and_where_they_divide(tree):
    for name in ("reshape_and_cache_flash", "reshape_and_cache_shuffle", "reshape_and_cache"):
        quantise = tree(BLOCKS_FIRST)(name).info.quantise
        assert quantise.quotient == "x/s"
        assert "vllm/" in quantise.source


LAYERED = "def order(): return (1, 0, 2, 3, 4, 5)\n"
DERIVES = "class Backend:\n    def indexes_kv_by_block_stride(cls): ...\n"
LAYOUTS = "class Backend:\n    def supported_kv_cache_layouts(cls): return None\n"
NAMES = "def layouts(): return (KVCacheLayout.LBHNC, KVCacheLayout.LHBNC)\n"
ALL = ("layer_first", "block_first", "head_first", "block_head_first")


@pytest.mark.parametrize(
    ("base", "backend", "nestings", "pages"),
    [
        ("", "", ("layer_first",), ("exact",)),
        ("", LAYERED, ("layer_first", "block_first"), ("exact",)),
        (DERIVES, LAYERED, ("layer_first", "block_first"), ("exact", "padded")),
        (DERIVES, "", ("layer_first",), ("exact",)),
        (LAYOUTS, "", ALL, ("exact", "padded")),
        (LAYOUTS, NAMES, ("layer_first", "head_first"), ("exact", "padded")),
    ],
)
def test_a_tree_says_how_its_pages_nest_and_whether_they_are_padded(
    tmp_path, base, backend, nestings, pages
):
    path = tmp_path / vllm_pages.BACKEND
    path.parent.mkdir(parents=True)
    path.write_text(base)
    domain = vllm_pages.pages_of(tmp_path, backend)
    assert (domain.levels("nesting"), domain.levels("page")) == (nestings, pages)
    side_by_side = {"nesting": "block_first"}
    if backend == LAYERED:
        assert domain.refusal({**side_by_side, "order": "hnd"})
        assert domain.refusal({**side_by_side, "layout": "hybrid"})


def test_no_vllm_kernel_is_given_sizes_of_v_or_scales_that_it_has_no_strides_for(tree):
    for name in ("cp_mha_gather_cache", "reshape_and_cache_flash", "reshape_and_cache_shuffle"):
        domain = tree(PACKED)(name).info.domain
        assert domain.levels("value_size") == ("same",)
        assert domain.levels("granularity") == ("tensor",)
        assert not {"x_packed", "x_packed_v"} & set(domain.levels("order"))
