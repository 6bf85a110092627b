"""What memory must hold after a case's steps: the references, applied to an image of it.

The images start as the buffers' bytes before the first launch; each step's reference writes what
the op's contract says. A byte that some step must write is *must*; every other byte of a buffer
that the steps write is *never*; buffers that no step writes must not change at all. Where a number
has a bound (attention), any code within it is right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.merge import MERGE_OP
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.target import Precision, Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.codec import decode, is_nan
from kvfuzz.oracles.gather_cache import gather_cache
from kvfuzz.oracles.memory import Elements, Memory
from kvfuzz.oracles.numerics import Bounded
from kvfuzz.oracles.ops import latent
from kvfuzz.oracles.ops.attention import attention
from kvfuzz.oracles.ops.merge import merge_attn_states
from kvfuzz.oracles.ops.mla import mla_decode
from kvfuzz.oracles.ops.slots import slot_mapping
from kvfuzz.oracles.ops.states import copy_states
from kvfuzz.oracles.page_ops import copy_blocks, swap_blocks, zero_blocks
from kvfuzz.oracles.per_token_head_quant import per_token_head_quant
from kvfuzz.oracles.reshape_and_cache import reshape_and_cache
from kvfuzz.oracles.writes import Stored


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected bytes, must-write masks and written buffers after all steps of a case."""

    images: dict[str, Tensor]
    must: dict[str, Tensor]
    """bool per byte, for each buffer that the steps write."""
    stored: list[Stored] = field(default_factory=list)
    loaded: list[Elements] = field(default_factory=list)
    """What the references read."""
    numbers: list[Elements] = field(default_factory=list)
    """What they do not read, and an engine has written: any numbers, but no NaN."""

    @property
    def written(self) -> frozenset[str]:
        """The buffers that the steps may write at all."""
        return frozenset(self.must)

    def wrong(self, buffer: str, after: Tensor) -> Tensor:
        """Which *must* bytes of `after` differ from the expected ones; bool per byte.

        A NaN is any NaN where a conversion made it, and a bit pattern everywhere else; a number
        with a bound is any within it.
        """
        return self.must[buffer] & (self.settled(buffer, after) != self.images[buffer])

    def missed(self, after: Mapping[str, Tensor]) -> list[str]:
        """The written buffers of which some byte, *must* or not, is not the expected one."""
        return [
            name
            for name in self.must
            if not image.same(after[name], self.images[name])
            and not (
                self._bounded(name)
                and image.same(self.settled(name, after[name]), self.images[name])
            )
        ]

    def settled(self, buffer: str, after: Tensor) -> Tensor:
        """`canonical`, and every number that is within its bound replaced by the expected one."""
        result = self.canonical(buffer, after)
        for stored, bounded in self._bounded(buffer):
            found = self._numbers(stored, after)
            right = (found - bounded.value).abs() <= bounded.bound
            if result is after:
                result = after.clone()
            at = image.element_bytes(stored.at[right], stored.field.dtype)
            result[at] = self.images[buffer][at]
        return result

    def classed(self, buffer: str, after: Tensor) -> Tensor:
        """`settled`, and every other number of a buffer replaced by NaN: what is the same on every
        device, whose arithmetic agrees on which numbers are wrong and not on the bits of those."""
        result = self.settled(buffer, after)
        for stored, bounded in self._bounded(buffer):
            right = (self._numbers(stored, after) - bounded.value).abs() <= bounded.bound
            if not right.all():
                result = after.clone() if result is after else result
                dtype = stored.field.dtype
                wrong = stored.at[~right]
                nan = torch.full_like(wrong, DTYPES[dtype].nan_code)
                image.write(result, wrong, dtype, nan)
        return result

    @property
    def unbounded(self) -> int:
        """How many numbers have no bound at all, so that any would be right."""
        within = [each.within for each in self.stored if each.within is not None]
        return sum(int(each.bound.isinf().count_nonzero()) for each in within)

    def off(self, buffer: str, position: int, after: Tensor) -> str:
        """How far a number of `after` at a position is from the expected one, in words; nothing
        where no bound is known of it."""
        for stored, bounded in self._bounded(buffer):
            at = torch.nonzero(stored.at.flatten() == position)
            if len(at):
                place = int(at[0])
                value, bound = (float(each.flatten()[place]) for each in bounded)
                found = float(self._numbers(stored, after).flatten()[place])
                return f"{found:.7g}, expected {value:.7g} within {bound:.2g}"
        return ""

    def _bounded(self, buffer: str) -> list[tuple[Stored, Bounded]]:
        return [
            (each, each.within)
            for each in self.stored
            if each.field.buffer == buffer and each.within is not None
        ]

    def _numbers(self, stored: Stored, after: Tensor) -> Tensor:
        codes = image.read(after, stored.at, stored.field.dtype)
        return decode(codes, DTYPES[stored.field.dtype]).double()

    def canonical(self, buffer: str, after: Tensor) -> Tensor:
        """`after` with every NaN that a conversion was to make replaced by the expected one.

        Devices differ in the NaN that a conversion yields, and in nothing else; of arithmetic they
        differ in more, which `settled` knows.
        """
        nans = self._equal_nans(buffer, after)
        if not nans:
            return after
        result = after.clone()
        for at in nans:
            result[at] = self.images[buffer][at]
        return result

    def _equal_nans(self, buffer: str, after: Tensor) -> list[Tensor]:
        """Positions of the elements that are NaN and, by a conversion, were to be."""
        found = []
        for stored in self.stored:
            if stored.field.buffer != buffer or not stored.converted:
                continue
            dtype = DTYPES[stored.field.dtype]
            both = is_nan(stored.codes, dtype)
            if image.is_any(both):
                both &= is_nan(image.read(after, stored.at, stored.field.dtype), dtype)
                found.append(image.element_bytes(stored.at[both], stored.field.dtype))
        return found


