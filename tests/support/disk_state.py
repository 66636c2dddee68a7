"""Contents that a disk may have after a loss of power: synced data and unsynced changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["DirectoryState", "DiskState", "FileState", "IndexFiles", "PowerCut"]


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """SQLite's files after a statement; a file that is not there is empty."""

    database: bytes = b""
    log: bytes = b""


@dataclass(slots=True)
class FileState:
    """A file's synced content, and its unsynced changes."""

    content: bytearray = field(default_factory=bytearray)
    sectors: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0])
    synced_index: IndexFiles = IndexFiles()
    index: IndexFiles = IndexFiles()

    def write(self, offset: int, written: bytes, sector_nbytes: int) -> None:
        """Add a version to every touched sector."""
        for number in range(
            offset // sector_nbytes, math.ceil((offset + len(written)) / sector_nbytes)
        ):
            start = number * sector_nbytes
            sector = bytearray(self._newest(number, sector_nbytes))
            first, end = max(offset, start), min(offset + len(written), start + sector_nbytes)
            sector[first - start : end - start] = written[first - offset : end - offset]
            self.sectors.setdefault(number, []).append(bytes(sector))
        self.resize(max(self.sizes[-1], offset + len(written)))

    def resize(self, nbytes: int) -> None:
        """Record a new size."""
        if nbytes != self.sizes[-1]:
            self.sizes.append(nbytes)

    def sync(self, sector_nbytes: int) -> None:
        """Make the newest versions durable."""
        self.sizes = self.sizes[-1:]
        self.content = bytearray(
            self.image(dict.fromkeys(self.sectors, 0), self.sizes[-1], sector_nbytes)
        )
        self.sectors.clear()

    def image(self, ages: dict[int, int], nbytes: int, sector_nbytes: int) -> bytes:
        """Return the file with each unsynced sector as it was ``ages`` writes ago."""
        image = bytearray(self.content.ljust(nbytes, b"\0"))
        for number, age in ages.items():
            versions = self.sectors[number]
            if age < len(versions):
                start = number * sector_nbytes
                sector = versions[-1 - age]
                image[start : start + sector_nbytes] = sector[: max(0, len(image) - start)]
        return bytes(image[:nbytes])

    def _newest(self, number: int, sector_nbytes: int) -> bytes:
        if number in self.sectors:
            return self.sectors[number][-1]
        start = number * sector_nbytes
        return bytes(self.content[start : start + sector_nbytes]).ljust(sector_nbytes, b"\0")


Entry = tuple[str, int | None]
"""A name and its file; None if the name was removed."""


@dataclass(slots=True)
class DirectoryState:
    """A directory's synced names, and the changes since, each of one or two names."""

    entries: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[Entry, ...]] = field(default_factory=list)

    def after(self, changes: int) -> dict[str, int]:
        """Return the names when only the first ``changes`` changes reached the drive."""
        entries = dict(self.entries)
        for name, number in itertools.chain.from_iterable(self.changes[:changes]):
            if number is None:
                entries.pop(name, None)
            else:
                entries[name] = number
        return entries

    def newest(self) -> dict[str, int]:
        """Return the current names."""
        return self.after(len(self.changes))

    def sync(self) -> None:
        """Make every change durable."""
        self.entries = self.newest()
        self.changes.clear()


@dataclass(slots=True)
class DiskState:
    """All files and directories below the root, numbered in order of creation."""

    sector_nbytes: int
    files: dict[int, FileState] = field(default_factory=dict)
    directories: dict[Path, DirectoryState] = field(default_factory=dict)

    def number(self, path: Path) -> int | None:
        """Return the number of the file at ``path``; None if there is none."""
        directory = self.directories.get(path.parent)
        return None if directory is None else directory.newest().get(path.name)

    def change_names(self, directory: Path, *entries: Entry) -> None:
        """Change names of a directory atomically."""
        self.directories[directory].changes.append(entries)

    def keep_index(self, number: int, files: IndexFiles) -> None:
        """Record SQLite's files after a statement."""
        file = self.files[number]
        if files.database != file.index.database:
            file.synced_index = files  # a checkpoint syncs the log before and the file after
        file.index = files

    def sync_index(self, number: int) -> None:
        """Make SQLite's log durable."""
        self.files[number].synced_index = self.files[number].index


@dataclass(frozen=True, slots=True)
class _Choice:
    """A file or directory with several possible states; number 0 is the newest."""

    kind: Literal["names", "size", "sector", "index"]
    place: Path | int
    """The directory, or the file's number."""
    options: int
    sector: int = 0


