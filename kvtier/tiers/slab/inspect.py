"""Find the namespaces in a cache directory, and the engines that have them open.

This module neither writes into the cache nor disturbs an engine. :mod:`.index_reader` reads an
index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import RANK_PLACEHOLDER
from kvtier.errors import CacheDamagedError, ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.printable import printable
from kvtier.tiers.slab.lock import PATIENCE, Patience, read_holder
from kvtier.tiers.slab.namespace import (
    INDEX,
    LAYOUT,
    SLOTS,
    Layout,
    LayoutVersionError,
    find_foreign_file,
    has_namespace_name,
    nbytes_of,
    require_layout,
)

__all__ = [
    "WAL",
    "Found",
    "StoredNamespace",
    "find_directories",
    "find_namespaces",
    "holder_of",
    "index_nbytes",
    "present_holder",
    "root_locked",
]

WAL: Final = f"{INDEX}-wal"
_AT_ONCE: Final = Patience(timeout_s=0)
_OTHER_PATH: Final = "give the path of an nvme tier"


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """The directory with one model's cache, and the content of its ``layout.json``."""

    directory: Path
    layout: Layout

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.directory.name

    @property
    def index_path(self) -> Path:
        """Path of the index."""
        return self.directory / INDEX

    @property
    def is_blank(self) -> bool:
        """Whether there is neither index nor slots, because the first start was interrupted."""
        return not self.index_path.exists() and not (self.directory / SLOTS).exists()


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that may be a namespace.

    Attributes:
        layout: The namespace's layout; None if it has no layout of this version.
        error: The reason for a missing layout.
        problem: The reason why this user cannot use a directory that looks like a namespace;
            empty if there is none.
    """

    directory: Path
    layout: Layout | None = None
    error: Exception | None = None
    problem: str = ""

    @property
    def is_other_version(self) -> bool:
        """Whether another version of kvtier made the namespace."""
        return isinstance(self.error, LayoutVersionError)

    @property
    def is_namespace(self) -> bool:
        """Whether this is a usable namespace of any version."""
        if self.problem:
            return False
        if self.layout is None:
            return self.is_other_version
        return self.layout.fingerprint.namespace() == self.directory.name


def find_directories(root: Path, io: BlockIo) -> list[Found]:
    """Return the directories in ``root`` that have names like those of namespaces."""
    return [_look_at(path, io) for path in root.iterdir() if has_namespace_name(path)]


def find_namespaces(path: Path, name: str | None = None) -> list[StoredNamespace]:
    """Return the namespaces in ``path``, or only the one called ``name``.

    ``path`` may also be a namespace.

    Raises:
        ConfigError: No namespace was found; the message says which path to give instead.
    """
    try:
        found = [_look_at(each, BlockIo()) for each in _candidates(path)]
    except OSError as error:
        raise _unreadable(path, error) from error
    spaces = [StoredNamespace(each.directory, each.layout) for each in found if each.layout]
    shown = _shown(path.resolve())
    if not spaces:
        raise _nothing_readable(shown, found)
    chosen = [space for space in spaces if name in {None, space.name}]
    if not chosen:
        names = ", ".join(space.name for space in spaces)
        raise ConfigError(f"{shown} has no namespace {name}; it has {names}")
    return chosen


def _candidates(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        rank = (
            f", with a number for {RANK_PLACEHOLDER}" if RANK_PLACEHOLDER in str(path) else ""
        )
        raise ConfigError(f"{_shown(path)} {what}; {_OTHER_PATH}{rank}")
    path = path.resolve()  # "." has no parent otherwise
    if (path / LAYOUT).exists():
        return [path]
    return sorted(filter(has_namespace_name, path.iterdir()))


def _look_at(directory: Path, io: BlockIo) -> Found:
    layout, other_version = None, None
    try:
        try:
            layout = require_layout(directory, io)
        except LayoutVersionError as error:
            other_version = error
        return Found(directory, layout, other_version, find_foreign_file(directory))
    except PermissionError as error:
        return Found(directory, error=error, problem="this user may not look into it")
    except (OSError, ValueError, CacheDamagedError) as error:
        problem = ""
        with contextlib.suppress(OSError):  # it is a file or a broken link
            if nbytes_of(directory / SLOTS):
                problem = f"it has slots and no readable {LAYOUT}"
        return Found(directory, error=error, problem=problem)


def _nothing_readable(shown: str, found: Sequence[Found]) -> ConfigError:
    """Return the error for a path without a readable namespace."""
    for each in found:
        if isinstance(each.error, PermissionError | ValueError):
            return _unreadable(each.directory, each.error)
    return ConfigError(f"no cache of an nvme tier in {shown}; {_OTHER_PATH}")


def _unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    """Return the error for a path, or for a namespace, that cannot be read."""
    if isinstance(error, ValueError):
        remedy = "copy it again, use the kvtier that wrote it, or move the directory away"
        return ConfigError(f"{_shown(path / LAYOUT)}: {error}; {remedy}")
    denied = isinstance(error, PermissionError)
    remedy = "run this as the user that runs the engine" if denied else _OTHER_PATH
    return ConfigError(f"{_shown(path)}: {error.strerror}; {remedy}")


def _shown(path: Path) -> str:
    return printable(str(path))


def holder_of(directory: Path, patience: Patience = PATIENCE) -> str | None:
    """Return the text of a namespace's lock file; None if no process has the namespace open.

    This function holds the cache directory's lock during the check. So an engine that starts
    meanwhile waits, and does not fail.

    Raises:
        ConfigError: A process held the directory's lock for longer than ``patience``.
    """
    with root_locked(directory.parent, patience):
        return present_holder(directory)


def present_holder(directory: Path) -> str | None:
    """Like :func:`holder_of`, for a caller that holds the cache directory's lock."""
    with _shared(directory, _AT_ONCE) as free:
        if free:
            return None
        return read_holder(directory) or "another process"


@contextlib.contextmanager
def root_locked(root: Path, patience: Patience = PATIENCE) -> Iterator[None]:
    """Lock the cache directory ``root``, so that no engine opens or removes a namespace.

    Raises:
        ConfigError: A process held the lock for longer than ``patience``.
    """
    with _shared(root, patience) as free:
        if not free:
            raise ConfigError(f"another process is opening {_shown(root)}; try again")
        yield


def index_nbytes(space: StoredNamespace) -> int:
    """Return the size of the index and its log in bytes."""
    return nbytes_of(space.index_path) + nbytes_of(space.directory / WAL)


@contextlib.contextmanager
def _shared(directory: Path, patience: Patience) -> Iterator[bool]:
    """Try to lock ``directory`` (shared) in the body; yield whether it is locked."""
    fd = os.open(directory.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield patience.take(lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
    finally:
        os.close(fd)