REFERENCES: dict[str, Callable[[Memory, Step, Quantise], list[Stored]]] = {
    "reshape_and_cache": reshape_and_cache,
    "gather_cache": gather_cache,
    "copy_blocks": copy_blocks,
    "swap_blocks": swap_blocks,
    "zero_blocks": zero_blocks,
    "slot_mapping": slot_mapping,
    "per_token_head_quant": per_token_head_quant,
    "copy_states": copy_states,
    "concat_and_cache_mla": latent.concat_and_cache_mla,
    "gather_mla": latent.gather_mla,
    "indexer_quant_and_cache": latent.indexer_quant_and_cache,
    "gather_indexer": latent.gather_indexer,
    "quantize_and_insert_k_cache": latent.quantize_and_insert_k_cache,
}


ARITHMETIC: dict[str, Callable[[Memory, Step, Precision], list[Stored]]] = {
    **dict.fromkeys(ATTENTION_OPS, attention),
    MERGE_OP: merge_attn_states,
    MLA_OP: mla_decode,
}
"""The references of ops that compute numbers, which depend on what a target rounds."""

FULL = Precision()


def expect(
    case: Program,
    before: Mapping[str, Tensor],
    quantise: Quantise,
    precision: Precision = FULL,
) -> Expectation:
    """Apply the reference of every step of `case` to the images in `before`; what a step writes
    is a copy from then on."""
    images = dict(before)
    memory = Memory(case, images)
    must: dict[str, Tensor] = {}
    all_stored: list[Stored] = []
    for step in case.steps:
        found = (
            ARITHMETIC[step.op](memory, step, precision)
            if step.op in ARITHMETIC
            else REFERENCES[step.op](memory, step, quantise)
        )
        for stored in found:
            name = stored.field.buffer
            if name not in must:
                images[name] = images[name].clone()
                must[name] = torch.zeros_like(images[name], dtype=torch.bool)
            image.write(images[name], stored.at, stored.field.dtype, stored.codes)
            image.mark(must[name], stored.at, stored.field.dtype)
            all_stored.append(stored)
    return Expectation(images, must, all_stored, memory.loaded, memory.numbers)