class PowerCut:
    """The possible contents of a disk after a loss of power.

    A state has a number for each unsynced file and directory, below its entry in
    :attr:`choices`; 0 is the newest version.
    """

    def __init__(self, state: DiskState, root: Path, log_step_nbytes: int) -> None:
        self._state = state
        self._root = root
        self._logs = {
            number: _log_states(file, state.sector_nbytes, log_step_nbytes)
            for number, file in state.files.items()
        }
        self._choices = [choice for choice in self._every_choice() if choice.options > 1]

    @property
    def choices(self) -> list[int]:
        """Number of states of each unsynced file and directory."""
        return [choice.options for choice in self._choices]

    @property
    def count(self) -> int:
        """Number of states of the disk."""
        return math.prod(self.choices)

    def every_pick(self) -> Iterator[tuple[int, ...]]:
        """Yield every state, starting with the one in which everything is durable."""
        return itertools.product(*map(range, self.choices))

    def files(self, pick: Sequence[int]) -> dict[Path, bytes]:
        """Return the content of every file in a state, by path below the root.

        Args:
            pick: One number for each of :attr:`choices`.

        Raises:
            ValueError: A number is not below its choice, or there are too few or too many.
        """
        picked: dict[tuple[str, Path | int, int], int] = {}
        for choice, number in zip(self._choices, pick, strict=True):
            if not 0 <= number < choice.options:
                raise ValueError(f"{number} is not among {choice.options} states")
            picked[choice.kind, choice.place, choice.sector] = number
        found: dict[Path, bytes] = {}
        if self._root.name in self._names(self._root.parent, picked):
            self._collect(self._root, picked, found)
        return found

    def restore(self, pick: Sequence[int], directory: Path) -> None:
        """Write the files of a state to ``directory``.

        Raises:
            ValueError: As :meth:`files`.
        """
        for path, content in self.files(pick).items():
            place = directory / path
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.write_bytes(content)
            place.chmod(0o600)

    def _every_choice(self) -> Iterator[_Choice]:
        for path, directory in self._state.directories.items():
            yield _Choice("names", path, len(directory.changes) + 1)
        for number, file in self._state.files.items():
            yield _Choice("size", number, len(file.sizes))
            yield _Choice("index", number, len(self._logs[number]))
            for sector, versions in file.sectors.items():
                yield _Choice("sector", number, len(versions) + 1, sector)

    def _names(
        self, path: Path, picked: Mapping[tuple[str, Path | int, int], int]
    ) -> dict[str, int]:
        directory = self._state.directories[path]
        lost = picked.get(("names", path, 0), 0)
        return directory.after(len(directory.changes) - lost)

    def _collect(
        self,
        path: Path,
        picked: Mapping[tuple[str, Path | int, int], int],
        found: dict[Path, bytes],
    ) -> None:
        for name, number in self._names(path, picked).items():
            place = path / name
            if number not in self._state.files:
                self._collect(place, picked, found)
                continue
            file = self._state.files[number]
            index = file.index
            if index.database or index.log:
                log = self._logs[number][picked.get(("index", number, 0), 0)]
                found[place.relative_to(self._root)] = index.database
                found[place.with_name(name + "-wal").relative_to(self._root)] = log()
                continue
            nbytes = file.sizes[-1 - picked.get(("size", number, 0), 0)]
            ages = {
                sector: picked.get(("sector", number, sector), 0) for sector in file.sectors
            }
            content = file.image(ages, nbytes, self._state.sector_nbytes)
            found[place.relative_to(self._root)] = content


def _log_states(
    file: FileState, sector_nbytes: int, step_nbytes: int
) -> list[Callable[[], bytes]]:
    """Return the possible logs of SQLite: whole, truncated, or with an old sector."""
    new, old = file.index.log, file.synced_index.log
    states: list[Callable[[], bytes]] = [lambda: new]
    if new == old:
        return states
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new, old, strict=False))
    first = sum(1 for _ in same)

    def mixed(start: int, end: int) -> Callable[[], bytes]:
        """Replace the bytes from ``start`` to ``end`` with old ones."""
        lost = old[start:end].ljust(min(end, len(new)) - start, b"\0")
        return lambda: new[:start] + lost + new[end:]

    def cut(end: int) -> Callable[[], bytes]:
        return lambda: new[:end] + old[end:]

    states += [cut(end) for end in range(first, len(new), step_nbytes)]
    states += [
        mixed(start, start + sector_nbytes)
        for start in range(first - first % sector_nbytes, len(new), sector_nbytes)
    ]
    return states
