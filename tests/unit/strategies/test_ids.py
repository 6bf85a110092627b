"""Block ids: the touched ones show the pattern that was asked for, whatever lies between."""

import pytest

from kvfuzz.model.tokens import BLOCK_IDS, id_pattern
from kvfuzz.strategies.choices import Drawn, number
from kvfuzz.strategies.ids import Blocks, assigned, ratio_of


def batch(pattern, choices):
    """Sequences that can show the pattern, with untouched blocks before and after in groups."""
    ratio = ratio_of(pattern)
    sequences = []
    for index in range(number(choices, 2, 3)):
        groups = ratio * number(choices, 0, 2)
        within = number(choices, 0, ratio - 2) if ratio > 1 and not index else 0
        least = 2 if not index else 1
        sequences.append((groups + within, number(choices, least, least + 2)))
    return Blocks(pattern, tuple(sequences), number(choices, 0, 2), number(choices, 0, 30))


@pytest.mark.parametrize("pattern", BLOCK_IDS)
def test_touched_blocks_show_the_pattern_and_no_id_has_two_owners(pattern):
    for seed in range(3000):
        choices = Drawn(seed)
        blocks = batch(pattern, choices)
        ids = assigned(choices, blocks)
        for (before, span), owned in zip(blocks.sequences, ids.sequences, strict=True):
            assert len(owned) == before + span
        pairs = zip(blocks.sequences, ids.sequences, strict=True)
        touched = [block for (before, _), owned in pairs for block in owned[before:]]
        assert id_pattern(touched) == pattern, (seed, blocks, ids)
        every = [block for owned in ids.sequences for block in owned] + list(ids.states)
        assert len(set(every)) == len(every)
        assert set(every) <= set(range(ids.num_blocks))
