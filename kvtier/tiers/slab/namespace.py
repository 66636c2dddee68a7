"""One model's directory in a store: who may use it, what its bytes mean, who has it open.

Nothing that kvtier did not make is followed, overwritten or removed: a symbolic link or a
foreign file where one of ours belongs is an error that says what to do.
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

from kvtier.errors import ConfigError, StoreDamagedError, StoreLockedError
from kvtier.os.ownership import find_exposure, find_stranger
from kvtier.printable import printable
from kvtier.tiers.slab.direct_io import BlockIo, write_fully
from kvtier.tiers.slab.lock import (
    LOCK,
    PATIENCE,
    Patience,
    acquire,
    is_tool,
    last_opened,
    name_holder,
    passing_holder,
    try_acquire,
)
from kvtier.types import LayoutFingerprint

__all__ = [
    "FILES",
    "INDEX",
    "LAYOUT",
    "SLOTS",
    "Layout",
    "Namespace",
    "Occupied",
    "find_strangers_file",
    "is_named_as_one",
    "is_of_later_version",
    "is_ours",
    "nbytes_of",
    "open_root",
    "read_layout",
    "require_layout",
    "why_unreadable",
]

LAYOUT: Final = "layout.json"
SLOTS: Final = "slots.bin"
INDEX: Final = "index.sqlite"
DAMAGED: Final = f"{INDEX}.damaged"
_DRAFT: Final = f"{LAYOUT}.draft"
_SIDE_FILES: Final = ("", "-wal", "-shm", "-journal")
# In the order of removal: what is left by a removal cut short is still recognised as ours.
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


@dataclass(frozen=True, slots=True)
class Layout:
    """What the bytes in a namespace mean; the content of ``layout.json``.

    Attributes:
        fingerprint: The engine's layout.
        slot_nbytes: Bytes of one slot.
    """

    fingerprint: LayoutFingerprint
    slot_nbytes: int

    @property
    def model(self) -> str:
        """The model's name for people, with control characters escaped."""
        name = self.fingerprint.label or str(self.fingerprint.fields.get("model", ""))
        return printable(name) or "unknown"

    def to_json(self) -> str:
        """Return the text of the file."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "slot_nbytes": self.slot_nbytes,
            "model": self.model,
            "fingerprint": dict(self.fingerprint.fields),
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of the file.

        Raises:
            ValueError: It is not the text of a layout this version understands.
        """
        content = _parse(text)
        label = content.get("model", "") if isinstance(content, dict) else ""
        match content:
            case {
                "format": str(form),
                "version": int(version),
                "slot_nbytes": int(slot_nbytes),
                "fingerprint": dict(fields),
            }:
                pass
            case _:
                raise ValueError("it does not describe a kvtier store")
        if (form, version) != (_FORMAT, _VERSION):
            raise ValueError(
                f"it has format {form!r}, version {version}; this kvtier {_VERSION}"
            )
        return cls(LayoutFingerprint(fields, str(label)), slot_nbytes)


@dataclass(frozen=True, slots=True)
class Occupied:
    """A namespace that no engine has open, and that somebody else holds the lock of.

    Attributes:
        directory: Where its files are.
        slots_nbytes: Bytes of the slot file; 0 if there is none.
        last_opened: When an engine opened it, as :attr:`Namespace.last_opened`.
        holder: Who has it, for people.
        by_tool: Whether that is a tool; if not, it seems to be the I/O of an engine that died.
    """

    directory: Path
    slots_nbytes: int
    last_opened: int
    holder: str
    by_tool: bool


