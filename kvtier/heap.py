"""What a store of a million chunks does to Python's heap while it is opened.

The garbage collector looks for cycles whenever enough objects were made, and the more objects
live, the longer it looks. Making millions of objects that all live on is its worst case: most
of the time goes into looking. And what was needed only meanwhile is given back to the
allocator, not to the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Final

__all__ = ["bulk_loading", "keep_large_blocks_apart"]

_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_LARGE_NBYTES: Final = 1 << 20


def keep_large_blocks_apart() -> None:
    """Have large blocks given back to the machine whenever they are freed, in this process.

    GNU's malloc learns from the first large blocks that are freed to keep the next ones.
    """
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


@contextlib.contextmanager
def bulk_loading() -> Iterator[None]:
    """Keep the garbage collector still, and give the machine back what is free afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        with contextlib.suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
