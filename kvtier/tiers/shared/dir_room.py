"""Keep the folders of a shared directory within their shares of the capacity.

Every engine limits the folders into which it writes. A folder into which no engine writes does
not grow. Two engines may evict from a folder at the same time: both choose the same files, and
removing a missing file is no failure. So no lock is needed that a dying engine could keep.

An engine lists a folder before its first put there. Afterwards the engine estimates the
folder's bytes: the listed bytes, plus the bytes of the engine's own puts since the listing. If
the folder grew faster between the last two listings, other engines write to the folder too. The
engine then scales up the bytes of its own puts.

The engine lists the folder again after its first put, and then whenever its puts have doubled
or the folder has grown by 1/20 of its share. If the folder is nearly full, the engine removes
the least recently used values. Until then, the engine refuses puts that do not fit.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.logs import get_logger
from kvtier.os.timed_calls import TimedCalls
from kvtier.tiers.shared.dir_io import DirIo, FileEntry
from kvtier.tiers.shared.dir_layout import TEMPORARY, VALUE, DirLayout

__all__ = ["DirRoom"]

logger = get_logger(__name__)

_LISTED_AFTER: Final = 0.05
"""Growth after which a folder is listed again, as a fraction of the folder's capacity."""
_FULL_FROM: Final = 0.9
"""Fraction of a folder's capacity from which the folder counts as nearly full. The rest is for
puts during the listing of the folder and the removal of files."""
_FIRST_LISTING_S: Final = 5.0
"""Longest time that a put waits for the first listing of its folders."""
_EVICTED_TO: Final = 0.8
_THREADS: Final = 4
"""Number of folders that are listed at the same time."""
_MOST_GROWTH: Final = 64.0
"""Largest assumed ratio of a folder's growth to the bytes of this engine's puts."""
_STALE_NS: Final = 3600 * 10**9
"""Age from which a temporary file counts as left behind by a dead engine."""


@dataclass(slots=True)
class _Folder:
    """This engine's estimate of the size of one folder.

    Attributes:
        listed_nbytes: Bytes of the folder's files after the last listing and its evictions.
        put_nbytes: Bytes that this engine has added since the last listing.
        put_before_nbytes: Bytes that this engine had added before the last listing.
        writing_nbytes: Bytes that this engine is putting now.
        growth: Bytes by which the folder grows per byte that this engine adds.
    """

    listed_nbytes: int
    put_nbytes: int = 0
    put_before_nbytes: int = 0
    writing_nbytes: int = 0
    growth: float = 1.0

    def estimate(self) -> float:
        """Return the estimated size of the folder in bytes."""
        return self.listed_nbytes + (self.put_nbytes + self.writing_nbytes) * self.growth

    def is_due(self, share_nbytes: int) -> bool:
        """Return whether to list the folder again; ``share_nbytes`` is its capacity."""
        grown = self.put_nbytes * self.growth
        return grown >= min(_LISTED_AFTER * share_nbytes, max(self.put_before_nbytes, 1))

    def learn_growth(self, found_nbytes: int, put_nbytes: int) -> None:
        """Compute ``growth`` from a new listing of the folder.

        The folder now has ``found_nbytes`` bytes. This engine has added ``put_nbytes`` bytes
        since the last listing.
        """
        if put_nbytes > 0:
            growth = (found_nbytes - self.listed_nbytes) / put_nbytes
            self.growth = min(max(growth, 1.0), _MOST_GROWTH)


