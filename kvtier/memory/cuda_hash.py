"""A Triton kernel that hashes many ranges of GPU memory at once.

It computes the same hash as :func:`kvtier.memory.part_hashes.hash_words`. Each instance of the
kernel (a Triton *program*) hashes one range and writes its sum to page-locked memory. The host
adds up these sums. So the instances do not depend on each other.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kvtier.memory import part_hashes
from kvtier.memory.cuda_api import Addresses

__all__ = ["launch"]

_STEP_WORDS: Final = 1024
"""Words of eight bytes that one instance of the kernel reads at a time."""

_POSITION_STEP = tl.constexpr(part_hashes.POSITION_STEP)
_FIRST_FACTOR = tl.constexpr(part_hashes.FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(part_hashes.SECOND_FACTOR)
_FIRST_SHIFT = tl.constexpr(part_hashes.FIRST_SHIFT)
_SECOND_SHIFT = tl.constexpr(part_hashes.SECOND_SHIFT)


# Triton reads every annotation as code of the kernel.
@triton.jit(do_not_specialize=["table", "sums"])  # type: ignore[untyped-decorator]
def hash_ranges(table, sums, STEP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Hash one range of the table in each instance of the kernel.

    Args:
        table: Address of the table. Row i has the address of range i, the position of its first
            word in the slot, its number of words, and a word that the kernel ignores.
        sums: Address of the results: one word per range, which receives the range's hash.
        STEP: Number of words to hash at a time.
    """
    row = tl.program_id(0)
    rows = table.to(tl.pointer_type(tl.int64)) + 4 * row
    words = tl.load(rows).to(tl.pointer_type(tl.uint64))
    position = tl.load(rows + 1).to(tl.uint64)
    count = tl.load(rows + 2)
    places = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.uint64)
    for start in range(0, count, STEP):
        at = start + places
        inside = at < count
        mixed = tl.load(words + at, mask=inside, other=0)
        mixed = mixed ^ (position + at.to(tl.uint64)) * _POSITION_STEP
        mixed = mixed * _FIRST_FACTOR
        mixed = mixed ^ (mixed >> _FIRST_SHIFT)
        mixed = mixed * _SECOND_FACTOR
        mixed = mixed ^ (mixed >> _SECOND_SHIFT)
        total += tl.where(inside, mixed, 0)
    tl.store(sums.to(tl.pointer_type(tl.uint64)) + row, tl.sum(total, 0))


def launch(table: Addresses, sums: Addresses, ranges: int) -> None:
    """Queue the kernel on torch's current stream.

    Args:
        table: Page-locked memory with a row for each range.
        sums: Page-locked memory with one word for each range.
        ranges: Number of rows to use, at least 1.
    """
    hash_ranges[(ranges,)](table.ctypes.data, sums.ctypes.data, STEP=_STEP_WORDS)
