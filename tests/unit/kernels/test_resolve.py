import sys
from types import SimpleNamespace

import pytest

from kvfuzz.errors import NotCheckedError, UsageError
from kvfuzz.kernels import catalogue
from kvfuzz.kernels import resolve as resolving
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.mutants.patches import BUILTIN
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import AXIS, Domain
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec
from kvfuzz.model.vocabulary import NESTINGS, PAGES

WRITER = "def write(key, value, key_cache, value_cache, slot_mapping): pass\n"
INFO = TargetInfo("theirs", "gather_cache", Domain(), Quantise(), "", "0" * 16)


def theirs(spec):
    return Adapter(INFO, lambda tensors, scalars: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "builtin:gather_cach",
            r"no target 'builtin:gather_cach'; did you mean builtin:gather_cac",
        ),
        ("mutant:one_haed", r"no mutant 'one_haed'; did you mean one_head\?"),
        ("vllm:cp_mha_gather", r"did you mean vllm:cp_mha_gather_cache\?"),
        ("gather", r"a function in a file is path/to/file\.py:function"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_known_one(name, message):
    with pytest.raises(UsageError, match=message):
        resolve(TargetSpec(name))


@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
def test_built_in_targets_are_each_others_partners(op):
    partner = resolve(TargetSpec(f"builtin:{op}")).info.partner
    assert resolve(TargetSpec(partner)).info.partner == f"builtin:{op}"


def test_a_mutant_claims_what_the_kernel_it_breaks_claims_but_is_other_code():
    mutant = resolve(TargetSpec("mutant:one_head")).info
    original = resolve(TargetSpec("builtin:gather_cache")).info
    assert (mutant.domain, mutant.partner) == (original.domain, original.partner)
    assert mutant.content != original.content


def test_fnuz_formats_are_claimed_on_cdna3_alone():
    claimed = {
        arch: resolve(TargetSpec("builtin:gather_cache"), arch=arch).info.domain.levels(
            "cache_dtype"
        )
        for arch in ("gfx942", "gfx950", "sm_90")
    }
    assert {"e4m3fnuz", "e5m2fnuz"} < set(claimed["gfx942"])
    assert (
        claimed["gfx950"]
        == claimed["sm_90"]
        == (
            "fp32",
            "bf16",
            "fp16",
            "e4m3fn",
            "e5m2",
            "int8",
        )
    )


def test_another_op_than_the_targets_own_is_refused():
    with pytest.raises(UsageError, match="--op gather_cache: builtin:reshape_and_cache is a resh"):
        resolve(TargetSpec("builtin:reshape_and_cache", op="gather_cache"))


def test_missing_conch_says_how_to_install_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "conch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "conch", None)
    with pytest.raises(NotCheckedError, match=r"pip install 'kvfuzz\[thirdparty\]'"):
        resolve(TargetSpec("conch:reshape_and_cache"))


def test_a_copy_of_a_built_in_file_is_a_target(tmp_path):
    copy = tmp_path / "k.py"
    copy.write_bytes((BUILTIN / "gather_cache.py").read_bytes())
    info = resolve(TargetSpec(f"{copy}:gather_cache")).info
    assert (info.name, info.op) == ("file:gather_cache", "gather_cache")
    assert info.partner == "builtin:reshape_and_cache"
    assert info.content == resolve(TargetSpec("builtin:gather_cache")).info.content
    assert str(tmp_path) not in repr(info)


def test_a_file_targets_op_follows_from_its_parameters(tmp_path):
    (tmp_path / "k.py").write_text(WRITER)
    assert resolve(TargetSpec(f"{tmp_path}/k.py:write")).info.op == "reshape_and_cache"


def test_the_op_that_is_asked_for_wins(tmp_path):
    (tmp_path / "k.py").write_text(WRITER)
    with pytest.raises(UsageError, match=r"write as gather_cache: .*'slot_mapping' is not known"):
        resolve(TargetSpec(f"{tmp_path}/k.py:write", op="gather_cache"))


def test_an_unknown_op_is_answered_with_the_nearest_known_one(tmp_path):
    (tmp_path / "k.py").write_text(WRITER)
    with pytest.raises(UsageError, match=r"gather_cash: no such op; did you mean gather_cache\?"):
        resolve(TargetSpec(f"{tmp_path}/k.py:write", op="gather_cash"))


def test_parameters_that_fit_no_op_ask_for_one(tmp_path):
    (tmp_path / "k.py").write_text("def attend(query): pass\n")
    with pytest.raises(
        UsageError,
        match=r"its parameters fit 0 ops, say which with --op reshape_and_cache\|gather_cache\|.*"
        r"\(as copy_states: required parameter 'query' is not known, takes no state_0",
    ):
        resolve(TargetSpec(f"{tmp_path}/k.py:attend"))


def test_parameters_that_fit_several_ops_ask_for_one(tmp_path):
    (tmp_path / "k.py").write_text(
        "def both(key, value, key_cache, value_cache, slot_mapping=None, block_table=None, "
        "cu_seqlens_kv=None): pass\n"
    )
    with pytest.raises(UsageError, match=r"fit 2 ops, .*\(reshape_and_cache, gather_cache\)"):
        resolve(TargetSpec(f"{tmp_path}/k.py:both"))


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match=r"target no/such\.py:f: no file no/such\.py"):
        resolve(TargetSpec("no/such.py:f"))