class DirRoom:
    """Admits values to the folders of a shared directory, and evicts from them."""

    def __init__(self, layout: DirLayout, io: DirIo) -> None:
        self._layout = layout
        self._folders: dict[Path, _Folder] = {}
        self._keeping: dict[Path, asyncio.Task[None]] = {}
        self._is_failing = False
        self._io = io
        # Their threads are daemons, so that a hanging call delays no exit.
        self._threads = [TimedCalls(name="kvtier-shared-dir") for _ in range(_THREADS)]
        self._idle = asyncio.LifoQueue[TimedCalls]()  # so that few threads start
        for thread in self._threads:
            self._idle.put_nowait(thread)

    async def admit(self, folders: Sequence[Path], nbytes: int) -> list[bool]:
        """Return for each value whether it may be put; call :meth:`finish` after each put.

        A value may not be put if its folder cannot be listed in time.

        Args:
            folders: Folder of each value.
            nbytes: Bytes of each value's file.

        Raises:
            OSError: No folder can be listed.

        Cancellation:
            Has no effect.
        """
        if unknown := [folder for folder in folders if folder not in self._folders]:
            listings = {self._keep_soon(folder) for folder in unknown}
            await asyncio.wait(listings, timeout=_FIRST_LISTING_S)
            if self._folders.keys().isdisjoint(folders):
                raise OSError(errno.EIO, f"cannot list {unknown[0]}")
        return [folder in self._folders and self._admit(folder, nbytes) for folder in folders]

    def finish(self, path: Path, nbytes: int, *, added_nbytes: int) -> None:
        """Record the end of an admitted put of ``nbytes`` to the folder ``path``.

        The put made the folder grow by ``added_nbytes``.
        """
        folder = self._folders[path]
        folder.writing_nbytes -= nbytes
        folder.put_nbytes += added_nbytes
        if folder.is_due(self._layout.folder_nbytes):
            _ = self._keep_soon(path)

    async def aclose(self) -> None:
        """Stop without waiting for hanging calls. Idempotent."""
        if tasks := list(self._keeping.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for thread in self._threads:
            thread.close()

    def _admit(self, path: Path, nbytes: int) -> bool:
        folder = self._folders[path]
        fits = folder.estimate() + nbytes <= self._layout.folder_nbytes
        if fits:
            folder.writing_nbytes += nbytes
        else:
            _ = self._keep_soon(path)
        return fits

    def _keep_soon(self, path: Path) -> asyncio.Task[None]:
        """Return the task that lists a folder and evicts from it; start one if none runs."""
        task = self._keeping.get(path)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._keep(path))
            self._keeping[path] = task
            task.add_done_callback(lambda _: self._keeping.pop(path))
        return task

    async def _keep(self, path: Path) -> None:
        thread = await self._idle.get()
        try:
            await self._keep_folder(path, thread)
            while self._folders[path].is_due(self._layout.folder_nbytes):  # it grew meanwhile
                await self._keep_folder(path, thread)
        except OSError as error:
            if not self._is_failing:
                logger.warning("cannot list or evict the chunks of %s: %s", path, error)
            self._is_failing = True
        else:
            self._is_failing = False
        finally:
            self._idle.put_nowait(thread)

    async def _keep_folder(self, path: Path, thread: TimedCalls) -> None:
        """List a folder, and evict from it if it is nearly full."""
        folder = self._folders.get(path)
        put_nbytes = folder.put_nbytes if folder else 0
        try:
            listing = thread.begin(lambda: self._io.list_files(path))
            files = await asyncio.wrap_future(listing)
        except FileNotFoundError:
            files = []
        nbytes = sum(file.nbytes for file in files)
        if folder is None:
            folder = self._folders[path] = _Folder(nbytes)
        folder.learn_growth(nbytes, put_nbytes)
        if victims := _choose_victims(files, self._layout.folder_nbytes):
            paths = [path / file.name for file in victims]
            removal = thread.begin(lambda: _remove_all(self._io, paths))
            await asyncio.wrap_future(removal)
            nbytes -= sum(file.nbytes for file in victims)
        folder.listed_nbytes = nbytes
        folder.put_nbytes -= put_nbytes
        folder.put_before_nbytes += put_nbytes


def _choose_victims(files: list[FileEntry], share_nbytes: int) -> list[FileEntry]:
    """Return the files to remove: stale temporary files; if nearly full, also old values."""
    # All times are the file server's, and its clock has reached the latest of them.
    now_ns = max((file.modified_ns for file in files), default=0)
    victims = [
        file
        for file in files
        if file.name.endswith(TEMPORARY) and file.modified_ns < now_ns - _STALE_NS
    ]
    left_nbytes = sum(file.nbytes for file in files) - sum(file.nbytes for file in victims)
    if left_nbytes < _FULL_FROM * share_nbytes:
        return victims
    values = [file for file in files if file.name.endswith(VALUE)]
    for file in sorted(values, key=lambda file: (file.modified_ns, file.name)):
        if left_nbytes <= _EVICTED_TO * share_nbytes:
            break
        victims.append(file)
        left_nbytes -= file.nbytes
    return victims


def _remove_all(io: DirIo, paths: Sequence[Path]) -> None:
    for path in paths:
        io.unlink(path)
