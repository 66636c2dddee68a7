"""Memory files, shared mappings, and the heap.

**Mappings.** The RAM tier holds users' prompts, and core dumps are read by people who debug
crashes. So every mapping of the tier is excluded from core dumps.

**Page faults.** The pages of the RAM tier exist from the start. But every process that maps the
file has page faults: one at its first access to a page, and one at its first read from disk
into the page. On a virtual machine a fault took 2 us, or half a second per GiB. The kernel can
map many pages at once in 0.08 s per GiB. So processes that use the tier map its pages in the
background, before the first loads need them.

**Garbage collection.** Python's collector searches for cycles after a certain number of new
objects. The more objects exist, the longer a search takes. The worst case is a start with a
million chunks: it creates millions of objects and frees none.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

__all__ = [
    "PageMapper",
    "map_shared",
    "open_anonymous",
    "paused_garbage_collection",
    "set_malloc_mmap_threshold",
]

_CLOEXEC: Final = 1  # linux/memfd.h, as the next one
_HUGETLB: Final = 4
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of linux/mman.h, since 5.14
_PIECE_NBYTES: Final = 64 << 20
"""Number of bytes to map per call. A call takes some milliseconds, and :meth:`PageMapper.close`
waits for at most one call."""
_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_LARGE_NBYTES: Final = 1 << 20


def open_anonymous(name: str, *, huge_pages: bool = False) -> int:
    """Create an empty memory file and return its descriptor, which no child inherits.

    A Python built with an old C library, like those of uv and conda, has no ``memfd_create``.
    Then this function calls the C library of this machine.

    Args:
        name: Shown in ``/proc/PID/maps``.
        huge_pages: Whether to use huge pages.

    Raises:
        OSError: The kernel refused.
    """
    flags = _CLOEXEC | (_HUGETLB if huge_pages else 0)
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    create = ctypes.CDLL(None, use_errno=True).memfd_create
    create.argtypes = (ctypes.c_char_p, ctypes.c_uint)
    descriptor = int(create(name.encode(), flags))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def map_shared(descriptor: int) -> mmap.mmap:
    """Map a whole shared memory file, and exclude the mapping from core dumps.

    The file may be longer than its used part, because only whole huge pages can be unmapped.

    Raises:
        OSError: The file cannot be mapped.
    """
    mapping = mmap.mmap(descriptor, 0)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


class PageMapper:
    """Maps the pages of a shared mapping in a background thread.

    If the kernel does not support this, or the thread does not start, each page is mapped at
    its first access.

    Args:
        address: Address of the mapping's first byte, at a page boundary.
        nbytes: Length of the mapping, which must exist until :meth:`close` returns.
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
        """Wait until the thread has mapped all pages or given up."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop mapping pages. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # mmap.madvise would hold the interpreter lock.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in range(0, self._nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, self._nbytes - start)
            if self._closing or advise(self._address + start, nbytes, _POPULATE_WRITE):
                return


def set_malloc_mmap_threshold() -> None:
    """Make malloc return large blocks to the kernel when they are freed.

    Otherwise GNU's malloc raises its threshold when a large block is freed. From then on malloc
    keeps freed blocks that are smaller than the new threshold.
    """
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in a ``with`` statement; then return memory to the kernel."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        with contextlib.suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
