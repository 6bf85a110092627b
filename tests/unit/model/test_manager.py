"""The block manager of scripts, and that what it decides is what the sequences mean."""

import pytest
import torch

from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.errors import UsageError
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CacheLayer
from kvfuzz.model.manager import BlockManager
from kvfuzz.model.planning import separate
from kvfuzz.model.script import Action
from kvfuzz.model.target import Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.expectation import expect
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn


def _layer(name, kind="full"):
    return CacheLayer(name, kind, "blocks_first", 4, 4, "bf16", 2, 8, 8)


def _manager(blocks=8, groups=1, host=8):
    layers = [[_layer(f"layers.{number}", "full")] for number in range(groups)]
    return BlockManager(separate(layers, blocks), host)


def _do(manager, *actions):
    return [effect for action in actions for effect in manager.apply(action)]


def test_freed_blocks_come_again_last_in_first_out():
    manager = _manager()
    _do(manager, Action("prefill", ("a",), 12))
    assert manager.held["a"].blocks[0] == [0, 1, 2]
    _do(manager, Action("free", ("a",)), Action("prefill", ("b",), 8))
    assert manager.held["b"].blocks[0] == [0, 1]
    assert "reuse" in manager.shown


def test_a_write_to_a_shared_block_goes_to_a_copy_and_leaves_the_other_alone():
    manager = _manager()
    _do(manager, Action("prefill", ("a",), 5), Action("fork", ("a", "b")))
    assert manager.held["b"].blocks == manager.held["a"].blocks
    copy, write = _do(manager, Action("decode", ("b",)))
    assert (copy.kind, copy.pairs) == ("copy", ((1, 2),))
    assert (write.kind, write.runs[0].blocks, write.runs[0].start) == ("write", (0, 2), 5)
    assert manager.held["a"].blocks[0] == [0, 1]


def test_the_last_holder_of_a_block_writes_in_place():
    manager = _manager()
    _do(manager, Action("prefill", ("a",), 5), Action("fork", ("a", "b")))
    effects = _do(manager, Action("decode", ("a", "b")))
    assert [effect.kind for effect in effects] == ["copy", "write"]
    assert len(effects[0].pairs) == 1


def test_a_full_block_is_shared_for_good():
    manager = _manager()
    _do(manager, Action("prefill", ("a",), 4), Action("fork", ("a", "b")))
    (write,) = _do(manager, Action("decode", ("b",)))
    assert (write.kind, write.runs[0].blocks) == ("write", (0, 1))


def test_a_rollback_gives_back_whole_blocks_and_writes_its_slots_again():
    manager = _manager()
    _do(manager, Action("prefill", ("a",), 9), Action("rollback", ("a",), 2))
    assert manager.held["a"].blocks[0] == [0, 1]
    (write,) = _do(manager, Action("decode", ("a",)))
    assert write.runs[0].start == 7


def test_swapped_blocks_come_back_where_there_is_room():
    manager = _manager()
    (out,) = _do(manager, Action("prefill", ("a",), 5), Action("swap_out", ("a",)))[1:]
    assert (out.kind, out.pairs) == ("swap_out", ((0, 0), (1, 1)))
    _do(manager, Action("prefill", ("b",), 1))
    (back,) = _do(manager, Action("swap_in", ("a",)))
    assert back.kind == "swap_in"
    assert [here for here, _ in back.pairs] == [0, 1]
    assert set(manager.held["a"].blocks[0]).isdisjoint(manager.held["b"].blocks[0])


def test_a_block_is_of_one_group_at_a_time():
    manager = _manager(blocks=12, groups=3)
    _do(manager, Action("prefill", ("a",), 5), Action("prefill", ("b",), 3))
    held = [
        block
        for each in manager.held.values()
        for blocks in each.blocks.values()
        for block in blocks
    ]
    assert len(held) == len(set(held)) == 9


