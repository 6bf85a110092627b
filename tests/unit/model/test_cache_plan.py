"""Cache plans: what no engine could mean is refused by name, and planning places what it says."""

import itertools

import pytest
from cache_plans import attention, latent, state
from msgspec.structs import replace

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import (
    KV_LAYOUTS,
    Allocation,
    State,
)
from kvfuzz.model.plan_check import MOST_BYTES, check
from kvfuzz.model.planning import BUFFER, one_buffer, packed, separate, slots_of


def _usual():
    """Two layers of full attention over those of two windows, a sharer behind them."""
    sharer = attention("d", shares="a")
    windows = [attention("w", kind="sliding"), attention("x", kind="sliding")]
    return separate([[attention("a"), attention("b"), sharer], windows], 4)


def _of_one(layer):
    """A plan of one layer, whatever it is."""
    plan = separate([[attention("a")]], 4)
    return replace(plan, layers=(replace(layer, name="a"),))


def _with_layer(number, **changes):
    plan = _usual()
    layers = list(plan.layers)
    layers[number] = replace(layers[number], **changes)
    return replace(plan, layers=tuple(layers))


def _with_placement(number, **changes):
    plan = _usual()
    placements = list(plan.placements)
    placements[number] = replace(placements[number], **changes)
    return replace(plan, placements=tuple(placements))


