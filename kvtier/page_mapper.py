"""Shared memory mapped: kept out of core dumps, and its pages ahead of their first use.

The RAM tier is made from the prompts of users, and a core dump goes to whoever looks into
crashes, so no process that maps the tier has it in its dump.

The RAM tier's pages exist from the start, but a process that maps the file meets each of them
as a fault when it first touches it, and the kernel does so too, page by page, when it reads
into one directly. On a virtual machine such a fault was measured to take 2 us: half a second
per GiB, beside 0.08 s when the kernel is asked for many at once. Until an engine has been once
around its RAM tier every chunk would pay for that, in the first loads after a restart above
all, so processes that touch the tier have its pages mapped in the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Final

__all__ = ["PageMapper", "map_shared"]

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of linux/mman.h, since 5.14
_PIECE_NBYTES: Final = 64 << 20
"""Some milliseconds: as long may :meth:`PageMapper.close` wait."""


def map_shared(descriptor: int) -> mmap.mmap:
    """Map all of a memory file that other processes map too; no core dump has it.

    The file may be longer than what is used of it: huge pages are unmapped as a whole.

    Raises:
        OSError: It cannot be mapped.
    """
    mapping = mmap.mmap(descriptor, 0)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


class PageMapper:
    """Maps the pages of a shared mapping in a thread of its own.

    A kernel that cannot, or allows no thread, is left alone: pages are then mapped as they are
    touched.

    Args:
        address: Of the mapping's first byte, at a page's begin.
        nbytes: Its length. It must stay mapped until :meth:`close` returns.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._nbytes = nbytes
        self._closing = False
        self._thread: threading.Thread | None = None
        thread = threading.Thread(target=self._run, name="kvtier-pages", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def join(self) -> None:
        """Wait until every page is mapped, or cannot be."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Map no more. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # Not by mmap.madvise, which would hold the interpreter's lock meanwhile.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in range(0, self._nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, self._nbytes - start)
            if self._closing or advise(self._address + start, nbytes, _POPULATE_WRITE):
                return
