"""A file in a tier's directory that has no name, so that nothing can leave it behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Literal

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.tiers.slab.direct_io import PAGE_NBYTES, BlockIo
from kvtier.tiers.slab.slots import SlotFile, SlotFileSpec

__all__ = ["NamelessIo", "direct_io_refusal", "scratch_spec"]

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NamelessIo(BlockIo):
    """The slab's system calls on one file, which loses its name as soon as it is made.

    A slot file is opened twice, the second time with O_DIRECT; the second opening goes through
    the descriptor of the first. However the process ends, the disk gets its room back.
    """

    def __init__(self) -> None:
        self._fd = -1

    @override
    def open(self, path: Path, flags: int) -> int:
        if self._fd < 0:
            self._fd = super().open(path, flags | os.O_CREAT | os.O_EXCL)
            self.unlink(path)
            return self._fd
        return os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC)

    @override
    def close(self, fd: int) -> None:
        if fd == self._fd:
            self._fd = -1  # the number is soon another file's
        super().close(fd)

    def drop_cached(self) -> None:
        """Ask the kernel to forget the file's pages, so that reads go to the disk."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def scratch_spec(
    place: Path,
    *,
    slots: int,
    slot_nbytes: int,
    direct_io: Literal["auto", "require", "off"],
) -> SlotFileSpec:
    """Describe a scratch file in the directory ``place``."""
    path = place / f".kvtier-doctor-{os.getpid()}"
    return SlotFileSpec("doctor", path, slots, slot_nbytes, direct_io)


def direct_io_refusal(place: Path, *, io: BlockIo | None = None) -> str:
    """Return why files in ``place`` cannot be read and written directly; empty if they can.

    Raises:
        ConfigError: There is not even room for a page.
        OSError: The file system failed otherwise.
    """
    spec = scratch_spec(place, slots=1, slot_nbytes=PAGE_NBYTES, direct_io="require")
    try:
        file = SlotFile.open(spec, io or NamelessIo())
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno in _NO_ROOM:
            raise
        return cause.strerror or str(cause)
    file.close()
    return ""
