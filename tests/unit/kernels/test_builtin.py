import ast

import pytest
import torch

from kvfuzz.kernels.builtin import gather_cache, reshape_and_cache
from kvfuzz.kernels.mutants.patches import BUILTIN
from kvfuzz.model.dtypes import DTYPES


def test_the_fp8_limits_are_the_largest_finite_values():
    by_name = {
        str(dtype).removeprefix("torch.float8_"): top
        for dtype, top in reshape_and_cache.FP8_MAX.items()
    }
    fp8 = [each for each in DTYPES.values() if each.is_quantised and not each.is_integer]
    assert by_name == {each.name: each.max_finite for each in fp8}
    assert set(gather_cache.FP8) == set(reshape_and_cache.FP8_MAX)


KERNELS = [path for path in sorted(BUILTIN.glob("*.py")) if "triton.jit" in path.read_text()]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_built_in_file_stands_alone(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"torch", "triton"}


@pytest.mark.parametrize(("block_size", "head_size"), [(4, 32), (16, 12)])
def test_a_shuffle_cache_that_does_not_divide_is_refused_before_any_launch(block_size, head_size):
    cache = torch.zeros(3, block_size, 1, head_size, dtype=torch.float16)
    rows = torch.zeros(1, 1, head_size, dtype=torch.float16)
    integers = torch.zeros(2, dtype=torch.int32)
    message = rf"head_size={head_size}, .* and block_size={block_size} must divide by 8"
    with pytest.raises(NotImplementedError, match=message):
        reshape_and_cache.reshape_and_cache(
            rows, rows, cache, cache, integers, integers, integers, "SHUFFLE"
        )
    with pytest.raises(NotImplementedError, match=message):
        gather_cache.gather_cache(
            cache,
            cache,
            rows,
            rows,
            integers,
            integers,
            integers,
            integers,
            integers,
            integers,
            "SHUFFLE",
        )