class Namespace:
    """A namespace that this object holds the lock of.

    Attributes:
        directory: Where its files are.
    """

    def __init__(self, directory: Path, lock_fd: int, io: BlockIo) -> None:
        self.directory = directory
        self._lock_fd = lock_fd
        self._io = io

    @classmethod
    def open(
        cls, tier: str, root: Path, layout: Layout, io: BlockIo, *, owner_pid: int
    ) -> Self:
        """Open the namespace of ``layout`` below ``root``, making it if it is not there.

        The lock names ``owner_pid`` as its holder.

        Raises:
            StoreLockedError: It is open already, in this process or another.
            StoreDamagedError: What is there is not ours, or is of another layout.
            OSError: The file system failed.
        """
        directory = root / layout.fingerprint.namespace()
        with contextlib.suppress(FileExistsError):
            io.make_directory(directory)
        _require_own_files(tier, directory)
        if stranger := find_strangers_file(directory):
            raise StoreDamagedError(tier, _unusable(directory, stranger))
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
    def open_idle(cls, directory: Path, io: BlockIo) -> Self | Occupied | None:
        """Lock ``directory`` if it is a namespace of ours that no engine has open.

        Returns:
            It, or who has it and will be gone soon; None if an engine has it open, or it is
            not ours.
        """
        if not is_ours(directory, io):
            return None
        try:
            if find_strangers_file(directory):
                return None
            with contextlib.suppress(BlockingIOError):
                return cls(directory, try_acquire(directory, io), io)
            return _occupied(directory)
        except OSError:
            return None

    @property
    def slots_path(self) -> Path:
        """The slot file."""
        return self.directory / SLOTS

    @property
    def index_path(self) -> Path:
        """The index."""
        return self.directory / INDEX

    @property
    def slots_nbytes(self) -> int:
        """Bytes of the slot file; 0 if there is none."""
        return nbytes_of(self.slots_path)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index without its log; 0 if there is none."""
        return nbytes_of(self.index_path)

    @property
    def last_opened(self) -> int:
        """When an engine opened it, comparable with other namespaces' times."""
        return last_opened(self.directory)

    def set_index_aside(self) -> Path:
        """Move a damaged index out of the way, over an earlier one; returns where it is now.

        A loss of power does not bring it back.

        Raises:
            OSError: The file system failed; part of it may be back after a restart.
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
        """Wait until the files are found again after a loss of power, and the way to them.

        Syncing a file promises nothing about its name, nor about the directories above it. A
        link above the namespace is somebody else's: where it leads to is synced.

        Raises:
            OSError: The file system failed.
        """
        root = self.directory.parent.resolve()
        for directory in (self.directory, root, root.parent):
            _sync_directory(self._io, directory)

    def remove(self) -> None:
        """Remove our files and, if nothing else is in it, the directory.

        The room of the slots is free then, also where somebody still reads them: a file that
        only loses its name keeps its room for as long as anybody has it open.
        """
        self._give_back_slots()
        for name in FILES:
            self._io.unlink(self.directory / name)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self._io.close(fd)

    def _give_back_slots(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.slots_path.lstat().st_nlink > 1:
                return  # it has another name, which somebody gave it
            fd = self._io.open(self.slots_path, os.O_WRONLY)
            try:
                self._io.truncate(fd, 0)
            finally:
                self._io.close(fd)

    def _leave_to_parent_at_fork(self) -> None:
        """Let no child that is forked hold the lock: it would outlive its holder."""
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
            raise StoreDamagedError(
                tier, _unusable(self.directory, f"{LAYOUT}: {error}")
            ) from error
        if found != layout:
            problem = f"{LAYOUT}: {_difference(found, layout)}"
            raise StoreDamagedError(tier, _unusable(self.directory, problem))

    def _write_layout(self, layout: Layout) -> None:
        draft = self.directory / _DRAFT
        fd = self._io.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_fully(self._io, fd, [memoryview(layout.to_json().encode())], 0)
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(draft, self.directory / LAYOUT)
        # The layout is there before any slot is: slots without it would count as foreign.
        _sync_directory(self._io, self.directory)


@contextlib.contextmanager
def open_root(
    tier: str, root: Path, io: BlockIo, patience: Patience = PATIENCE
) -> Iterator[None]:
    """Make ``root`` if needed and keep other processes from opening or removing namespaces.

    Raises:
        ConfigError: ``root`` cannot be made or used, or others can replace what is in it.
        StoreLockedError: Another process keeps us from it for longer than ``patience`` lasts.
        OSError: The file system failed.
    """
    try:
        io.make_directory(root)
    except FileExistsError:
        if not root.is_dir():
            raise ConfigError(_no_directory(tier, root)) from None
    except FileNotFoundError:
        raise ConfigError(
            f"tier {tier}: {root.parent} does not exist; create it, or mount the disk there"
        ) from None
    if exposure := find_exposure(root):
        raise ConfigError(f"tier {tier}: {exposure.problem}; {exposure.remedy}")
    fd = io.open(root.resolve(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not patience.take(lambda: io.lock(fd)):
            raise StoreLockedError(tier, root, _OPENER)
        yield
    finally:
        io.close(fd)


def _no_directory(tier: str, root: Path) -> str:
    if root.is_symlink() and not root.exists():
        there = printable(str(root.readlink()))
        problem = f"leads to {there}, which does not exist; create it, or mount the disk there"
    else:
        problem = "is not a directory; name one that kvtier may fill"
    return f"tier {tier}: path {root} {problem}"


def is_named_as_one(path: Path) -> bool:
    """Return whether ``path`` has such a name as :meth:`LayoutFingerprint.namespace` gives."""
    return _NAME.fullmatch(path.name) is not None


def find_strangers_file(directory: Path) -> str:
    """Return what of a namespace belongs to another user, in words; empty if nothing does.

    Raises:
        OSError: It may not be looked at.
    """
    return find_stranger((directory, *(directory / name for name in FILES)))


def nbytes_of(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_layout(directory: Path, io: BlockIo) -> Layout | None:
    """Return the layout of a namespace, None if ``directory`` is not one of ours."""
    try:
        return require_layout(directory, io)
    except (OSError, ValueError, StoreDamagedError):
        return None


def require_layout(directory: Path, io: BlockIo) -> Layout:
    """Return the layout of a namespace.

    Raises:
        OSError: ``directory`` is none, or its files cannot be read.
        ValueError: Its ``layout.json`` is not the text of a layout this version understands.
        StoreDamagedError: It has files that are not ours.
    """
    _require_own_files("", directory)
    return Layout.from_json(io.read_bytes(directory / LAYOUT).decode("utf-8"))


def is_of_later_version(directory: Path, io: BlockIo) -> bool:
    """Return whether ``directory`` is a namespace that a later version of kvtier made."""
    return (_version_of(directory, io) or _VERSION) > _VERSION


def _version_of(directory: Path, io: BlockIo) -> int | None:
    """Return the version of a namespace's layout, None if ``directory`` is not one of ours."""
    try:
        _require_own_files("", directory)
        content = _parse(io.read_bytes(directory / LAYOUT))
    except (OSError, ValueError, StoreDamagedError):
        return None
    match content:
        case {"format": str(form), "version": int(version)} if form == _FORMAT and version > 0:
            return version
        case _:
            return None


