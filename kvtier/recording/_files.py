"""Numbered files of one recording. Only the newest few are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import BinaryIO

__all__ = ["NumberedFiles"]


class NumberedFiles:
    """Writes files ``stem-000001.jsonl``, ``stem-000002.jsonl``, ... in a directory.

    A new process continues with the next number, so no recording is overwritten. Several
    processes may write into one directory; a process never removes a file that another
    process is writing.

    Args:
        directory: The directory, which must exist.
        stem: The first part of the file names.
        keep: Number of files to keep. Older files are removed.
    """

    def __init__(self, directory: Path, stem: str, *, keep: int) -> None:
        self._directory = directory
        self._stem = stem
        self._keep = keep
        self._file: BinaryIO | None = None
        self.size_bytes = 0

    def begin(self) -> None:
        """Close the current file, create the next file and remove the oldest files.

        Raises:
            OSError: The file cannot be created.
        """
        self.close()
        self._file = self._make()
        self.size_bytes = 0
        for old in self._numbers()[: -self._keep]:
            self._remove_if_idle(self._path(old))

    def write(self, line: bytes) -> None:
        """Append ``line`` to the current file; create a file if there is none.

        Raises:
            OSError: The file cannot be written.
        """
        if self._file is None:
            self.begin()
        if self._file is not None:
            self._file.write(line)
            self.size_bytes += len(line)

    def flush(self) -> None:
        """Flush buffered lines to the file.

        Raises:
            OSError: The file cannot be written.
        """
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the current file. Idempotent.

        Raises:
            OSError: Buffered lines cannot be written. The file is closed anyway.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _make(self) -> BinaryIO:
        """Create, lock and return the next file; closing the file ends the lock."""
        # Readable by its owner only, like the cache: a hash can confirm a guess at a prompt.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        while True:
            number = max(self._numbers(), default=0) + 1
            with contextlib.suppress(
                FileExistsError
            ):  # another process created this file first
                file = os.fdopen(os.open(self._path(number), flags, 0o600), "wb")
                break
        _try_lock(file.fileno())
        return file

    @staticmethod
    def _remove_if_idle(path: Path) -> None:
        """Remove a file unless a process is writing it; ignore a missing file."""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _try_lock(file.fileno()):
                path.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:06}.jsonl"

    def _numbers(self) -> list[int]:
        """Return the numbers of the existing files, ascending."""
        pattern = re.compile(rf"{self._stem}-(\d+)\.jsonl")
        found = (pattern.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if another process has locked it.

    The result is True on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
