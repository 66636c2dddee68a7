"""System calls on the files of a shared directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from kvtier.os.block_io import BlockIo

__all__ = ["DirIo", "FileEntry"]


class FileEntry(NamedTuple):
    """Name, size and modification time (in ns, by the server's clock) of a file."""

    name: str
    nbytes: int
    modified_ns: int


class DirIo(BlockIo):
    """The system calls of a shared directory, one method each. A test can make any call fail.

    The process's umask decides the modes of new files and folders. Every method raises
    :class:`OSError`.
    """

    @override
    def open(self, path: Path, flags: int) -> int:
        """Open ``path``; fail if it is a symbolic link."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    @override
    def make_directory(self, path: Path) -> None:
        """Create a directory."""
        path.mkdir()

    def status(self, path: Path) -> os.stat_result:
        """Return the status of a file or a directory."""
        return path.stat()

    def status_of(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def may_create_in(self, directory: Path) -> bool:
        """Return whether this process may create files in ``directory``."""
        return os.access(directory, os.W_OK | os.X_OK)

    def touch(self, fd: int) -> None:
        """Set the open file's time of modification to now, by the file server's clock."""
        os.utime(fd)

    def link(self, source: Path, destination: Path) -> None:
        """Create a hard link to ``source``; raise FileExistsError if ``destination`` exists."""
        destination.hardlink_to(source)

    def list_files(self, folder: Path) -> list[FileEntry]:
        """Return the regular files of ``folder``; omit files that are removed meanwhile."""
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        files.append(FileEntry(entry.name, status.st_size, status.st_mtime_ns))
                except FileNotFoundError:
                    continue
        return files
