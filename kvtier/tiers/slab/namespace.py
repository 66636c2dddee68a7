"""A namespace: one model's cache, with its files, its layout and its lock.

kvtier overwrites and removes only its own files. If a symbolic link or a foreign file has the
name of such a file, kvtier raises an error with a remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvtier.errors import CacheDamagedError, CacheLockedError, ConfigError
from kvtier.os.block_io import BlockIo, opened, write_fully
from kvtier.os.ownership import find_exposure, find_foreign_owner, find_writable
from kvtier.printable import printable
from kvtier.tiers.slab.lock import LOCK, PATIENCE, Patience, acquire, name_holder, try_acquire
from kvtier.types import LayoutFingerprint

__all__ = [
    "FILES",
    "INDEX",
    "LAYOUT",
    "SLOTS",
    "Layout",
    "LayoutVersionError",
    "Namespace",
    "find_foreign_file",
    "has_namespace_name",
    "nbytes_of",
    "open_root",
    "require_layout",
]

LAYOUT: Final = "layout.json"
SLOTS: Final = "slots.bin"
INDEX: Final = "index.sqlite"
DAMAGED: Final = f"{INDEX}.damaged"
_DRAFT: Final = f"{LAYOUT}.draft"
_SIDE_FILES: Final = ("", "-wal", "-shm", "-journal")
# In the order of removal, so that the rest of an interrupted removal is still recognised.
FILES: Final = (
    SLOTS,
    *(INDEX + side for side in _SIDE_FILES),
    *(DAMAGED + side for side in _SIDE_FILES),
    _DRAFT,
    LAYOUT,
    LOCK,
)
_FORMAT: Final = "kvtier slab"
_VERSION: Final = 1
_NAME: Final = re.compile("[0-9a-f]{16}")
_OPENER: Final = "another process that is still opening it (try again)"


class LayoutVersionError(ValueError):
    """Another version of kvtier wrote the ``layout.json``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings that describe a namespace's stored bytes; saved as ``layout.json``."""

    fingerprint: LayoutFingerprint
    slot_nbytes: int

    @property
    def model(self) -> str:
        """The model's human-readable name, with control characters escaped."""
        name = self.fingerprint.label or str(self.fingerprint.fields.get("model", ""))
        return printable(name) or "unknown"

    def to_json(self) -> str:
        """Return the text of ``layout.json``."""
        content: dict[str, object] = {
            "format": _FORMAT,
            "version": _VERSION,
            "slot_nbytes": self.slot_nbytes,
            "model": self.model,
            "fingerprint": dict(self.fingerprint.fields),
        }
        if self.fingerprint.groups:
            content["groups"] = [dict(group) for group in self.fingerprint.groups]
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of ``layout.json``.

        Raises:
            LayoutVersionError: Another version of kvtier wrote the text.
            ValueError: The text is not a layout.
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        match content:
            case {"format": form, "version": int(version)} if (
                form == _FORMAT and 0 < version != _VERSION
            ):
                problem = f"it has version {version}, and this kvtier reads {_VERSION}"
                raise LayoutVersionError(problem)
            case {
                "format": str(form),
                "version": int(version),
                "slot_nbytes": int(slot_nbytes),
                "fingerprint": dict(fields),
            } if (form, version) == (_FORMAT, _VERSION):
                label, groups = str(content.get("model", "")), content.get("groups")
                listed = tuple(groups) if isinstance(groups, list) else ()
                return cls(LayoutFingerprint(fields, label, listed), slot_nbytes)
            case _:
                raise ValueError("it does not describe a cache of kvtier")


