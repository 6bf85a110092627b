"""Pages that are no K and V: every address against a formula, and what is over is the padding."""

import itertools
import math

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model import pages
from kvfuzz.model.dtypes import itemsize

B, N, H = 3, 32, 2
WHERE = {"buffer": "kv_cache", "layer": "layer.0"}


def _mla(b, s, d):
    return 2 * (b * N * 576 + s * 576 + d)


def _indexer(stride):
    return lambda b, s, d: b * stride + s // 16 * 16 * 64 + s % 16 * 16 + d // 16 * 256 + d % 16


def _made(name, padding):
    """Fields, the bytes of a page, and by field the byte of (block, token, dim) or its like."""
    if name == "mla":
        page = N * 576 * 2
        fields = pages.mla(B, N, "bf16", **WHERE, block_stride=page + padding)
        return (
            fields,
            page,
            {
                "latent": lambda b, s, d: _mla(b, s, d) + b * padding,
                "rope": lambda b, s, d: _mla(b, s, 512 + d) + b * padding,
            },
        )
    if name == "fp8_ds_mla":
        page = N * 656
        fields = pages.fp8_ds_mla(B, N, "e4m3fn", **WHERE, block_stride=page + padding)
        return (
            fields,
            page,
            {
                "latent": lambda b, s, d: b * (page + padding) + s * 656 + d,
                "scale": lambda b, s, d: b * (page + padding) + s * 656 + 512 + 4 * d,
                "rope": lambda b, s, d: b * (page + padding) + s * 656 + 528 + 2 * d,
            },
        )
    if name == "fp8_ds_mla_v4":
        page = N * 584
        fields = pages.fp8_ds_mla_v4(B, N, "e4m3fn", **WHERE, block_stride=page + padding)
        return (
            fields,
            page,
            {
                "nope": lambda b, s, d: b * (page + padding) + s * 576 + d,
                "rope": lambda b, s, d: b * (page + padding) + s * 576 + 448 + 2 * d,
                "scale": lambda b, s, d: b * (page + padding) + N * 576 + 8 * s + d,
            },
        )
    if name == "indexer":
        page = N * (64 + 4)
        fields = pages.indexer(B, N, 64, "e4m3fnuz", **WHERE, block_stride=page + padding)
        return (
            fields,
            page,
            {
                "k": _indexer(page + padding),
                "scale": lambda b, s: b * (page + padding) + N * 64 + 4 * s,
            },
        )
    if name == "flat_indexer":
        page = N * (64 + 4)
        fields = pages.indexer(B, N, 64, "e4m3fn", **WHERE, block_stride=page + padding, tile=1)
        return (
            fields,
            page,
            {
                "k": lambda b, s, d: b * (page + padding) + s * 64 + d,
                "scale": lambda b, s: b * (page + padding) + N * 64 + 4 * s,
            },
        )
    if name == "small_mla":
        page = N * 24 * 4
        fields = pages.mla(B, N, "fp32", **WHERE, block_stride=page + padding, latent=16, rope=8)
        return (
            fields,
            page,
            {
                "latent": lambda b, s, d: b * (page + padding) + 96 * s + 4 * d,
                "rope": lambda b, s, d: b * (page + padding) + 96 * s + 64 + 4 * d,
            },
        )
    if name == "opaque_slots":
        page = H * N * 19
        fields = pages.opaque_slots(B, H, N, 19, **WHERE, block_stride=page + padding)
        return (
            fields,
            page,
            {"slot": lambda b, h, s, d: b * (page + padding) + h * N * 19 + s * 19 + d},
        )
    states = [("bf16", (3, 8)), ("fp32", (2, 4, 5)), ("bf16", (7,))]
    page = 48 + 160 + 14
    fields = pages.mamba_states(B, states, **WHERE, block_stride=224 + padding)
    return (
        fields,
        page,
        {
            "state_0": lambda b, i: b * (224 + padding) + 2 * i,
            "state_1": lambda b, i: b * (224 + padding) + 48 + 4 * i,
            "state_2": lambda b, i: b * (224 + padding) + 208 + 2 * i,
        },
    )


NAMES = (
    "mla",
    "small_mla",
    "fp8_ds_mla",
    "fp8_ds_mla_v4",
    "indexer",
    "flat_indexer",
    "opaque_slots",
    "mamba_states",
)


@pytest.mark.parametrize("padding", [0, 16, 44])
@pytest.mark.parametrize("name", NAMES)
def test_every_address_follows_the_formula_and_only_padding_is_left_over(name, padding):
    fields, page, formulas = _made(name, padding)
    assert [field.name for field in fields] == list(formulas)
    owned = set()
    for field in fields:
        order = [axis for axis in ("block", "head", "token", "dim") if axis in field.extents]
        size = itemsize(field.dtype)
        for at in itertools.product(*(range(field.extents[axis]) for axis in order)):
            byte = field.byte(dict(zip(order, at, strict=True)))
            assert byte == formulas[field.name](*at)
            assert byte % size == 0
            covered = range(byte, byte + size)
            assert owned.isdisjoint(covered)
            owned.update(covered)
        assert field.last_byte() < max(owned) + 1
    stride = fields[0].terms[0].stride
    assert owned == {b * stride + inside for b in range(B) for inside in range(page)}
    assert sum(
        math.prod(field.extents.values()) * itemsize(field.dtype) for field in fields
    ) == len(owned)


@pytest.mark.parametrize("name", NAMES)
def test_the_owner_of_a_byte_is_found_back(name):
    fields, _, _ = _made(name, 16)
    for field in fields:
        axes = list(field.extents)
        for at in itertools.product(*(range(0, field.extents[axis], 3) for axis in axes)):
            coordinate = dict(zip(axes, at, strict=True))
            byte = field.byte(coordinate)
            assert field.coordinate(byte) == coordinate
            assert all(other.coordinate(byte) is None for other in fields if other is not field)


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(UsageError, match="block_size=24, expected a multiple of 16"):
        pages.indexer(B, 24, 64, "e4m3fn", **WHERE)
    with pytest.raises(UsageError, match="block_stride=100, expected 0 or at least a page of"):
        pages.mla(B, N, "bf16", **WHERE, block_stride=100)
    with pytest.raises(UsageError, match="state 1 of fp32 at byte 2"):
        pages.mamba_states(B, [("bf16", (1,)), ("fp32", (1,))], **WHERE)
