"""The location of an archive: a directory, or a prefix of a bucket in an object store.

A location has named objects, each written once and completely. A reader never finds an
incomplete object. A file gets its name after its last byte is written, and an object store
shows an object only after the upload.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from typing_extensions import override

from kvtier.archive.manifest import MANIFEST
from kvtier.archive.part import PART_SUFFIX
from kvtier.errors import ConfigError
from kvtier.os.block_io import PAGE_NBYTES, BlockIo, write_fully
from kvtier.printable import printable

__all__ = ["Directory", "Location", "has_archive", "whole_pages"]

_DRAFT: Final = ".draft"
_NO_DIRECT_IO: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


class Location(ABC):
    """A directory or a bucket's prefix with the objects of an archive. Thread-safe.

    Methods raise :class:`OSError` if the medium fails, and FileNotFoundError if an object is
    missing.
    """

    @abstractmethod
    def names(self) -> dict[str, int]:
        """Return the size in bytes of each object, by name.

        Raises:
            ConfigError: The location has objects that do not belong to an archive.
        """

    @abstractmethod
    def read(self, name: str, into: memoryview) -> int:
        """Read the beginning of an object into ``into``; return the number of bytes read.

        Args:
            name: Name of the object, which must not be empty.
            into: Page-aligned memory of whole pages.

        Returns:
            The number of bytes; less than ``len(into)`` only if the object is shorter.
        """

    @abstractmethod
    def write(self, name: str, source: memoryview, nbytes: int) -> None:
        """Write the first ``nbytes`` bytes of ``source`` atomically as the object ``name``.

        Args:
            name: Name of the object; an existing object is replaced.
            source: Page-aligned memory of whole pages.
            nbytes: Number of bytes to write.
        """

    @abstractmethod
    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Create the location. If possible, lock out other writers in the ``with`` block.

        Raises:
            ConfigError: The location cannot be written, or another process writes it.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until all written objects are durable."""


class Directory(Location):
    """A directory with one file for each object.

    Args:
        path: The directory; its parent must exist.
        io: The system calls. Tests pass system calls that fail.
    """

    def __init__(self, path: Path, io: BlockIo | None = None) -> None:
        self._path = path
        self._io = io or BlockIo()

    @override
    def __str__(self) -> str:
        return printable(str(self._path))

    @override
    def names(self) -> dict[str, int]:
        found = {}
        for path in self._path.iterdir():
            if path.name == MANIFEST or path.name.endswith(PART_SUFFIX):
                found[path.name] = path.stat().st_size
            elif not path.name.endswith(_DRAFT):
                stranger = printable(path.name)
                raise ConfigError(f"{self} has {stranger}, so it is no archive; name another")
        return found

    @override
    def read(self, name: str, into: memoryview) -> int:
        path = self._path / name
        for flags in (os.O_DIRECT, 0):
            with contextlib.suppress(_NotDirectError), self._open(path, flags) as fd:
                return self._read(fd, into, direct=bool(flags))
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    @override
    def write(self, name: str, source: memoryview, nbytes: int) -> None:
        draft = self._path / f"{name}{_DRAFT}"
        for flags in (os.O_DIRECT, 0):
            creating = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags
            with contextlib.suppress(_NotDirectError), self._open(draft, creating) as fd:
                write_fully(self._io, fd, [source[: whole_pages(nbytes)]], 0)
                self._io.truncate(fd, nbytes)
                self._io.sync_data(fd)
                break
        self._io.rename(draft, self._path / name)

    @override
    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        fd = self._make()
        try:
            try:
                self._io.lock(fd)
            except BlockingIOError as error:
                raise ConfigError(f"another process writes {self}; let it finish") from error
            for draft in self._path.glob(f"*{_DRAFT}"):  # of a run that was killed
                self._io.unlink(draft)
            yield
        finally:
            self._io.close(fd)

    @override
    def sync(self) -> None:
        for path in (self._path, self._path.resolve().parent):
            fd = self._io.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._io.sync(fd)
            finally:
                self._io.close(fd)

    def _make(self) -> int:
        """Create the directory if missing; return the directory's descriptor.

        Raises:
            ConfigError: The directory cannot be created.
        """
        try:
            with contextlib.suppress(FileExistsError):
                self._io.make_directory(self._path)
            return self._io.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            remedy = "name a new directory, in one that exists and that you may write"
            raise ConfigError(f"{self}: {error.strerror}; {remedy}") from error

    @contextlib.contextmanager
    def _open(self, path: Path, flags: int) -> Iterator[int]:
        """Yield a descriptor of ``path``; close the descriptor when the ``with`` block ends.

        Raises:
            _NotDirectError: ``flags`` include O_DIRECT, which the file system does not support.
        """
        try:
            fd = self._io.open(path, flags)
            try:
                yield fd
            finally:
                self._io.close(fd)
        except OSError as error:
            if flags & os.O_DIRECT and error.errno in _NO_DIRECT_IO:
                raise _NotDirectError from error
            error.filename = error.filename or str(path)
            raise

    def _read(self, fd: int, into: memoryview, *, direct: bool) -> int:
        done = 0
        while done < len(into):
            count = self._io.preadv(fd, [into[done:]], done)
            done += count
            # With O_DIRECT only the end of the file is within a page.
            if not count or (direct and done % PAGE_NBYTES):
                break
        return done


class _NotDirectError(Exception):
    """The file system does not support O_DIRECT."""


def has_archive(text: str) -> bool:
    """Return whether a path or a URL seems to name an archive, rather than a cache."""
    if "://" in text:
        return True
    path = Path(text)
    return (path / MANIFEST).exists() or any(path.glob(f"*{PART_SUFFIX}"))


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
