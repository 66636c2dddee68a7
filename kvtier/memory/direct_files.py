"""Read files straight into the memory of a device.

:class:`DirectFiles` opens the files. One implementation uses kvikio and reads into a GPU
(:mod:`kvtier.memory.kvikio_files`). The other, :class:`PosixFiles`, reads into memory of this
process; tests and ``kvtier replay`` use it.

A worker opens a tier's slot file by its path. The worker then checks that this is the same file
that the tier's process has open.
"""

from __future__ import annotations

import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from kvtier.errors import TierUnavailableError
from kvtier.types import SlotFileId

__all__ = [
    "DirectFile",
    "DirectFiles",
    "DirectRead",
    "PosixFiles",
    "aligned",
    "open_slot_file",
]


class DirectRead(NamedTuple):
    """A read of consecutive bytes.

    Attributes:
        offset: Byte offset in the file.
        into: Contiguous int8 memory on the device; the read fills all of it.
    """

    offset: int
    into: torch.Tensor


class DirectFile(ABC):
    """An open file. Its methods block; one thread at a time may call them."""

    @abstractmethod
    def read(self, reads: Sequence[DirectRead]) -> list[str]:
        """Read the bytes of all ``reads``.

        Returns:
            For each read an error message, or an empty string if all its bytes were read. When
            this method returns, every read has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class DirectFiles(ABC):
    """Opens files for one device."""

    @abstractmethod
    def open(self, path: str) -> DirectFile:
        """Open the file at ``path`` for reading.

        Raises:
            OSError: The file cannot be opened.
            RuntimeError: The library cannot read the file.
        """

    @abstractmethod
    def staging_memory(self, nbytes: int) -> torch.Tensor:
        """Return int8 device memory for reads, aligned to 4096 bytes.

        Raises:
            RuntimeError: There is not enough memory.
        """

    @abstractmethod
    def release(self, memory: torch.Tensor) -> None:
        """Unregister memory from :meth:`staging_memory`, before the caller frees it."""


def open_slot_file(files: DirectFiles, wanted: SlotFileId) -> DirectFile:
    """Open the slot file of a tier.

    Raises:
        TierUnavailableError: The file cannot be opened, or its path leads to another file.
    """
    try:
        with _opened(wanted.path) as descriptor:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != (wanted.device, wanted.inode):
                raise TierUnavailableError(wanted.tier, f"{wanted.path} is another file now")
            if not stat.S_ISREG(found.st_mode):
                raise TierUnavailableError(wanted.tier, f"{wanted.path} is not a regular file")
            # By the descriptor, because the path may lead to another file by now.
            return files.open(f"/proc/self/fd/{descriptor}")
    except (OSError, RuntimeError) as error:
        raise TierUnavailableError(wanted.tier, f"{wanted.path}: {error}") from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class PosixFiles(DirectFiles):
    """Reads files into memory of this process; bypasses the page cache if possible."""

    @override
    def open(self, path: str) -> DirectFile:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without O_DIRECT
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _PosixFile(descriptor)

    @override
    def staging_memory(self, nbytes: int) -> torch.Tensor:
        return aligned(torch.empty(nbytes + _PAGE_NBYTES, dtype=torch.int8), nbytes)

    @override
    def release(self, memory: torch.Tensor) -> None:
        pass


class _PosixFile(DirectFile):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @override
    def read(self, reads: Sequence[DirectRead]) -> list[str]:
        return [self._read(each) for each in reads]

    def _read(self, read: DirectRead) -> str:
        view = read.into.numpy().data.cast("B")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], read.offset + done)
            except OSError as error:
                return error.strerror or str(error)
            if not count:
                return f"the file ends after {done} of {len(view)} bytes"
            done += count
        return ""

    @override
    def close(self) -> None:
        os.close(self._descriptor)


_PAGE_NBYTES = 4096


def aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` bytes of ``memory``, from its first address divisible by 4096."""
    start = -memory.data_ptr() % _PAGE_NBYTES
    return memory[start : start + nbytes]