REFUSED = [
    ("no layers", lambda: replace(_usual(), layers=()), "no layers"),
    (
        "twice the name",
        lambda: _with_layer(1, name="a"),
        "two layers share a name among ['a', 'a', 'd', 'w', 'x']",
    ),
    ("no blocks", lambda: replace(_usual(), num_blocks=0), "num_blocks=0, expected 1 to"),
    (
        "kv_layout",
        lambda: replace(_usual(), kv_layout="LBCNH"),
        "kv_layout='LBCNH', expected one of LBHNC, LBNHC",
    ),
    ("kind", lambda: _of_one(attention("", kind="linear")), "layer a: kind='linear', expected"),
    ("form", lambda: _of_one(attention("", form="paged")), "layer a: form='paged', expected one"),
    (
        "full latent",
        lambda: _of_one(attention("", form="latent")),
        "layer a: form=latent of kind=full, expected ('kv_first', 'blocks_first',",
    ),
    (
        "mla blocks_first",
        lambda: _of_one(latent("", form="blocks_first")),
        "layer a: form=blocks_first of kind=mla, expected ('latent',)",
    ),
    (
        "mamba latent",
        lambda: _of_one(state("", form="latent")),
        "layer a: form=latent of kind=mamba, expected ('states',)",
    ),
    *(
        (
            f"kernel block of {kernel}",
            lambda kernel=kernel: _of_one(attention("", kernel_block_size=kernel)),
            f"layer a: block_size=4, kernel_block_size={kernel}, expected a multiple of it",
        )
        for kernel in (0, 3, 8)
    ),
    ("dtype", lambda: _of_one(attention("", cache_dtype="fp64")), "layer a: cache_dtype='fp64'"),
    ("no heads", lambda: _of_one(attention("", num_kv_heads=0)), "layer a: 0 heads of 8, ()"),
    (
        "no head size",
        lambda: _of_one(attention("", head_size=0)),
        "layer a: 2 heads of 0, ()",
    ),
    (
        "attention with states",
        lambda: _of_one(attention("", states=(State("bf16", (2,)),))),
        "layer a: 2 heads of 8, (State(",
    ),
    (
        "no values",
        lambda: _of_one(attention("", head_size_v=0)),
        "layer a: head_size_v=0 of kind=full",
    ),
    (
        "a latent with values",
        lambda: _of_one(latent("", head_size_v=72)),
        "layer a: head_size_v=72 of kind=mla",
    ),
    *(
        (
            f"{form} with two head sizes",
            lambda form=form: _of_one(attention("", form=form, head_size_v=16)),
            f"layer a: form={form} with two head sizes",
        )
        for form in ("kv_first", "blocks_first", "head_slots")
    ),
    ("order", lambda: _of_one(attention("", order="dhn")), "layer a: order='dhn'"),
    ("no states", lambda: _of_one(state("", states=())), "layer a: kind=mamba without states"),
    (
        "an empty state",
        lambda: _of_one(state("", states=(State("bf16", (0, 4)),))),
        "do not lie at multiples of their elements",
    ),
    (
        "a state inside an element",
        lambda: _of_one(state("", states=(State("bf16", (3,)), State("fp32", (2,))))),
        "do not lie at multiples of their elements",
    ),
    (
        "pages inside an element",
        lambda: _of_one(state("", page=258)),
        "do not lie at multiples of their elements",
    ),
    (
        "padded to less",
        lambda: _of_one(attention("", page_padded=255)),
        "layer a: page_padded=255, a page has 256 bytes",
    ),
    (
        "padded and split",
        lambda: _of_one(attention("", page_padded=320, kernel_block_size=2)),
        "layer a: a padded page cannot be split into kernel blocks",
    ),
    (
        "in no group",
        lambda: replace(_usual(), groups=(("a", "b", "d"), ("w",))),
        "groups of ['a', 'b', 'd', 'w'], expected every layer in one group",
    ),
    (
        "in two groups",
        lambda: replace(_usual(), groups=(("a", "b", "d"), ("w", "x", "a"))),
        "expected every layer in one group",
    ),
    (
        "a group of nobody",
        lambda: replace(_usual(), groups=(("a", "b", "d", "e"), ("w", "x"))),
        "expected every layer in one group",
    ),
    (
        "two kinds in a group",
        lambda: replace(_usual(), groups=(("a", "b", "d", "w"), ("x",))),
        "of several kinds: ['full', 'sliding']",
    ),
    (
        "nobody's cache",
        lambda: _with_layer(2, shares="z"),
        "layer d shares the cache of 'z', which does not exist",
    ),
    (
        "its own cache",
        lambda: _with_layer(2, shares="d"),
        "layer d shares the cache of 'd', which shares that of d: a chain",
    ),
    (
        "a chain",
        lambda: _chain(),
        "layer e shares the cache of 'd', which shares that of a: a chain",
    ),
    (
        "a later target",
        lambda: _reordered("d", "a", "b", "w", "x"),
        "layer d shares the cache of 'a', which comes later: nothing is in it yet",
    ),
    (
        "a target of another kind",
        lambda: _regrouped(kind="sliding"),
        "layer d shares the cache of 'a', of another kind: sliding, full",
    ),
    (
        "a target of another format",
        lambda: _with_layer(2, cache_dtype="fp16"),
        "layer d shares the cache of 'a', whose format is another one",
    ),
    (
        "a target of another order",
        lambda: _with_layer(2, order="hnd"),
        "layer d shares the cache of 'a', whose format is another one",
    ),
    (
        "a target in another group",
        lambda: _regrouped(),
        "layer d shares the cache of 'a', which is in another group",
    ),
    (
        "twice an allocation",
        lambda: replace(_usual(), allocations=(Allocation("kv.0", 1024),) * 2),
        "two allocations share a name",
    ),
    *(
        (
            f"an allocation of {nbytes} bytes",
            lambda nbytes=nbytes: replace(
                _usual(), allocations=(Allocation("kv.0", nbytes), Allocation("kv.1", 1024))
            ),
            f"allocation kv.0: nbytes={nbytes}",
        )
        for nbytes in (0, MOST_BYTES + 1)
    ),
    (
        "placed nowhere",
        lambda: replace(_usual(), placements=_usual().placements[:1]),
        "each layer that owns a cache is placed once, and no other is",
    ),
    (
        "placed twice",
        lambda: _with_placement(0, layers=("a", "w", "x")),
        "each layer that owns a cache is placed once, and no other is",
    ),
    (
        "a sharer that is placed",
        lambda: _with_placement(0, layers=("a", "w", "d")),
        "each layer that owns a cache is placed once, and no other is",
    ),
    (
        "in no allocation",
        lambda: _with_placement(0, allocation="kv.7"),
        "placement of a, w: no allocation 'kv.7'",
    ),
    *(
        (
            f"{name} of {value}",
            lambda name=name, value=value: _with_placement(0, **{name: value}),
            "placement of a, w: offset ",
        )
        for name, value in (("offset", -1), ("layer_stride", -256), ("block_stride", 0))
    ),
    *(
        (
            f"an element across {name}",
            lambda name=name, value=value: _with_placement(0, **{name: value}),
            "placement of a, w: ",
        )
        for name, value in (("offset", 1), ("block_stride", 257))
    ),
    (
        "a group at one place",
        lambda: _swapped(),
        "placement of a, b: two layers of one group at the same place",
    ),
    (
        "split blocks that lie apart",
        lambda: _split_apart(),
        "placement of a: blocks 512 bytes apart cannot be split into kernel blocks, a has pages "
        "of 256 bytes",
    ),
]


def _chain():
    plan = _usual()
    layers = (*plan.layers, attention("e", shares="d"))
    return replace(plan, layers=layers, groups=(("a", "b", "d", "e"), ("w", "x")))


def _reordered(*names):
    plan = _usual()
    return replace(plan, layers=tuple(map(plan.layer, names)))


def _regrouped(**changes):
    plan = _with_layer(2, **changes)
    return replace(plan, groups=(("a", "b"), ("w", "x"), ("d",)))