def test_a_file_that_raises_on_import_is_not_checked(tmp_path):
    (tmp_path / "k.py").write_text("import nothing_of_this_name\n")
    before = set(sys.modules)
    with pytest.raises(
        NotCheckedError, match=r"k\.py does not import: ModuleNotFoundError: No mod"
    ):
        resolve(TargetSpec(f"{tmp_path}/k.py:f"))
    assert set(sys.modules) == before


def test_a_misspelt_function_is_answered_with_the_nearest_one(tmp_path):
    (tmp_path / "k.py").write_text(WRITER)
    with pytest.raises(UsageError, match=r"no function 'wirte'; did you mean write\?"):
        resolve(TargetSpec(f"{tmp_path}/k.py:wirte"))


def test_a_kernel_is_no_target_but_its_launcher_is():
    with pytest.raises(UsageError, match="name the Python function that launches it"):
        resolve(TargetSpec(f"{BUILTIN}/gather_cache.py:gather_cache_kernel"))


def test_a_seeds_file_target_asks_for_the_file_again():
    with pytest.raises(NotCheckedError, match=r"pass it again as path/to/file\.py:function"):
        resolve(TargetSpec("file:gather_cache"))


def test_an_entry_point_adds_a_target(monkeypatch):
    entry = SimpleNamespace(name="theirs", value="their.module:make", load=lambda: theirs)
    for module in (catalogue, resolving):
        monkeypatch.setattr(
            module,
            "entry_points",
            lambda group, name=None: [entry] if name in (None, entry.name) else [],
        )
    assert resolve(TargetSpec("theirs")).info == INFO
    assert catalogue.list_targets()[-1] == ("theirs", "", "their.module:make")
    with pytest.raises(UsageError, match=r"did you mean theirs\?"):
        resolve(TargetSpec("their"))


