import pytest

from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.target import TargetSpec

pytestmark = pytest.mark.thirdparty


@pytest.fixture
def info():
    return resolve(TargetSpec("conch:reshape_and_cache"), arch="gfx950").info


def test_conch_multiplies_by_the_reciprocal(info):
    assert info.quantise.quotient == "x*(1/s)"


def test_conch_knows_strided_caches_and_one_fp8_dialect(info):
    assert info.domain.levels("order") == ("nhd", "hnd")
    assert info.domain.levels("nesting") == ("layer_first",)
    assert info.domain.levels("granularity") == ("tensor",)
    assert info.domain.levels("cache_dtype") == ("fp32", "bf16", "fp16", "e4m3fn")
    assert info.partner == "builtin:gather_cache"
