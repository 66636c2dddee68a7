"""Location check: warns when the paths of open files lead to other files.

Open files keep working when their directory is moved or replaced. But the next engine would
open other files at these paths.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvtier.logs import get_logger

__all__ = ["LocationCheck"]

logger = get_logger(__name__)

_INTERVAL_S: Final = 1.0


class LocationCheck:
    """Logs when a path no longer leads to the open file, and when it leads there again.

    ``is_removed`` returns whether the first of ``paths`` has no directory entry left and cannot
    be moved back; it may raise :class:`OSError`.
    """

    def __init__(
        self,
        tier: str,
        paths: Sequence[Path],
        is_removed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._is_removed = is_removed
        self._clock = clock
        self._due_s = clock()
        self._missing: Path | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        for path in map(Path.absolute, paths):
            with contextlib.suppress(OSError):  # this path is not checked
                self._files[path] = _identity(path)

    def check_if_due(self) -> None:
        """Check the paths, at most once a second. This call waits for the disk."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + _INTERVAL_S
            self.check()

    def check(self) -> None:
        """Check the paths now, and log changes."""
        files = self._files.items()
        missing = next((path for path, file in files if not _leads_to(path, file)), None)
        if self._missing is None and missing is not None:
            self._log(missing)
        elif self._missing is not None and missing is None:
            logger.warning(
                "tier %s: %s leads to the file in use again", self._tier, self._missing
            )
        self._missing = missing

    def _log(self, missing: Path) -> None:
        try:
            removed = self._is_removed()
        except OSError:
            removed = False
        if removed:
            logger.error(
                "tier %s: %s was removed while in use: chunks are stored and served as before, "
                "but take their room until this engine ends, and are lost then",
                self._tier,
                missing,
            )
            return
        logger.warning(
            "tier %s: %s no longer leads to the file in use: it or its directory was moved, "
            "replaced or removed; chunks are stored and served as before, but the next engine "
            "does not find them unless it is put back",
            self._tier,
            missing,
        )

    def leave_out(self, path: Path) -> None:
        """Stop checking ``path``, which is moved on purpose."""
        # A new dictionary, because another thread may be iterating over the old one.
        files = self._files.items()
        self._files = {at: file for at, file in files if at != path.absolute()}


def _leads_to(path: Path, file: tuple[int, int]) -> bool:
    """Return whether ``path`` leads to ``file``.

    An error other than a missing file or directory counts as True: the path may be unchanged.
    """
    try:
        return _identity(path) == file
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