def _swapped():
    plan = _usual()
    first, second = plan.placements
    return replace(
        plan, placements=(replace(first, layers=("a", "b")), replace(second, layers=("w", "x")))
    )


def _split_apart():
    plan = separate([[attention("a", kernel_block_size=2)]], 4)
    (place,) = plan.placements
    return replace(plan, placements=(replace(place, block_stride=512),))


@pytest.mark.parametrize(
    ("make", "words"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_what_no_engine_could_mean_is_refused_with_its_name(make, words):
    with pytest.raises(UsageError, match="impossible plan: ") as error:
        check(make())
    assert words in str(error.value)


def test_what_an_engine_could_mean_is_taken():
    check(_usual())
    check(separate([[attention("a", page_padded=320)]], 1))
    check(separate([[attention("a", block_size=16)]], 1))
    check(one_buffer([[attention("a", form="content_packed", head_size_v=16)]], 2, "LBHNC"))


def test_an_unknown_layer_is_asked_for_in_vain():
    with pytest.raises(UsageError, match="impossible plan: no layer 'z'"):
        _usual().layer("z")


def test_a_page_has_the_bytes_of_its_heads_or_of_its_states():
    assert attention("a").page_bytes == 4 * 2 * (8 + 8) * 2
    assert attention("a", head_size_v=16).page_bytes == 4 * 2 * (8 + 16) * 2
    assert latent("a").page_bytes == 4 * 72 * 2
    assert state("a").page_bytes == 8 * 8 * 2 + 4 * 8 * 4
    assert state("a", page=320).page_stride == 320
    assert attention("a", block_size=12).ratio == 3
    assert state("a", block_size=12).ratio == 1


def _cells(plan, layer):
    """The bytes of each block of a layer, cell by cell, as the docstrings of plans say."""
    at = plan.placement_of[layer.name]
    start = at.offset + at.layers.index(layer.name) * at.layer_stride
    slots, page = slots_of(layer), layer.page_stride
    cell = page // slots
    apart = {
        "LHBNC": plan.num_blocks * cell,
        "BHLNC": len(at.layers) * cell,
    }.get(plan.kv_layout, cell)
    return [
        {
            (at.allocation, start + block * at.block_stride + slot * apart + byte)
            for slot in range(slots)
            for byte in range(cell)
        }
        for block in range(plan.num_blocks)
    ]


def _assert_placed(plan):
    """Pages of a group are apart, groups overlay block by block, and all lie inside."""
    check(plan)
    sizes = {each.name: each.nbytes for each in plan.allocations}
    of_group = [[set() for _ in range(plan.num_blocks)] for _ in plan.groups]
    for layer in plan.owners:
        blocks = of_group[plan.group_of[layer.name]]
        for block, cells in enumerate(_cells(plan, layer)):
            assert len(cells) == layer.page_stride
            assert all(0 <= byte < sizes[name] for name, byte in cells)
            assert not any(cells & other for other in blocks)
            blocks[block] |= cells
    for one, other in itertools.combinations(of_group, 2):
        for (b, mine), (c, theirs) in itertools.product(enumerate(one), enumerate(other)):
            assert b == c or not mine & theirs
    return of_group


def _group(kind, count, letter, **changes):
    return [attention(f"{letter}{n}", kind=kind, **changes) for n in range(count)]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_separate_lets_the_ith_layers_of_all_groups_share_an_allocation(blocks):
    groups = [_group("full", 3, "a"), _group("sliding", 2, "w"), [state("s0", page=0)]]
    plan = separate(groups, blocks)
    assert [(each.name, each.nbytes) for each in plan.allocations] == [
        (f"kv.{number}", 256 * blocks) for number in range(3)
    ]
    assert [each.layers for each in plan.placements] == [("a0", "w0", "s0"), ("a1", "w1"), ("a2",)]
    full, sliding, states = _assert_placed(plan)
    for block in range(blocks):
        assert states[block] < sliding[block] < full[block]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_packed_puts_the_slots_of_all_page_sizes_side_by_side_in_each_block(blocks):
    wide = _group("sliding", 2, "w", head_size=16, head_size_v=16)
    groups = [_group("full", 2, "a"), [*_group("chunked", 1, "c")], wide]
    plan = packed(groups, blocks)
    assert [(each.name, each.nbytes) for each in plan.allocations] == [
        (BUFFER, (2 * 256 + 2 * 512) * blocks)
    ]
    assert [(each.layers, each.offset) for each in plan.placements] == [
        (("a0", "c0"), 0),
        (("a1",), 256),
        (("w0",), 512),
        (("w1",), 1024),
    ]
    assert {each.block_stride for each in plan.placements} == {2 * 256 + 2 * 512}
    assert all(each.packed for each in plan.placements)
    full, chunked, sliding = _assert_placed(plan)
    for block in range(blocks):
        assert chunked[block] < full[block]
        assert not sliding[block] & full[block]
        used = full[block] | sliding[block]
        assert len(used) == 1536
        assert min(byte for _, byte in used) == 1536 * block


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
@pytest.mark.parametrize("form", ["content_packed", "head_slots"])
def test_one_buffer_places_every_group_from_byte_zero_by_its_layout(kv_layout, form, blocks):
    groups = [_group("full", 3, "a", form=form), _group("sliding", 2, "w", form=form)]
    plan = one_buffer(groups, blocks, kv_layout)
    assert [(each.name, each.nbytes) for each in plan.allocations] == [(BUFFER, 3 * 256 * blocks)]
    full, sliding = _assert_placed(plan)
    every = {byte for block in full for _, byte in block}
    assert every == set(range(3 * 256 * blocks))
    assert min(byte for block in sliding for _, byte in block) == 0
    if kv_layout.startswith("B"):
        for block in range(blocks):
            assert {byte for _, byte in full[block]} == set(range(768 * block, 768 * block + 768))


@pytest.mark.parametrize("kv_layout", ["BLHNC", "BLNHC"])
def test_one_buffer_by_blocks_has_room_for_the_widest_group(kv_layout):
    wide = [
        *_group("full", 2, "a", form="content_packed", head_size=16, head_size_v=16),
        attention("last", form="content_packed"),
    ]
    narrow = [state(f"s{n}", page=320) for n in range(3)]
    plan = one_buffer([narrow, wide], 3, kv_layout)
    assert plan.allocations == (Allocation(BUFFER, 3 * (2 * 512 + 256)),)
    assert [(each.layers, each.offset) for each in plan.placements] == [
        (("s0", "s1", "s2"), 0),
        (("a0", "a1"), 0),
        (("last",), 1024),
    ]
    _assert_placed(plan)


@pytest.mark.parametrize("kv_layout", ["LBHNC", "LBNHC", "LHBNC"])
def test_one_buffer_by_layers_puts_the_formats_of_a_group_behind_each_other(kv_layout):
    one = _group("full", 2, "a", form="content_packed")
    other = _group("full", 1, "b", form="content_packed", cache_dtype="fp16")
    plan = one_buffer([[one[0], *other, one[1]]], 3, kv_layout)
    assert [(each.layers, each.offset) for each in plan.placements] == [
        (("a0", "a1"), 0),
        (("b0",), 2 * 3 * 256),
    ]
    _assert_placed(plan)


def test_what_shares_a_cache_is_placed_nowhere():
    sharers = [attention("d", shares="a"), attention("e", shares="a")]
    for plan in (
        separate([[attention("a"), *sharers]], 2),
        packed([[attention("a"), *sharers]], 2),
        one_buffer([[attention("a"), *sharers]], 2, "BLHNC"),
    ):
        check(plan)
        assert [each.layers for each in plan.placements] == [("a",)]
        assert [layer.name for layer in plan.sharers] == ["d", "e"]
        assert sum(each.nbytes for each in plan.allocations) == 2 * 256


WIDE = {"form": "content_packed", "head_size": 16, "head_size_v": 16}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            lambda: separate([[attention("a")], [state("s", page=320)]], 2),
            "layers of one allocation have pages of several sizes: {'a': 256, 's': 320}; pad the "
            "smaller ones",
        ),
        *(
            (
                lambda layout=layout: one_buffer(
                    [[attention("a", form="content_packed"), attention("b", **WIDE)]], 2, layout
                ),
                f"kv_layout={layout} with pages of several (heads, bytes): [(2, 256), (2, 512)]; "
                "a page must lie in one piece",
            )
            for layout in ("LHBNC", "BHLNC")
        ),
        *(
            (
                lambda layout=layout: one_buffer(
                    [
                        [attention("a", form="content_packed")],
                        [attention("w", kind="sliding", **WIDE)],
                    ],
                    2,
                    layout,
                ),
                f"kv_layout={layout} with several groups and pages of [(2, 256), (2, 512)]",
            )
            for layout in ("LBHNC", "LBNHC")
        ),
        *(
            (
                lambda layout=layout: one_buffer(
                    [[attention("a", form="content_packed", page_padded=320)]], 2, layout
                ),
                f"kv_layout={layout} cannot pad the pages of a",
            )
            for layout in ("LHBNC", "BHLNC")
        ),
    ],
)
def test_pages_that_cannot_be_placed_are_refused(place, words):
    with pytest.raises(UsageError) as error:
        place()
    assert words in str(error.value)
