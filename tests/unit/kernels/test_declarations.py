"""What a file declares of its kernel: what is impossible gets one clear error."""

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.target import TargetSpec

KERNEL = """
def unified_attention(query, key_cache, value_cache, output, block_table, seq_lens,
                      query_start_loc):
    pass


"""


def _resolved(tmp_path, declared):
    path = tmp_path / "k.py"
    path.write_text(KERNEL + declared)
    return resolve(TargetSpec(f"{path}:unified_attention")).info


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ({"tile": 0}, "tile=0"),
        ({"tile": -16}, "tile=-16"),
        ({"tile": 1 << 30}, "tile="),
        ({"merged_part": -4}, "merged_part=-4"),
        ({"weights_scale": {"e4m3fnuz": 0.0}}, "weights_scale=0.0"),
        ({"weights_scale": {"e4m3fnuz": float("nan")}}, "weights_scale=nan"),
        ({"weights_scale": {"bf16": 448.0}}, "'bf16'"),
        ({"weights": "fp8"}, "weights"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_an_impossible_precision_is_named(tmp_path, precision, names):
    text = repr(precision).replace("nan", "float('nan')")
    with pytest.raises(UsageError, match="KVFUZZ_PRECISION") as caught:
        _resolved(tmp_path, f"KVFUZZ_PRECISION = {text}\n")
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("domain", "names"),
    [("num_tokens=1", "num_tokens"), ("shared_by=2", "shared_by"), ("order=sideways", "sideways")],
)
def test_a_domain_that_the_op_has_not_is_named(tmp_path, domain, names):
    with pytest.raises(UsageError, match="KVFUZZ_DOMAIN") as caught:
        _resolved(tmp_path, f"KVFUZZ_DOMAIN = {domain!r}\n")
    assert names in str(caught.value)
    assert "--where" not in str(caught.value)


def test_a_domain_of_what_the_function_is_never_told_is_named(tmp_path):
    with pytest.raises(UsageError, match="query=quantised") as caught:
        _resolved(tmp_path, "KVFUZZ_DOMAIN = 'query=model|quantised'\n")
    assert "q_scale" in str(caught.value)


def test_nothing_is_drawn_that_a_function_has_no_parameter_for(tmp_path):
    allowed = _resolved(tmp_path, "").domain.allowed
    axes = ("window", "softcap", "sinks", "alibi_slopes")
    assert {allowed[axis] for axis in axes} == {("none",)}
    path = tmp_path / "all.py"
    more = "sliding_window, softcap, sinks, alibi_slopes, q_descale"
    path.write_text(KERNEL.replace("query_start_loc", f"query_start_loc, {more}"))
    taken = resolve(TargetSpec(f"{path}:unified_attention")).info.domain.allowed
    assert not taken.keys() & set(axes)
    path.write_text(KERNEL.replace("query_start_loc", "query_start_loc, **more"))
    # A cap comes by a derived name, which is no keyword that is passed on.
    named = TargetSpec(f"{path}:unified_attention", op="unified_attention")
    passed = resolve(named).info.domain.allowed
    assert passed.keys() & set(axes) == {"softcap"}


def test_what_a_file_does_not_say_is_what_kernels_are_known_to_do(tmp_path):
    info = _resolved(tmp_path, "")
    assert (info.precision.merged, info.precision.weights) == ("lse", "query")
    told = _resolved(tmp_path, "KVFUZZ_PRECISION = {'merged': 'sums', 'tile': 64}\n")
    assert (told.precision.merged, told.precision.tile) == ("sums", 64)
