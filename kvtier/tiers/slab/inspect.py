"""Find the namespaces in a cache directory, and the engines that have them open.

This module neither writes into the cache nor disturbs an engine. :mod:`.index_reader` reads an
index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
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
    has_namespace_name,
    nbytes_of,
    require_layout,
)

__all__ = [
    "WAL",
    "StoredNamespace",
    "find_namespaces",
    "holder_of",
    "index_nbytes",
    "present_holder",
    "root_locked",
]

WAL: Final = f"{INDEX}-wal"
_AT_ONCE: Final = Patience(timeout_s=0)


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


def find_namespaces(path: Path, name: str | None = None) -> list[StoredNamespace]:
    """Return the namespaces in ``path``, or only the one called ``name``.

    ``path`` may also be a namespace.

    Raises:
        ConfigError: No namespace was found; the message says which path to give instead.
    """
    with _readable(path):
        candidates = _candidates(path)
    path = path.resolve()
    found = _with_layouts(candidates)
    if not found:
        raise ConfigError(
            f"no cache of an nvme tier in {_shown(path)}; give the path of an nvme tier"
        )
    chosen = [space for space in found if name in {None, space.name}]
    if not chosen:
        names = ", ".join(space.name for space in found)
        raise ConfigError(f"{_shown(path)} has no namespace {name}; it has {names}")
    return chosen


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors of reading ``path`` in the body into ConfigErrors with a remedy."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(_not_ours_to_read(path, error)) from error
    except OSError as error:
        remedy = "give the path of an nvme tier"
        raise ConfigError(f"{_shown(path)}: {error.strerror}; {remedy}") from error


def _candidates(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        rank = (
            f", with a number for {RANK_PLACEHOLDER}" if RANK_PLACEHOLDER in str(path) else ""
        )
        raise ConfigError(f"{_shown(path)} {what}; give the path of an nvme tier{rank}")
    path = path.resolve()  # "." has no parent otherwise
    if (path / LAYOUT).exists():
        return [path]
    return sorted(filter(has_namespace_name, path.iterdir()))


def _with_layouts(directories: Iterable[Path]) -> list[StoredNamespace]:
    """Return the namespaces among ``directories``; raise a ConfigError if none can be read."""
    found, problem = [], ""
    cause: Exception | None = None
    for directory in directories:
        try:
            found.append(StoredNamespace(directory, require_layout(directory, BlockIo())))
        except PermissionError as error:
            problem, cause = _not_ours_to_read(directory, error), error
        except ValueError as error:
            remedy = "copy it again, use the kvtier that wrote it, or move the directory away"
            problem, cause = f"{_shown(directory / LAYOUT)}: {error}; {remedy}", error
        except (OSError, CacheDamagedError):
            continue  # foreign, with the name of a namespace
    if problem and not found:
        raise ConfigError(problem) from cause
    return found


def _not_ours_to_read(directory: Path, error: PermissionError) -> str:
    return f"{_shown(directory)}: {error.strerror}; run this as the user that runs the engine"


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
    """Try to take a shared lock of ``directory`` for the body; yield whether it was taken."""
    fd = os.open(directory.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield patience.take(lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
    finally:
        os.close(fd)
