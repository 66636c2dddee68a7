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

__all__ = ["bulk_loading"]


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