def why_unreadable(directory: Path, io: BlockIo) -> str:
    """Return why this user cannot trust or tell what is in ``directory``, empty if it can.

    What it says is only of a directory that seems to be a namespace, because it has slots or
    lets nobody look.
    """
    try:
        require_layout(directory, io)
        return find_strangers_file(directory)
    except PermissionError:
        return "this user may not look into it"
    except (OSError, ValueError, StoreDamagedError):
        with contextlib.suppress(OSError):  # it is a file, or a link that leads nowhere
            if nbytes_of(directory / SLOTS) and _version_of(directory, io) is None:
                return f"it has slots, and no {LAYOUT} that can be understood"
    return ""


def is_ours(directory: Path, io: BlockIo) -> bool:
    """Return whether ``directory`` is a namespace that this version made, or an earlier one."""
    layout = read_layout(directory, io)
    if layout is None:
        return (_version_of(directory, io) or _VERSION) < _VERSION
    return layout.fingerprint.namespace() == directory.name


def _occupied(directory: Path) -> Occupied | None:
    holder = passing_holder(directory)
    if not holder:
        return None
    opened_ns = last_opened(directory)
    return Occupied(directory, nbytes_of(directory / SLOTS), opened_ns, holder, is_tool(holder))


def _sync_directory(io: BlockIo, directory: Path) -> None:
    fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.sync(fd)
    finally:
        io.close(fd)


def _require_own_files(tier: str, directory: Path) -> None:
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise StoreDamagedError(tier, _unusable(directory, "it is not a directory of its own"))
    for name in FILES:
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise StoreDamagedError(
                    tier, _unusable(directory, f"{name} is not a plain file")
                )
    names = {path.name for path in directory.iterdir()}
    if LAYOUT not in names and names - {LOCK, _DRAFT}:
        foreign = printable(min(names - {LOCK, _DRAFT}))
        problem = f"it has {foreign} but no {LAYOUT}"
        raise StoreDamagedError(tier, _unusable(directory, problem))


def _parse(text: str | bytes) -> object:
    """Return what the text of a ``layout.json`` says.

    Raises:
        ValueError: It is no JSON, or nested deeper than any layout.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


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
