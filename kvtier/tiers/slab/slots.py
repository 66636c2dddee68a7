"""The slot file of an NVMe tier: allocated in full, used with O_DIRECT if possible."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from kvtier.errors import ConfigError
from kvtier.logs import get_logger
from kvtier.os.block_io import (
    PAGE_NBYTES,
    BlockIo,
    aligned_buffer,
    is_aligned,
    read_fully,
    write_fully,
)
from kvtier.units import approximate_size

__all__ = ["SlotFile", "SlotFileSpec", "no_room"]

logger = get_logger(__name__)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_DIRECT_IO: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class SlotFileSpec:
    """How to open a slot file; ``slot_nbytes`` is a multiple of 4096."""

    tier: str
    path: Path
    capacity_slots: int
    slot_nbytes: int
    direct_io: Literal["auto", "require", "off"]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.capacity_slots * self.slot_nbytes


class SlotFile:
    """An open slot file. Several threads may call its methods.

    The methods block, and raise :class:`OSError` if the medium fails.

    Attributes:
        path: Path of the file.
        capacity_slots: Number of slots.
        direct: Whether I/O bypasses the page cache.
        found_nbytes: Bytes of the file before it was opened; 0 for a new file.
        failed_syncs: Number of failed calls of :meth:`sync`.
    """

    def __init__(self, spec: SlotFileSpec, io: BlockIo, fd: int, *, found_nbytes: int) -> None:
        self._spec = spec
        self._io = io
        self._fd = fd
        self._slot_nbytes = spec.slot_nbytes
        self.path = spec.path
        self.capacity_slots = spec.capacity_slots
        self.direct = False
        self.failed_syncs = 0
        self.found_nbytes = found_nbytes

    @classmethod
    def open(cls, spec: SlotFileSpec, io: BlockIo) -> Self:
        """Open or create the file without changing its size.

        Call :meth:`truncate` and :meth:`reserve` before the first read or write.
        """
        fd = io.open(spec.path, os.O_RDWR | os.O_CREAT)
        try:
            found_nbytes = os.fstat(fd).st_size
        except BaseException:
            io.close(fd)
            raise
        return cls(spec, io, fd, found_nbytes=found_nbytes)

    def truncate(self) -> None:
        """Truncate the file if it is longer than the capacity."""
        if self.found_nbytes > self._spec.nbytes:
            self._io.truncate(self._fd, self._spec.nbytes)

    def reserve(self) -> None:
        """Reserve room for the whole file, and use O_DIRECT if possible.

        Raises:
            ConfigError: The disk has too little room, or O_DIRECT is required and unsupported.
        """
        self._allocate()
        if self._spec.direct_io != "off":
            self._go_direct()

    @classmethod
    def open_to_read(cls, path: Path, slot_nbytes: int, io: BlockIo) -> Self:
        """Open a slot file to read, with O_DIRECT if possible; an engine may have it open."""
        fd = io.open(path, os.O_RDONLY)
        try:
            found_nbytes = os.fstat(fd).st_size
        except BaseException:
            io.close(fd)
            raise
        spec = SlotFileSpec("", path, found_nbytes // slot_nbytes, slot_nbytes, "auto")
        file = cls(spec, io, fd, found_nbytes=found_nbytes)
        with contextlib.suppress(OSError):
            direct_fd = io.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                io.preadv(direct_fd, [aligned_buffer(PAGE_NBYTES)], 0)
            except OSError:
                io.close(direct_fd)
                raise
            file._fd, file.direct = direct_fd, True
            io.close(fd)
        return file

    def read(self, first_slot: int, views: Sequence[memoryview]) -> int:
        """Read consecutive slots into ``views``; return how many were read completely.

        The number is less than ``len(views)`` only at the file's end.
        """
        if not self._needs_bounce(views):
            return self._read(first_slot, views)
        bounce = aligned_buffer(len(views) * self._slot_nbytes)
        parts = self._parts(bounce)
        whole = self._read(first_slot, parts)
        for view, part in zip(views, parts, strict=True):
            view[:] = part
        return whole

    def write(self, first_slot: int, views: Sequence[memoryview]) -> None:
        """Write consecutive slots from ``views``, one per slot."""
        if self._needs_bounce(views):
            parts = self._parts(aligned_buffer(len(views) * self._slot_nbytes))
            for view, part in zip(views, parts, strict=True):
                part[:] = view
            views = parts
        write_fully(self._io, self._fd, views, first_slot * self._slot_nbytes)

    def sync(self) -> None:
        """Wait until all written bytes would survive a power loss.

        Raises:
            OSError: Some bytes were not written, perhaps those of another caller. The kernel
                reports a failure to one caller only. So every caller compares
                :attr:`failed_syncs` before its writes and after the sync.
        """
        try:
            self._io.sync_data(self._fd)
        except OSError:
            self.failed_syncs += 1
            raise

    def identity(self) -> tuple[int, int]:
        """Return the device number and the inode number of the file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def is_in_place(self) -> bool:
        """Return whether the path leads to this file; True if the file system cannot tell."""
        try:
            status = self.path.stat()
        except OSError as error:
            return error.errno not in {errno.ENOENT, errno.ENOTDIR}
        return (status.st_dev, status.st_ino) == self.identity()

    def is_removed(self) -> bool:
        """Return whether the file has no directory entry left, so that closing deletes it."""
        return not os.fstat(self._fd).st_nlink

    def close(self) -> None:
        """Close the file."""
        self._io.close(self._fd)

    def _read(self, first_slot: int, views: Sequence[memoryview]) -> int:
        offset = first_slot * self._slot_nbytes
        return read_fully(self._io, self._fd, views, offset) // self._slot_nbytes

    def _needs_bounce(self, views: Sequence[memoryview]) -> bool:
        return self.direct and not all(map(is_aligned, views))

    def _parts(self, buffer: memoryview) -> list[memoryview]:
        step = self._slot_nbytes
        return [buffer[start : start + step] for start in range(0, len(buffer), step)]

    def _allocate(self) -> None:
        nbytes, status = self._spec.nbytes, os.fstat(self._fd)
        if status.st_size < nbytes or status.st_blocks * 512 < nbytes:
            try:
                self._io.allocate(self._fd, nbytes)
            except OSError as error:
                # A failed allocation may keep the room it got.
                self._io.truncate(self._fd, status.st_size)
                if error.errno not in _NO_ROOM:
                    raise
                raise no_room(self._spec, self._io.free_nbytes(self.path.parent)) from error

    def _go_direct(self) -> None:
        try:
            direct_fd = self._open_direct()
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            self._stay_buffered(error)
            return
        # First, so that the buffered descriptor is not closed twice if its closing fails.
        buffered_fd, self._fd = self._fd, direct_fd
        self.direct = True
        self._io.close(buffered_fd)

    def _open_direct(self) -> int:
        """Open the file with O_DIRECT, and check that reads and writes work.

        Some file systems accept the flag but refuse the I/O. The check reads a page and writes
        the same bytes back, so an interruption is harmless.
        """
        fd = self._io.open(self.path, os.O_RDWR | os.O_DIRECT)
        page = aligned_buffer(PAGE_NBYTES)
        try:
            if self._io.preadv(fd, [page], 0) == PAGE_NBYTES:
                self._io.pwritev(fd, [page], 0)
        except OSError as error:
            # A bad sector says nothing about O_DIRECT; reads of its slot will report it.
            if error.errno in _NO_DIRECT_IO:
                self._io.close(fd)
                raise
        return fd

    def _stay_buffered(self, error: OSError) -> None:
        if self._spec.direct_io == "require":
            raise ConfigError(
                f"tier {self._spec.tier}: the file system of {self.path} has no O_DIRECT "
                f"({error.strerror}); use a local ext4 or xfs, or set direct_io: auto"
            ) from error
        logger.warning(
            "tier %s: the file system of %s has no O_DIRECT (%s); going through the page "
            "cache, which is slower and takes memory from the engine",
            self._spec.tier,
            self.path,
            error.strerror,
        )


def no_room(spec: SlotFileSpec, free_nbytes: int | None, index_nbytes: int = 0) -> ConfigError:
    """Return the error for a slot file and index that the disk cannot hold."""
    index = f", with {approximate_size(index_nbytes)} for the index," if index_nbytes else ""
    free = "too little" if free_nbytes is None else approximate_size(free_nbytes)
    return ConfigError(
        f"tier {spec.tier}: capacity of {approximate_size(spec.nbytes)}{index} does not fit: "
        f"{spec.path.parent} has {free} free; lower capacity or make room"
    )
