"""What an adapter hands a kernel is on the device of the caches: read off the syntax tree."""

import ast
from pathlib import Path

import pytest

import kvfuzz

KERNELS = Path(kvfuzz.__file__).parent / "kernels"
MAKES = {"arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros"}
ON_THE_HOST = {"builtin/expand_block_table.py"}
"""Targets that launch nothing."""


def _made(tree):
    """Calls of torch that make a tensor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKES:
                yield node


def _without_device(text):
    """Lines that make a tensor wherever torch has its default; `**options` may say it."""
    return [
        node.lineno
        for node in _made(ast.parse(text))
        if not {each.arg for each in node.keywords} & {"device", None}
    ]


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_tensor_says_its_device(path):
    if path.relative_to(KERNELS).as_posix() in ON_THE_HOST:
        pytest.skip("launches nothing")
    assert not _without_device(path.read_text())


def test_a_tensor_that_does_not_is_seen():
    assert _without_device("torch.tensor([1], dtype=torch.int64)") == [1]
    assert not _without_device("torch.tensor([1], device=cache.device)")
