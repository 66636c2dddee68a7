"""Memory files, their mappings, and the heap, as the kernel and the C library provide them.

**Mappings.** The RAM tier is made from the prompts of users, and a core dump goes to whoever
looks into crashes. So no process that maps the tier has it in its dump.

**Page faults.** The pages of the RAM tier exist from the start. A process that maps the file
still meets a fault when it first touches a page, and so does the kernel when it reads from
disk into one. On a virtual machine such a fault took 2 us, half a second per GiB; the kernel
maps the same pages in 0.08 s per GiB when it is asked for many at once. So processes that
touch the tier have its pages mapped in the background, before the first loads need them.

**Garbage collection.** Python's collector looks for cycles whenever enough objects were made,
and takes longer the more objects live. To open a store of a million chunks makes millions of
objects that all stay, which is its worst case.
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
"""Takes some milliseconds, and as long may :meth:`PageMapper.close` wait."""
_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_LARGE_NBYTES: Final = 1 << 20


def open_anonymous(name: str, *, huge_pages: bool = False) -> int:
    """Create an empty memory file and return its descriptor, which no child inherits.

    Python has ``memfd_create`` only if the C library that it was built with had it. The Python
    that uv and conda install is built with an old one, so the C library at hand is asked then.

    Args:
        name: Shown in ``/proc/PID/maps``.
        huge_pages: Whether it is to have huge pages.

    Raises:
        OSError: The kernel refuses.
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

    Where the kernel cannot do this, or no thread starts, a page is mapped when it is touched.

    Args:
        address: Address of the mapping's first byte; a page begins there.
        nbytes: Length of the mapping. It must stay mapped until :meth:`close` returns.
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
        """Map no more pages. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # mmap.madvise would hold the interpreter's lock meanwhile.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in range(0, self._nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, self._nbytes - start)
            if self._closing or advise(self._address + start, nbytes, _POPULATE_WRITE):
                return


def set_malloc_mmap_threshold() -> None:
    """Have large blocks returned to the kernel whenever they are freed, in this process.

    GNU's malloc learns from the first large blocks that are freed to keep the next ones.
    """
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Stop the garbage collector meanwhile, and return free memory to the kernel afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        with contextlib.suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
