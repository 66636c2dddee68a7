"""A shared tier in a directory that many engines use, for example over a network.

A value is one file: the chunk's bytes, then the proof, padded to a page. An engine writes the
file under a temporary name and then renames it, so that others see the file whole or not at
all. A write does not wait for the disk. After a power loss, a file may have wrong bytes; the
proof detects them.

A hanging file server blocks a thread of the pool until the system call returns. The engine's
requests go on when their deadlines pass.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeVar

from typing_extensions import override

from kvtier.config import SharedDirTierConfig, SharedTierConfig
from kvtier.errors import ClosedError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.os.block_io import (
    PAGE_NBYTES,
    aligned_buffer,
    is_aligned,
    opened,
    read_fully,
    write_fully,
)
from kvtier.os.timed_calls import call_within
from kvtier.tiers.shared.base import SharedContext, SharedTier, Value
from kvtier.tiers.shared.dir_io import DirIo
from kvtier.tiers.shared.dir_layout import TEMPORARY, DirLayout
from kvtier.tiers.shared.dir_room import DirRoom
from kvtier.tiers.shared.gallop import find_leading
from kvtier.types import Outcome, Purpose

__all__ = ["SharedDirTier"]

logger = get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_OPEN_S: Final = 5.0
"""Longest wait for the file system when the tier opens."""
_TOUCHED_EVERY_S: Final = 60.0
"""Shortest interval, in seconds, at which this engine's reads update the time of a file."""
_MOST_USES: Final = 1 << 14
"""Largest number of files whose last use an engine remembers; other files are touched early."""
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""Errors for a value that is missing or that another machine has just removed."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class SharedDirTier(SharedTier):
    """One engine's access to a shared directory."""

    Options: ClassVar[type[SharedTierConfig]] = SharedDirTierConfig

    def __init__(
        self,
        options: SharedDirTierConfig,
        context: SharedContext,
        io: DirIo | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._io = io or DirIo()
        self._name = options.name
        self._pool = context.pool
        self._value_nbytes = context.payload_nbytes + PAGE_NBYTES
        self._layout = DirLayout(options, self._value_nbytes, self._io)
        self._room = DirRoom(self._layout, self._io)
        self._files = _ValueFiles(
            self._layout,
            self._io,
            self._value_nbytes,
            _Uses(clock),
            is_nbytes_known=context.is_nbytes_known,
        )
        self._closed = False

    @classmethod
    @override
    def open(cls, options: SharedTierConfig, context: SharedContext) -> SharedDirTier:
        assert isinstance(options, SharedDirTierConfig)
        tier = cls(options, context)
        tier.prepare()
        return tier

    def prepare(self, *, timeout_s: float = _OPEN_S) -> None:
        """Prepare the directory; warn if it is not reachable in time. This call blocks."""
        try:
            call_within(self._layout.prepare, timeout_s, name="kvtier-shared-dir-open")
        except TierUnavailableError as error:
            logger.warning("%s; trying again when it is used", error)
        except TimeoutError:
            logger.warning(
                "tier %s: the file system does not answer; trying again when it is used",
                self._name,
            )

    @override
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        await self._begin()
        return await self._checked(await self._ask(keys))

    @override
    async def contains_leading(self, keys: Sequence[str]) -> Sequence[bool]:
        await self._begin()
        return await self._checked(await find_leading(keys, self._ask))

    @override
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        await self._begin()
        values = list(zip(keys, into, strict=True))
        outcomes = await self._split(self._files.read, values, purpose=Purpose.LOAD)
        if Outcome.MISSING in outcomes:
            await self._check(Purpose.LOAD)
        return outcomes

    @override
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        await self._begin()
        folders = [self._layout.folder_of(key) for key in keys]
        fits = await self._room.admit(folders, self._value_nbytes)
        given = zip(keys, values, strict=True)
        written = iter(
            await self._put(list(compress(given, fits)), list(compress(folders, fits)))
        )
        return [next(written).outcome if is_fitting else Outcome.REFUSED for is_fitting in fits]

    @override
    async def aclose(self) -> None:
        self._closed = True
        await self._room.aclose()

    async def _put(
        self, values: Sequence[tuple[str, Value]], folders: Sequence[Path]
    ) -> Sequence[_Written]:
        written = [_Written(Outcome.FAILED)] * len(values)
        try:
            written = await self._split(self._files.write, values, purpose=Purpose.STORE)
        finally:
            for folder, (_, added_nbytes) in zip(folders, written, strict=True):
                self._room.finish(folder, self._value_nbytes, added_nbytes=added_nbytes)
        return written

    async def _begin(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self._name} is closed")
        if not self._layout.is_ready:
            await self._pool.run(self._layout.prepare, priority=int(Purpose.QUESTION))

    async def _ask(self, keys: Sequence[str]) -> list[bool]:
        return await self._split(self._files.contain, keys, purpose=Purpose.QUESTION)

    async def _checked(self, found: Sequence[bool]) -> Sequence[bool]:
        if not all(found):
            await self._check(Purpose.QUESTION)
        return found

    async def _check(self, purpose: Purpose) -> None:
        """Raise TierUnavailableError if values are missing because nothing is mounted."""
        await self._pool.run(self._layout.check, priority=int(purpose))

    async def _split(
        self, call: Callable[[T], R], items: Sequence[T], *, purpose: Purpose
    ) -> list[R]:
        """Call ``call`` for each of ``items`` in the pool's threads; return all results."""
        count = len(items)
        parts = min(count, 2 * self._pool.threads)
        groups = [
            items[part * count // parts : (part + 1) * count // parts] for part in range(parts)
        ]

        def run(group: Sequence[T]) -> list[R]:
            return [call(item) for item in group]

        calls = [functools.partial(run, group) for group in groups]
        results = await self._pool.run_all(calls, priority=int(purpose))
        return list(chain.from_iterable(results))


class _Written(NamedTuple):
    """The result of writing one value.

    Attributes:
        added_nbytes: Bytes by which the value's folder grew; negative if the folder shrank.
    """

    outcome: Outcome
    added_nbytes: int = 0


class _Uses:
    """Times when this engine last wrote or touched files. Any thread may call the methods.

    The file server's clock may differ from this machine's, so files' times are not compared.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used_s: dict[str, float] = {}

    def note(self, key: str) -> bool:
        """Record a use of ``key`` and return True; return False if its last use was recent."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._used_s.get(key, -math.inf) <= _TOUCHED_EVERY_S:
                return False
            self._used_s.pop(key, None)
            self._used_s[key] = now_s  # the latest is the last
            if len(self._used_s) > _MOST_USES:
                del self._used_s[next(iter(self._used_s))]
        return True


class _ValueFiles:
    """Reads and writes the files of values. All methods block."""

    def __init__(
        self,
        layout: DirLayout,
        io: DirIo,
        value_nbytes: int,
        uses: _Uses,
        *,
        is_nbytes_known: bool,
    ) -> None:
        self._uses = uses
        self._is_nbytes_known = is_nbytes_known
        self._layout = layout
        self._io = io
        self._value_nbytes = value_nbytes
        self._of_thread = threading.local()

    def contain(self, key: str) -> bool:
        """Return whether ``key`` has a value of the expected size, if that is known.

        A truncated file counts as absent, so that it is replaced.
        """
        try:
            nbytes = self._nbytes_of(self._layout.path_of(key))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
        return not self._is_nbytes_known or nbytes == self._value_nbytes

    def read(self, item: tuple[str, Value]) -> Outcome:
        """Read the value of a key into the buffers in ``item``."""
        key, value = item
        flags = os.O_RDONLY | self._direct_flag(value)
        try:
            with opened(self._io, self._layout.path_of(key), flags) as fd:
                return self._read_open(fd, key, value)
        except OSError as error:
            if error.errno in _ABSENT:
                return Outcome.MISSING
            logger.debug("cannot read the value of %s: %s", key, error)
            return Outcome.FAILED

    def _read_open(self, fd: int, key: str, value: Value) -> Outcome:
        if self._io.status_of(fd).st_size != self._value_nbytes:
            return Outcome.MISSING
        page = self._page()
        if read_fully(self._io, fd, [value.payload, page], 0) != self._value_nbytes:
            return Outcome.MISSING
        value.proof[:] = page[: value.proof.nbytes]
        if self._uses.note(key):
            with contextlib.suppress(OSError):  # another user's file, or one removed meanwhile
                self._io.touch(fd)
        return Outcome.DONE

    def write(self, item: tuple[str, Value]) -> _Written:
        """Write the value of a key to a temporary file, then rename the file."""
        key, value = item
        path = self._layout.path_of(key)
        temporary = path.parent / f".{secrets.token_hex(16)}{TEMPORARY}"
        try:
            try:
                self._write_temporary(temporary, value)
                replaced_nbytes = self._replaced_nbytes(path)
                self._io.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._io.unlink(temporary)
                raise
        except OSError as error:
            logger.debug("cannot write the value of %s: %s", key, error)
            is_full = error.errno in _NO_ROOM
            return _Written(Outcome.REFUSED if is_full else Outcome.FAILED)
        self._uses.note(key)
        return _Written(Outcome.DONE, self._value_nbytes - replaced_nbytes)

    def _replaced_nbytes(self, path: Path) -> int:
        """Return the size of the file that a put replaces; 0 if there is none."""
        try:
            return self._nbytes_of(path)
        except OSError:
            return 0  # at worst the folder is listed too early

    def _nbytes_of(self, path: Path) -> int:
        return self._io.status(path).st_size

    def _write_temporary(self, path: Path, value: Value) -> None:
        page = self._page()
        page[: value.proof.nbytes] = value.proof
        fd = self._create(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct_flag(value))
        try:
            write_fully(self._io, fd, [value.payload, page], 0)
        finally:
            self._io.close(fd)  # a file server may report only now that the disk is full

    def _create(self, path: Path, flags: int) -> int:
        """Create a file; create the file's folder if it is missing."""
        try:
            return self._io.open(path, flags)
        except FileNotFoundError:
            self._layout.check()
            with contextlib.suppress(FileExistsError):
                self._io.make_directory(path.parent)
            return self._io.open(path, flags)

    def _direct_flag(self, value: Value) -> int:
        return os.O_DIRECT if self._layout.direct and is_aligned(value.payload) else 0

    def _page(self) -> memoryview:
        """Return this thread's page of memory, for a proof and its padding."""
        if not hasattr(self._of_thread, "page"):
            self._of_thread.page = aligned_buffer(PAGE_NBYTES)
        page: memoryview = self._of_thread.page
        return page
