"""The numbered files of one stream, of which the newest few are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import BinaryIO

__all__ = ["NumberedFiles"]


class NumberedFiles:
    """Files ``stem-000001.jsonl``, ``stem-000002.jsonl``, ... in a directory.

    A process that starts goes on with the next number, so that no recording is overwritten.
    Several may write into one directory, each files of its own, and none removes what another
    still writes.

    Args:
        directory: Where they go; exists.
        stem: How their names begin.
        keep: Files to keep; the oldest beyond it are removed.
    """

    def __init__(self, directory: Path, stem: str, *, keep: int) -> None:
        self._directory = directory
        self._stem = stem
        self._keep = keep
        self._file: BinaryIO | None = None
        self.size_bytes = 0

    def begin(self) -> None:
        """Close the file at hand, start the next and remove the oldest beyond the limit.

        Raises:
            OSError: It cannot be made.
        """
        self.close()
        self._file = self._make()
        self.size_bytes = 0
        for old in self._numbers()[: -self._keep]:
            self._remove_if_idle(self._path(old))

    def write(self, line: bytes) -> None:
        """Append ``line`` to the file at hand, starting the first one if there is none.

        Raises:
            OSError: It cannot be written.
        """
        if self._file is None:
            self.begin()
        if self._file is not None:
            self._file.write(line)
            self.size_bytes += len(line)

    def flush(self) -> None:
        """Make what was written visible to readers.

        Raises:
            OSError: It cannot be written.
        """
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file at hand. Idempotent.

        Raises:
            OSError: What was buffered cannot be written; the file is closed nevertheless.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _make(self) -> BinaryIO:
        """Make the next file, and lock it for as long as it is open."""
        # Readable by its owner only, as the store is: a hash says whether a guess is right.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        while True:
            number = max(self._numbers(), default=0) + 1
            with contextlib.suppress(FileExistsError):  # another process was as fast
                file = os.fdopen(os.open(self._path(number), flags, 0o600), "wb")
                break
        _try_lock(file.fileno())
        return file

    @staticmethod
    def _remove_if_idle(path: Path) -> None:
        """Remove a file that nobody writes; one that went meanwhile is fine."""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _try_lock(file.fileno()):
                path.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:06}.jsonl"

    def _numbers(self) -> list[int]:
        """Return the numbers of the files that are there, ascending."""
        pattern = re.compile(rf"{self._stem}-(\d+)\.jsonl")
        found = (pattern.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; return False where another process has it locked.

    Where the file system has no locks, nobody has.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
