"""A record of reads is whole only where torch was not handed a buffer."""

import pytest
import torch

from kvfuzz.engine.worker.torch_use import TorchUse


def _used(call):
    buffer = torch.zeros(64, dtype=torch.uint8)
    with TorchUse([buffer]) as use:
        call(buffer)
    return list(use.ops)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.view(torch.float32),
        lambda b: b.as_strided((4, 4), (8, 1), 3)[1:].transpose(0, 1),
        lambda b: b[3:7],
        lambda b: b.data_ptr() + b.stride(0) + b.numel(),
        lambda b: torch.zeros(4) + torch.ones(4),
    ],
)
def test_views_sizes_and_foreign_tensors_read_nothing(call):
    assert _used(call) == []


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda b: b.clone(), "aten.clone"),
        (lambda b: b[3:7].sum(), "aten.sum"),
        (lambda b: b.view(torch.int32)[2].item(), "aten._local_scalar_dense"),
        (lambda b: torch.cat([torch.zeros(2, dtype=torch.uint8), b[8:]]), "aten.cat"),
        (lambda b: torch.zeros(64, dtype=torch.uint8).copy_(b), "aten.copy_"),
        (lambda b: torch.add(torch.ones(64), other=b), "aten.add"),
    ],
)
def test_an_operator_that_gets_a_view_of_a_buffer_is_named(call, name):
    assert any(op.startswith(name) for op in _used(call))
