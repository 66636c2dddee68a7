"""Describe the namespaces in a cache directory, for engines and commands.

A starting engine locks the namespaces that it finds, but ``kvtier check`` locks none. So this
module only reads files, and its callers check the locks.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Remark
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.index_reader import count_chunks
from kvtier.tiers.slab.inspect import WAL, Found, StoredNamespace
from kvtier.tiers.slab.lock import LOCK, is_tool, last_opened, passing_holder, read_holder
from kvtier.tiers.slab.namespace import INDEX, SLOTS, Layout, nbytes_of
from kvtier.units import approximate_duration, approximate_size

__all__ = ["Neighbour", "State", "describe", "unusable"]


class State(enum.Enum):
    """State of a namespace."""

    IDLE = "idle"
    """No process has the namespace open."""
    ENGINE = "engine"
    """An engine has the namespace open; the slots count against that engine's capacity."""
    PASSING = "passing"
    """A tool or the I/O process of a dead engine has the namespace open for a short time."""
    OTHER_VERSION = "other version"
    """Another version of kvtier made the namespace, so an engine keeps it. No process has the
    namespace open."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A namespace in the cache directory of a starting engine.

    Attributes:
        layout: None if another version of kvtier made the namespace.
        slots_nbytes: Bytes of the slot file; 0 if it is missing.
        chunks: Number of chunks; None if unknown.
        last_opened: Time when an engine last opened the namespace, in ns since the epoch.
        last_used_s: Time of the last write, or of the copy to this directory, since the epoch.
        holder: Name of the process that has the namespace open, for people; else empty.
    """

    directory: Path
    state: State
    layout: Layout | None
    slots_nbytes: int
    chunks: int | None
    last_opened: int
    last_used_s: float
    holder: str

    @property
    def fields(self) -> Fields | None:
        """Identity of the namespace; None if another version of kvtier made the namespace."""
        return None if self.layout is None else self.layout.fingerprint.fields

    @property
    def model(self) -> str:
        """The model's human-readable name."""
        return "unknown" if self.layout is None else self.layout.model

    def describe(self, now_s: float) -> str:
        """Return a description of this namespace for a message to the operator."""
        held = approximate_size(self.slots_nbytes)
        if self.chunks is not None:
            held += f" with {self.chunks:,} chunk{'' if self.chunks == 1 else 's'}"
        age = approximate_duration(max(now_s - self.last_used_s, 0))
        return f"the cache of model {self.model} in {self.directory} ({held}, used {age} ago)"


def describe(found: Found, *, is_locked: bool, patient: bool = True) -> Neighbour:
    """Return the known facts about a namespace; count its chunks only if it is idle.

    If ``patient``, a lock holder that this process cannot see counts as the I/O process of a
    dead engine, else as an engine in another container.
    """
    directory, layout = found.directory, found.layout
    state, holder = State.OTHER_VERSION if found.is_other_version else State.IDLE, ""
    if is_locked:
        holder = passing_holder(directory)
        is_passing = is_tool(holder) or (patient and bool(holder))
        state = State.PASSING if is_passing and layout is not None else State.ENGINE
        holder = holder or read_holder(directory) or "another process"
    slots_nbytes = nbytes_of(directory / SLOTS)
    chunks = None
    if layout is not None and state is State.IDLE and slots_nbytes:
        chunks = count_chunks(StoredNamespace(directory, layout))
    return Neighbour(
        directory=directory,
        state=state,
        layout=layout,
        slots_nbytes=slots_nbytes,
        chunks=chunks,
        last_opened=last_opened(directory),
        last_used_s=max(_times_of_use(directory), default=0.0),
        holder=holder,
    )


def unusable(found: Sequence[Found]) -> Iterator[Remark]:
    """Yield a remark on each unusable directory that takes disk space."""
    for each in found:
        if each.problem:
            problem = (
                f"{each.directory} looks like a cache of kvtier's, but {each.problem}: its "
                "room is not counted against the capacity"
            )
            yield Remark("path", problem, "remove it, or let this user read it")


def _times_of_use(directory: Path) -> Iterator[float]:
    """Yield the time of the last change of each file, in seconds since the epoch."""
    for name in (SLOTS, INDEX, WAL, LOCK):
        with contextlib.suppress(FileNotFoundError):
            status = (directory / name).stat()
            # The change time counts as well: a copy may keep the original's modification time.
            yield max(status.st_mtime, status.st_ctime)