class Namespace:
    """A namespace, locked by this object. Methods raise :class:`OSError` if the disk fails."""

    def __init__(self, directory: Path, lock_fd: int, io: BlockIo) -> None:
        self.directory = directory
        self._lock_fd = lock_fd
        self._io = io

    @classmethod
    def open(
        cls, tier: str, root: Path, layout: Layout, io: BlockIo, *, owner_pid: int
    ) -> Self:
        """Open the namespace of ``layout`` below ``root``; create it if missing.

        The lock names ``owner_pid`` as its holder.

        Raises:
            CacheLockedError: The namespace is open already, in this process or another.
            CacheDamagedError: The directory is foreign, or has another layout.
        """
        directory = root / layout.fingerprint.namespace()
        with contextlib.suppress(FileExistsError):
            io.make_directory(directory)
        _require_own_files(tier, directory)
        if stranger := find_foreign_file(directory):
            raise CacheDamagedError(tier, _unusable(directory, stranger))
        directory.chmod(0o700)
        namespace = cls(directory, acquire(tier, directory, io), io)
        namespace._leave_to_parent_at_fork()
        try:
            name_holder(directory, owner_pid, io)
            namespace._bind(tier, layout)
        except BaseException:
            namespace.close()
            raise
        return namespace

    @classmethod
    def open_idle(cls, directory: Path, io: BlockIo) -> Self | None:
        """Lock the namespace ``directory``; return None if it cannot be locked."""
        try:
            return cls(directory, try_acquire(directory, io), io)
        except OSError:
            return None

    @property
    def slots_path(self) -> Path:
        """Path of the slot file."""
        return self.directory / SLOTS

    @property
    def index_path(self) -> Path:
        """Path of the index."""
        return self.directory / INDEX

    @property
    def slots_nbytes(self) -> int:
        """Bytes of the slot file; 0 if it is missing."""
        return nbytes_of(self.slots_path)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index without its log; 0 if it is missing."""
        return nbytes_of(self.index_path)

    def set_index_aside(self) -> Path:
        """Rename a damaged index, replacing an earlier damaged one; return the new path.

        The new names survive a power loss. After an error, some files may have their old names.
        """
        for side in _SIDE_FILES:
            self._io.unlink(self.directory / (DAMAGED + side))
        for side in _SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                self._io.rename(
                    self.directory / (INDEX + side), self.directory / (DAMAGED + side)
                )
        _sync_directory(self._io, self.directory)
        return self.directory / DAMAGED

    def sync(self) -> None:
        """Wait until the names of the files and directories would survive a power loss.

        Syncing a file does not sync its name or the directories above it. If the path of
        the cache directory has symbolic links, their targets are synced.
        """
        root = self.directory.parent.resolve()
        for directory in (self.directory, root, root.parent):
            _sync_directory(self._io, directory)

    def remove(self) -> None:
        """Remove kvtier's files, and then the directory if it is empty.

        The slot file is truncated first, because a removed file keeps its disk room while a
        process has it open.
        """
        self._truncate_slots()
        for name in FILES:
            self._io.unlink(self.directory / name)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self._io.close(fd)

    def _truncate_slots(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.slots_path.lstat().st_nlink > 1:
                return  # the file has another name, which kvtier did not give
            with opened(self._io, self.slots_path, os.O_WRONLY) as fd:
                self._io.truncate(fd, 0)

    def _leave_to_parent_at_fork(self) -> None:
        """Close the lock's descriptor in forked children, which may outlive this process."""
        close = weakref.WeakMethod(self._close_in_child)

        def close_in_child() -> None:
            if (method := close()) is not None:
                method()

        os.register_at_fork(after_in_child=close_in_child)

    def _close_in_child(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)  # the parent holds the lock through a descriptor of its own

    def _bind(self, tier: str, layout: Layout) -> None:
        path = self.directory / LAYOUT
        if not path.exists():
            self._write_layout(layout)
            return
        try:
            found = Layout.from_json(self._io.read_bytes(path).decode("utf-8"))
        except ValueError as error:
            raise CacheDamagedError(
                tier, _unusable(self.directory, f"{LAYOUT}: {error}")
            ) from error
        if found != layout:
            problem = f"{LAYOUT}: {_difference(found, layout)}"
            raise CacheDamagedError(tier, _unusable(self.directory, problem))
        groups = layout.fingerprint.groups
        if groups and found.fingerprint.groups != groups:
            self._write_layout(layout)

    def _write_layout(self, layout: Layout) -> None:
        draft = self.directory / _DRAFT
        with opened(self._io, draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_fully(self._io, fd, [memoryview(layout.to_json().encode())], 0)
            self._io.sync(fd)
        self._io.rename(draft, self.directory / LAYOUT)
        # The layout exists before any slot: slots without it would count as foreign.
        _sync_directory(self._io, self.directory)


def _make_root(tier: str, root: Path, io: BlockIo) -> None:
    """Create ``root`` unless it is already a directory."""
    try:
        io.make_directory(root)
    except FileExistsError:
        if not root.is_dir():
            raise ConfigError(_no_directory(tier, root)) from None
    except FileNotFoundError:
        raise ConfigError(
            f"tier {tier}: {root.parent} does not exist; create it, or mount the disk there"
        ) from None


@contextlib.contextmanager
def open_root(
    tier: str, root: Path, io: BlockIo, patience: Patience = PATIENCE
) -> Iterator[None]:
    """Create ``root`` and hold its lock, so that no other process opens or removes namespaces.

    Raises:
        ConfigError: ``root`` cannot be created or used, or others can replace its content.
        CacheLockedError: Another process held the lock for longer than ``patience``.
    """
    _make_root(tier, root, io)
    if exposure := find_exposure(root):
        raise ConfigError(f"tier {tier}: {exposure.problem}; {exposure.remedy}")
    with opened(io, root.resolve(), os.O_RDONLY | os.O_DIRECTORY) as fd:
        if not patience.take(lambda: io.lock(fd)):
            raise CacheLockedError(tier, root, _OPENER)
        yield


def _no_directory(tier: str, root: Path) -> str:
    if root.is_symlink() and not root.exists():
        there = printable(str(root.readlink()))
        problem = f"leads to {there}, which does not exist; create it, or mount the disk there"
    else:
        problem = "is not a directory; name one that kvtier may fill"
    return f"tier {tier}: path {root} {problem}"


def has_namespace_name(path: Path) -> bool:
    """Return whether ``path`` has a name like that of a namespace."""
    return _NAME.fullmatch(path.name) is not None


def find_foreign_file(directory: Path) -> str:
    """Return a message if another user owns or may write a namespace's files; else empty."""
    paths = (directory, *(directory / name for name in FILES))
    return find_foreign_owner(paths) or find_writable(paths)


def nbytes_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def require_layout(directory: Path, io: BlockIo) -> Layout:
    """Return the layout of a namespace.

    Raises:
        OSError: ``directory`` is not a directory, or its files cannot be read.
        LayoutVersionError: Another version of kvtier wrote the namespace's ``layout.json``.
        ValueError: The ``layout.json`` is not from kvtier.
        CacheDamagedError: The namespace has foreign files.
    """
    _require_own_files("", directory)
    return Layout.from_json(io.read_bytes(directory / LAYOUT).decode("utf-8"))


def _sync_directory(io: BlockIo, directory: Path) -> None:
    with opened(io, directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
        io.sync(fd)


def _require_own_files(tier: str, directory: Path) -> None:
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise CacheDamagedError(tier, _unusable(directory, "it is not a directory of its own"))
    for name in FILES:
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise CacheDamagedError(
                    tier, _unusable(directory, f"{name} is not a plain file")
                )
    names = {path.name for path in directory.iterdir()}
    if LAYOUT not in names and names - {LOCK, _DRAFT}:
        foreign = printable(min(names - {LOCK, _DRAFT}))
        problem = f"it has {foreign} but no {LAYOUT}"
        raise CacheDamagedError(tier, _unusable(directory, problem))


def _unusable(directory: Path, problem: str) -> str:
    return (
        f"{directory} cannot be used: {problem}; move it away or remove it to start with an "
        "empty cache, or give the tier another path"
    )


def _difference(found: Layout, wanted: Layout) -> str:
    if found.slot_nbytes != wanted.slot_nbytes:
        return f"its slots have {found.slot_nbytes} bytes, this engine's {wanted.slot_nbytes}"
    ours: Mapping[str, object] = wanted.fingerprint.fields
    theirs: Mapping[str, object] = found.fingerprint.fields
    name = min(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    return f"{name} is {theirs.get(name)!r}, this engine's {ours.get(name)!r}"
