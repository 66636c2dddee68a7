"""System calls on files, and the alignment rules of O_DIRECT.

With O_DIRECT the file offset, the length and the address in memory must all be multiples of the
device's block size. Slots and their offsets are multiples of 4096 bytes. Callers check buffers
before each call, and copy through an aligned buffer if necessary.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.os.limits import free_disk_nbytes

__all__ = [
    "IOV_MAX",
    "PAGE_NBYTES",
    "BlockIo",
    "aligned_buffer",
    "is_aligned",
    "opened",
    "read_fully",
    "write_fully",
]

PAGE_NBYTES: Final = 4096
IOV_MAX: Final = 1024
"""Largest number of buffers of one vectored call on Linux."""


class BlockIo:
    """System calls on files, one method each. A test can make any call fail.

    Every method raises :class:`OSError`.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open ``path``; fail if it is a symbolic link. A new file has mode 0600."""
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if flags & os.O_CREAT:
            try:
                os.fchmod(fd, 0o600)  # the umask may have removed the owner's bits
            except OSError:
                os.close(fd)
                raise
        return fd

    def close(self, fd: int) -> None:
        """Close ``fd``; this also releases a lock that was taken through ``fd``."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into ``buffers``; return the number of bytes read, 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write ``buffers``; return the number of bytes written."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make the file ``nbytes`` long and reserve disk room for all of it."""
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Truncate the file to ``nbytes``."""
        os.ftruncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        """Wait until the written bytes would survive a power loss."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Wait until the file, or the directory's entries, would survive a power loss."""
        os.fsync(fd)

    def lock(self, fd: int) -> None:
        """Lock the open file exclusively; raise BlockingIOError if it is already locked."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def make_directory(self, path: Path) -> None:
        """Create a directory that only its owner may enter."""
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # the umask may have removed the owner's bits

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a small file."""
        return path.read_bytes()

    def rename(self, source: Path, destination: Path) -> None:
        """Rename ``source`` to ``destination`` atomically; an existing file is replaced."""
        source.replace(destination)

    def unlink(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def free_nbytes(self, directory: Path) -> int | None:
        """See :func:`kvtier.os.limits.free_disk_nbytes`."""
        return free_disk_nbytes(directory)

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open the database at ``path`` in autocommit mode."""
        return sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)


@contextlib.contextmanager
def opened(io: BlockIo, path: Path, flags: int) -> Iterator[int]:
    """Yield a descriptor of ``path``; close it when the ``with`` block ends."""
    fd = io.open(path, flags)
    try:
        yield fd
    finally:
        io.close(fd)


def aligned_buffer(nbytes: int) -> memoryview:
    """Return ``nbytes`` bytes of new memory at a page boundary, excluded from core dumps."""
    mapping = mmap.mmap(-1, nbytes)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return memoryview(mapping)


def is_aligned(view: memoryview) -> bool:
    """Return whether ``view`` is aligned for O_DIRECT."""
    if view.readonly:
        import numpy as np  # noqa: PLC0415 - `kvtier check` is faster without it

        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    else:  # slots are writable: this takes a seventh of the time
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % PAGE_NBYTES == 0


def read_fully(io: BlockIo, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill ``views`` from the file at ``offset``; return the number of bytes read.

    The number is less than the bytes of ``views`` only at the file's end.
    """
    done = 0
    rest = list(views)
    while rest:
        count = _whole_pages(io.preadv(fd, rest, offset + done))
        if count == 0:
            break
        done += count
        rest = _skip(rest, count)
    return done


def write_fully(io: BlockIo, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of ``views`` to a file at ``offset``; continue after short writes."""
    done = 0
    rest = list(views)
    while rest:
        count = _whole_pages(io.pwritev(fd, rest, offset + done))
        if count == 0:
            raise OSError(errno.EIO, "the device takes no more bytes")
        done += count
        rest = _skip(rest, count)


def _whole_pages(count: int) -> int:
    """Round ``count`` down to whole pages, because O_DIRECT continues only at a page boundary.

    The bytes after the last whole page are transferred again. A count below one page is
    returned unchanged: only a buffered call transfers so few bytes, and it can continue at any
    byte.
    """
    return (count - count % PAGE_NBYTES) or count


def _skip(views: list[memoryview], count: int) -> list[memoryview]:
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