def test_an_unknown_quotient_of_a_file_is_refused(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(
        "KVFUZZ_QUOTIENT = 's/x'\n"
        "def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping): ...\n"
    )
    with pytest.raises(UsageError, match=r"KVFUZZ_QUOTIENT='s/x', expected x/s or x\*\(1/s\)"):
        resolve(TargetSpec(f"{path}:reshape_and_cache"))


def test_dead_bytes_of_a_file_are_nan_or_finite(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(
        "KVFUZZ_DEAD = 'zero'\n"
        "def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping): ...\n"
    )
    with pytest.raises(UsageError, match=r"KVFUZZ_DEAD='zero', expected nan or finite"):
        resolve(TargetSpec(f"{path}:reshape_and_cache"))


def _file_domain(tmp_path, declared):
    path = tmp_path / "k.py"
    path.write_text(
        f"KVFUZZ_DOMAIN = {declared!r}\n"
        "def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping): ...\n"
    )
    return resolve(TargetSpec(f"{path}:reshape_and_cache")).info.domain


def test_a_file_takes_the_conventional_and_every_stride(tmp_path):
    domain = _file_domain(tmp_path, "")
    assert domain.levels("order") == ("nhd", "hnd", "shuffle")
    assert domain.levels("value_size") == ("same",)
    assert domain.levels("granularity") == ("tensor",)
    assert domain.levels("nesting") == NESTINGS
    assert domain.levels("page") == PAGES


def test_a_file_takes_what_it_declares_instead(tmp_path):
    domain = _file_domain(tmp_path, "order=nhd|x_packed, granularity=head, cache_dtype=e4m3fnuz")
    assert domain.levels("order") == ("nhd", "x_packed")
    assert domain.levels("granularity") == ("head",)
    assert domain.levels("cache_dtype") == ("e4m3fnuz",)
    assert domain.levels("value_size") == ("same",)
    assert "KVFUZZ_DOMAIN" in domain.source


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("ordr=nhd", r"KVFUZZ_DOMAIN: 'ordr=nhd': no axis 'ordr'; did you mean order\?"),
        ("order=x_paked", r"KVFUZZ_DOMAIN: .*no level 'x_paked'; did you mean x_packed"),
        ("order", r"KVFUZZ_DOMAIN: 'order': expected AXIS=LEVEL"),
        (3, r"KVFUZZ_DOMAIN=3, expected text, AXIS=LEVEL\|LEVEL"),
    ],
)
def test_a_domain_that_cannot_be_made_out_is_refused_with_what_is_known(tmp_path, declared, said):
    with pytest.raises(UsageError, match=said) as error:
        _file_domain(tmp_path, declared)
    assert "--where" not in str(error.value)
    assert "\n" not in str(error.value)


def test_formats_that_triton_lacks_are_refused_with_those_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("kvfuzz.kernels.files.formats_of", lambda arch: ("fp32", "bf16"))
    with pytest.raises(UsageError, match=r"KVFUZZ_DOMAIN: on gfx942 Triton has fp32\|bf16"):
        _file_domain(tmp_path, "cache_dtype=e5m2")


QUANT = "kernels/builtin/per_token_head_quant.py"


def test_a_file_that_computes_scales_does_as_ours_or_as_it_declares(edited):
    plain = resolve(TargetSpec(edited(QUANT, "per_token_head_quant"))).info
    assert plain.op == "per_token_head_quant"
    assert (plain.quantise.rounding, plain.quantise.scale_floor) == ("half_away_fp32", 1e-6)
    assert plain.domain.levels("granularity") == AXIS["granularity"].levels
    said = 'KVFUZZ_QUANTISE = {"rounding": "half_even", "scale_floor": 0.5}\nLARGEST = {'
    other = resolve(TargetSpec(edited(QUANT, "per_token_head_quant", ("LARGEST = {", said)))).info
    assert (other.quantise.rounding, other.quantise.scale_floor) == ("half_even", 0.5)
    assert other.quantise.largest == plain.quantise.largest


@pytest.mark.parametrize(
    ("declared", "says"),
    [("{'floor': 1}", "floor"), ("3", "not a mapping"), ("{'rounding': 'up'}", "Invalid enum")],
)
def test_a_declaration_that_is_no_quantise_is_refused(edited, declared, says):
    said = f"KVFUZZ_QUANTISE = {declared}\nLARGEST = {{"
    target = edited(QUANT, "per_token_head_quant", ("LARGEST = {", said))
    with pytest.raises(UsageError, match=rf"KVFUZZ_QUANTISE=.*expected a dict of quotient.*{says}"):
        resolve(TargetSpec(target))
