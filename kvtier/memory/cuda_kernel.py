"""A Triton kernel that copies many short ranges within a GPU's memory at once.

:mod:`kvtier.memory.cuda_methods` explains why copies need this kernel. The kernel runs beside
the model, so it leaves some multiprocessors free. It still takes only a small fraction of the
time that the same bytes take on the bus.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kvtier.memory.cuda_api import Addresses

__all__ = ["launch"]

_PROGRAMS: Final = 64
"""Largest number of instances of the kernel; each runs on one multiprocessor."""
_STEP_WORDS: Final = 1024
"""Words of eight bytes that one instance of the kernel copies at a time."""


# Triton reads every annotation as code of the kernel.
@triton.jit(do_not_specialize=["table", "copies"])  # type: ignore[untyped-decorator]
def copy_ranges(table, copies, STEP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Copy the ranges that the first rows of a table describe.

    The table is in host memory, so reading a row is slow. Each instance of the kernel therefore
    requests its next row before it copies the range of the current row.

    Args:
        table: Address of the table. A row has three words: destination, source, bytes.
        copies: Number of rows.
        STEP: Number of words to copy at a time.
    """
    rows = table.to(tl.pointer_type(tl.int64))
    places = tl.arange(0, STEP)
    row = tl.program_id(0)
    destination = tl.load(rows + 3 * row)
    source = tl.load(rows + 3 * row + 1)
    words = tl.load(rows + 3 * row + 2) // 8
    while row < copies:
        to = destination.to(tl.pointer_type(tl.int64))
        origin = source.to(tl.pointer_type(tl.int64))
        left = words
        row += tl.num_programs(0)
        following = tl.minimum(row, copies - 1)
        destination = tl.load(rows + 3 * following)
        source = tl.load(rows + 3 * following + 1)
        words = tl.load(rows + 3 * following + 2) // 8
        for start in range(0, left, STEP):
            at = start + places
            inside = at < left
            tl.store(to + at, tl.load(origin + at, mask=inside), mask=inside)


def launch(table: Addresses, copies: int) -> None:
    """Queue the kernel on torch's current stream.

    Args:
        table: Page-locked memory. A row has three words: destination, source, bytes.
        copies: Number of rows to use, at least 1.
    """
    grid = (min(_PROGRAMS, copies),)
    copy_ranges[grid](table.ctypes.data, copies, STEP=_STEP_WORDS)
