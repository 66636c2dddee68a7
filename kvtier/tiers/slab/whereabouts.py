"""Whether the next engine would find the files that this one has open.

Open files go on working when somebody moves their directory, or puts another one in its place.
Only whoever opens the path anew gets something else, and of a store that is the next engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvtier.logs import get_logger

__all__ = ["Whereabouts"]

logger = get_logger(__name__)

_LOOK_EVERY_S: Final = 1.0


class Whereabouts:
    """Says when the paths of open files stop leading to them, and when they do so again.

    Args:
        tier: The tier's name, for messages.
        paths: The files, just opened.
        is_removed: Tells of the first that it has no name any more, so that nobody can put it
            back; may raise :class:`OSError`.
        clock: Returns seconds.
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
        self._astray: Path | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        for path in map(Path.absolute, paths):
            with contextlib.suppress(OSError):  # of this one nothing is said
                self._files[path] = _identity(path)

    def look(self) -> None:
        """Look at the paths, at most once a second. Blocks as long as the disk does."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + _LOOK_EVERY_S
            self.look_once_more()

    def look_once_more(self) -> None:
        """Look at the paths, whenever that was last done: what is said later nobody hears."""
        files = self._files.items()
        astray = next((path for path, file in files if not _leads_to(path, file)), None)
        if self._astray is None and astray is not None:
            self._tell_of(astray)
        elif self._astray is not None and astray is None:
            logger.warning("tier %s: %s is the file in use again", self._tier, self._astray)
        self._astray = astray

    def _tell_of(self, astray: Path) -> None:
        try:
            removed = self._is_removed()
        except OSError:
            removed = False
        if removed:
            logger.error(
                "tier %s: %s was removed while in use: chunks are stored and served as before, "
                "but take their room until this engine ends, and are lost then",
                self._tier,
                astray,
            )
            return
        logger.warning(
            "tier %s: %s is not the file that is in use any more: it, or its directory, "
            "was moved, replaced or removed; chunks are stored and served as before, but "
            "the next engine does not find them unless it is put back",
            self._tier,
            astray,
        )

    def leave_out(self, path: Path) -> None:
        """Say nothing more of ``path``, which is moved away on purpose."""
        # In place of a change: another thread may be looking at them.
        files = self._files.items()
        self._files = {at: file for at, file in files if at != path.absolute()}


def _leads_to(path: Path, file: tuple[int, int]) -> bool:
    """Return whether ``path`` leads to ``file``, which it does if the disk does not say."""
    try:
        return _identity(path) == file
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