IMPOSSIBLE = (
    ([], Action("decode", ("a",)), "there is no sequence a"),
    ([Action("prefill", ("a",), 1)], Action("prefill", ("a",), 1), "extend it"),
    ([Action("allocate", ("a",), 1)], Action("extend", ("a",), 1), "prefill"),
    ([Action("prefill", ("a",), 2)], Action("rollback", ("a",), 3), "only 2 tokens"),
    ([Action("prefill", ("a",), 2)], Action("swap_in", ("a",)), "not swapped out"),
    ([Action("prefill", ("a",), 33)], Action("prefill", ("b",), 1), "no block is free"),
    (
        [Action("prefill", ("a",), 2), Action("fork", ("a", "b"))],
        Action("zero", ("a",)),
        "a block is shared",
    ),
    (
        [Action("prefill", ("a",), 2), Action("fork", ("a", "b"))],
        Action("fork", ("a", "b")),
        "b exists already",
    ),
    (
        [Action("prefill", ("a",), 2), Action("swap_out", ("a",))],
        Action("read", ("a",)),
        "nothing to read",
    ),
)


@pytest.mark.parametrize(("before", "action", "message"), IMPOSSIBLE)
def test_what_cannot_follow_is_refused_and_changes_nothing(before, action, message):
    manager = _manager(blocks=9)
    _do(manager, *before)
    free, held = list(manager.free), repr(manager.held)
    with pytest.raises(UsageError, match=message):
        manager.apply(action)
    assert (manager.free, repr(manager.held)) == (free, held)
    assert not manager.allows(action)


def _meaning(script):
    """By sequence, the write that each of its tokens comes from: (number of action, row)."""
    meant: dict[str, list[tuple[int, int]]] = {}
    for number, action in enumerate(script.actions):
        names, tokens = action.sequences, action.tokens or 1
        if action.rule in ("prefill", "extend", "decode"):
            for at, name in enumerate(names):
                rows = range(at * tokens, (at + 1) * tokens)
                meant.setdefault(name, []).extend((number, row) for row in rows)
        elif action.rule == "fork":
            meant[names[1]] = list(meant.get(names[0], []))
        elif action.rule == "rollback":
            del meant[names[0]][-tokens:]
        elif action.rule == "zero":
            meant[names[0]] = []
        elif action.rule == "free":
            meant.pop(names[0], None)
    return meant


def _images(case):
    before = {
        buffer.name: before_the_first_launch(case, buffer, torch.device("cpu"))
        for buffer in case.buffers
    }
    return expect(case, before, Quantise()).images


@pytest.mark.parametrize("stored_in", ["bf16", "fp32"])
def test_every_sequence_holds_the_tokens_that_its_story_gave_it(stored_in):
    within = space("stateful_cache", Domain(allowed={"stored_in": (stored_in,)}))
    tokens = 0
    for seed in range(150):
        case = drawn_case(Drawn(seed), within)
        images = _images(case)
        manager = BlockManager(case.plan, case.script.host_blocks)
        for action in case.script.actions:
            manager.apply(action)
        writes = {
            (int(bound.partition(".")[0]), step.fields["key_cache"]): step
            for step in case.steps
            if step.op == "reshape_and_cache"
            for bound in [step.tensors["key"]]
        }
        for name, rows in _meaning(case.script).items():
            held = manager.held.get(name)
            if held is None or held.is_swapped:
                continue
            assert held.length == len(rows)
            for group, blocks in held.blocks.items():
                for layer in map(case.plan.layer, case.plan.groups[group]):
                    cache = case.field(f"{layer.name}.k")
                    for position, (number, row) in enumerate(rows):
                        block = blocks[position // layer.block_size] * layer.ratio
                        offset = position % layer.block_size
                        kernel_block = block + offset // layer.kernel_block_size
                        at = {
                            "block": kernel_block,
                            "token": offset % layer.kernel_block_size,
                            "head": 0,
                            "dim": 0,
                        }
                        step = writes[number, cache.name]
                        key = case.bound_field(step, "key")
                        stored = image.read(
                            images[cache.buffer], torch.tensor([cache.byte(at)]), cache.dtype
                        )
                        given = image.read(
                            images[key.buffer],
                            torch.tensor([key.byte({"token": row, "head": 0, "dim": 0})]),
                            key.dtype,
                        )
                        assert torch.equal(stored, given), (seed, name, position, layer.name)
                        tokens += 1
    assert tokens > 2000
