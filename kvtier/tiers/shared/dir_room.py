"""Keeps the folders of a shared directory within their shares of the capacity.

Every engine does so for the folders into which it writes; a folder without writers does not
grow. Two engines may evict from a folder at the same time: both choose the same files, and an
already removed file is no failure. So the directory needs no lock, which a dead engine might
hold.

An engine lists a folder before its first put. Afterwards it estimates the folder's size: the
listed bytes plus the bytes that it has put since. If the folder grew faster between the last
two listings, other engines write to it too, and the estimate grows at that rate. The engine
lists the folder again after its first put, then each time its puts double, at the latest when
the folder grew by 1/20 of its share. If the folder is nearly full, the engine removes its least
recently used values. A put that does not fit is refused.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import aiofiles.os
from typing_extensions import override

from kvtier.logs import get_logger
from kvtier.os.timed_calls import TimedCalls
from kvtier.tiers.shared.dir_io import DirIo, FileEntry
from kvtier.tiers.shared.dir_layout import TEMPORARY, VALUE, DirLayout

__all__ = ["DirRoom"]

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LISTED_AFTER: Final = 0.05
"""Growth after which a folder is listed again, as a fraction of its share of the capacity."""
_FULL_FROM: Final = 0.95
_FIRST_LISTING_S: Final = 5.0
"""Longest wait of a put for the listing of folders that this engine has not used before."""
_EVICTED_TO: Final = 0.9
_MOST_GROWTH: Final = 64.0
"""Largest factor by which a folder is assumed to grow faster than this engine's puts."""
_STALE_NS: Final = 3600 * 10**9
"""Age from which a temporary file belongs to a dead engine."""


class _OneThread(Executor):
    """Runs one call at a time on a daemon thread, which a hanging file server may block."""

    def __init__(self) -> None:
        self._calls = TimedCalls(name="kvtier-shared-dir")

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._calls.begin(functools.partial(fn, *args, **kwargs))

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._calls.close()


@dataclass(slots=True)
class _Folder:
    """What this engine knows about the size of a folder.

    Attributes:
        listed_nbytes: Bytes of the folder's files after the last listing.
        put_nbytes: Bytes that this engine has put since the last listing.
        put_before_nbytes: Bytes that this engine put before the last listing.
        writing_nbytes: Bytes that this engine is putting now.
        growth: Bytes by which the folder grows per byte that this engine puts.
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
        """Return whether this engine must list the folder again.

        Args:
            share_nbytes: Bytes that the folder may have.
        """
        grown = self.put_nbytes * self.growth
        return grown >= min(_LISTED_AFTER * share_nbytes, max(self.put_before_nbytes, 1))

    def learn_growth(self, found_nbytes: int, put_nbytes: int) -> None:
        """Update the growth after a new listing.

        Args:
            found_nbytes: Bytes of all files.
            put_nbytes: Bytes that this engine put between the listings.
        """
        if put_nbytes:
            growth = (found_nbytes - self.listed_nbytes) / put_nbytes
            self.growth = min(max(growth, 1.0), _MOST_GROWTH)


class DirRoom:
    """Admits values to the folders of a shared directory, and evicts from them.

    Args:
        layout: The directory.
        io: System calls.
    """

    def __init__(self, layout: DirLayout, io: DirIo) -> None:
        self._layout = layout
        self._folders: dict[Path, _Folder] = {}
        self._due: dict[Path, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._executor = _OneThread()
        self._list = aiofiles.os.wrap(io.list_files)
        self._remove = aiofiles.os.wrap(functools.partial(_remove_all, io))

    async def admit(self, folders: Sequence[Path], nbytes: int) -> list[bool]:
        """Return for each value whether it may be put. Then call :meth:`finish` for those.

        Args:
            folders: Folder of each value.
            nbytes: Bytes of each value's file.

        Raises:
            OSError: A folder cannot be listed.

        Cancellation:
            Has no effect.
        """
        if unknown := [folder for folder in folders if folder not in self._folders]:
            listing = self._list_soon(unknown)
            await asyncio.wait([listing], timeout=_FIRST_LISTING_S)
            for folder in unknown:
                if folder not in self._folders:
                    raise OSError(errno.EIO, f"cannot list {folder}")
        return [self._admit(folder, nbytes) for folder in folders]

    def finish(self, path: Path, nbytes: int, *, was_put: bool) -> None:
        """Record the end of an admitted put."""
        folder = self._folders[path]
        folder.writing_nbytes -= nbytes
        folder.put_nbytes += nbytes if was_put else 0
        if folder.is_due(self._layout.folder_nbytes):
            _ = self._list_soon([path])

    async def aclose(self) -> None:
        """Stop, without a wait for a call that hangs. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._executor.shutdown(wait=False)

    def _admit(self, path: Path, nbytes: int) -> bool:
        folder = self._folders[path]
        fits = folder.estimate() + nbytes <= self._layout.folder_nbytes
        if fits:
            folder.writing_nbytes += nbytes
        else:
            _ = self._list_soon([path])
        return fits

    def _list_soon(self, folders: Sequence[Path]) -> asyncio.Task[None]:
        """Schedule ``folders`` for listing and eviction; return the task that does it."""
        self._due.update(dict.fromkeys(folders))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._keep_due())
        return self._task

    async def _keep_due(self) -> None:
        while self._due:
            path = next(iter(self._due))
            try:
                await self._keep_folder(path)
            except OSError as error:
                if not self._is_failing:
                    logger.warning("cannot list or evict the chunks of %s: %s", path, error)
                self._is_failing = True
            else:
                self._is_failing = False
            self._due.pop(path, None)

    async def _keep_folder(self, path: Path) -> None:
        """List a folder, and evict from it if it is nearly full."""
        folder = self._folders.get(path)
        put_nbytes = folder.put_nbytes if folder else 0
        try:
            files = await self._list(path, executor=self._executor)
        except FileNotFoundError:
            files = []
        nbytes = sum(file.nbytes for file in files)
        if folder is None:
            folder = self._folders[path] = _Folder(nbytes)
        folder.learn_growth(nbytes, put_nbytes)
        if victims := _choose_victims(files, self._layout.folder_nbytes):
            paths = [path / file.name for file in victims]
            await self._remove(paths, executor=self._executor)
            nbytes -= sum(file.nbytes for file in victims)
        folder.listed_nbytes = nbytes
        folder.put_nbytes -= put_nbytes
        folder.put_before_nbytes += put_nbytes


def _choose_victims(files: list[FileEntry], share_nbytes: int) -> list[FileEntry]:
    """Return the files to remove, first those of dead engines, then the least recently used."""
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
