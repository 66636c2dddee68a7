"""What a start does with the other caches of a store, decided from values.

All namespaces of a store share the capacity, so a cache with a new identity needs the room of
another one. This module decides which ones have to leave and whether they may. The start
carries the plan out, and ``kvtier check``, ``doctor`` and ``vllm-args`` print it.

A cache that holds chunks and was used within ``keep_for`` leaves only with
``on_mismatch: remove``: what changed may be a typing error in a command line.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import NvmeTierConfig, Remark
from kvtier.tiers.slab.index import index_room_nbytes
from kvtier.units import approximate_duration, approximate_size

__all__ = [
    "Fields",
    "Neighbour",
    "Opening",
    "StartPlan",
    "State",
    "describe_difference",
    "plan_start",
    "wanted_nbytes",
]

Fields = Mapping[str, str | int]
"""An identity, or the known part of it."""


class State(enum.Enum):
    """Who has a namespace."""

    IDLE = "idle"
    """Nobody."""
    ENGINE = "engine"
    """An engine, within a capacity of its own."""
    PASSING = "passing"
    """A tool, or the I/O of an engine that died: the namespace is idle soon."""
    LATER = "later"
    """Nobody, but a later version of kvtier made it, and it is not removed."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A namespace in the same directory as the one that is opened.

    Attributes:
        directory: Where its files are.
        state: Who has it.
        slots_nbytes: Bytes of the slot file; 0 if there is none.
        slot_nbytes: Bytes of one slot; 0 if that is unknown.
        model: The model's name for people.
        fields: Its identity; None if another version made it.
        chunks: How many chunks it holds; None if that is unknown.
        last_opened: When an engine opened it, comparable with other namespaces' times.
        last_used_s: When it was last written or put here, in seconds since the epoch.
        holder: Who has it, for people; empty if nobody has.
    """

    directory: Path
    state: State
    slots_nbytes: int
    slot_nbytes: int = 0
    model: str = "unknown"
    fields: Fields | None = None
    chunks: int | None = None
    last_opened: int = 0
    last_used_s: float = 0.0
    holder: str = ""

    def describe(self, now_s: float) -> str:
        """Return what the cache is and what it holds, for a message."""
        held = approximate_size(self.slots_nbytes)
        if self.chunks is not None:
            held += f" with {self.chunks:,} chunk{'' if self.chunks == 1 else 's'}"
        age = approximate_duration(max(now_s - self.last_used_s, 0))
        return f"the cache of model {self.model} in {self.directory} ({held}, used {age} ago)"


@dataclass(frozen=True, slots=True)
class Opening:
    """What is about to be opened.

    Attributes:
        fields: Its identity, or the part of it that is known.
        nbytes: Bytes of its slot file.
        now_s: The time, in seconds since the epoch.
    """

    fields: Fields
    nbytes: int
    now_s: float


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What a start does.

    Attributes:
        leaving: What it removes, in this order. Where there are refusals, it removes nothing.
        refusals: Why it does not start.
        warnings: What the operator should know.
    """

    leaving: Sequence[Neighbour] = ()
    refusals: Sequence[Remark] = ()
    warnings: Sequence[Remark] = ()

    @property
    def awaited(self) -> Neighbour | None:
        """What has to leave and cannot yet."""
        return next((each for each in self.leaving if each.state is State.PASSING), None)

    @property
    def reclaimed_nbytes(self) -> int:
        """Bytes of slots that it removes."""
        return sum(each.slots_nbytes for each in self.leaving)


def plan_start(
    opening: Opening, neighbours: Sequence[Neighbour], options: NvmeTierConfig
) -> StartPlan:
    """Return what a start does with ``neighbours``.

    The least recently opened leaves first. One that an engine has open stays, and so does what
    a later version of kvtier made. What a removal cut short left goes in any case.
    """
    warnings = [
        _side_by_side(each, options) for each in neighbours if each.state is State.ENGINE
    ]
    later = [each for each in neighbours if each.state is State.LATER and each.slots_nbytes]
    excess = opening.nbytes - options.capacity_bytes
    excess += sum(each.slots_nbytes for each in later)
    if excess > 0 and later:
        refusals = [_later_version(each, options) for each in later]
        return StartPlan(refusals=refusals, warnings=warnings)
    leaving = _choose(neighbours, excess)
    refusals = [
        _mismatch(each, opening, options)
        for each in leaving
        if _is_protected(each, opening, options)
    ]
    if not refusals:
        warnings += [_removal(each, opening) for each in leaving if each.slots_nbytes]
    return StartPlan(leaving, refusals, warnings)


def wanted_nbytes(nbytes: int, slots: int, own_slots_nbytes: int, own_index_nbytes: int) -> int:
    """Return the room that a slot file of ``nbytes`` and its index still need on the disk.

    Args:
        nbytes: Of the slot file.
        slots: Slots in it.
        own_slots_nbytes: What the slot file has; one that does not grow needs nothing.
        own_index_nbytes: What the index has.
    """
    if nbytes <= own_slots_nbytes:
        return 0
    return nbytes - own_slots_nbytes + max(index_room_nbytes(slots) - own_index_nbytes, 0)


def describe_difference(theirs: Fields | None, ours: Fields) -> str:
    """Return each field of ``ours`` that ``theirs`` has another value of, in words.

    >>> describe_difference({"model": "a", "ranks": 1}, {"model": "b", "ranks": 1})
    "model is 'a' there and 'b' here"
    """
    if theirs is None:
        return "it was written by another version of kvtier"
    return ", ".join(
        f"{name} is {theirs.get(name, '')!r} there and {value!r} here"
        for name, value in sorted(ours.items())
        if theirs.get(name, "") != value
    )


def _choose(neighbours: Sequence[Neighbour], excess: int) -> list[Neighbour]:
    """Pick what has to leave; ``excess`` is by how much the new file alone is over."""
    candidates = [each for each in neighbours if each.state in {State.IDLE, State.PASSING}]
    leaving = [
        each for each in candidates if not each.slots_nbytes and each.state is State.IDLE
    ]
    stored = [each for each in candidates if each.slots_nbytes]
    excess += sum(each.slots_nbytes for each in stored)
    for each in sorted(stored, key=lambda each: each.last_opened):
        if excess <= 0:
            break
        leaving.append(each)
        excess -= each.slots_nbytes
    return leaving


def _is_protected(each: Neighbour, opening: Opening, options: NvmeTierConfig) -> bool:
    """Return whether ``each`` must not be removed; one that is not idle is waited for first."""
    return (
        each.state is State.IDLE
        and each.slots_nbytes > 0
        and each.chunks != 0
        and options.on_mismatch == "refuse"
        and opening.now_s - each.last_used_s < options.keep_for_s
    )


def _mismatch(each: Neighbour, opening: Opening, options: NvmeTierConfig) -> Remark:
    capacity = approximate_size(options.capacity_bytes)
    return Remark(
        "on_mismatch",
        f"the capacity of {capacity} is not enough beside {each.describe(opening.now_s)}, "
        f"which is {_other(each, opening)}",
        "start the engine as before, give this one another path, or set on_mismatch: remove, "
        "which deletes that cache",
    )


def _removal(each: Neighbour, opening: Opening) -> Remark:
    return Remark(
        "capacity",
        f"removing {each.describe(opening.now_s)} to stay within capacity: it is "
        f"{_other(each, opening)}",
        "give each model a path of its own to keep both",
    )


def _other(each: Neighbour, opening: Opening) -> str:
    difference = describe_difference(each.fields, opening.fields)
    return f"of another identity ({difference})" if difference else "of another identity"


def _later_version(each: Neighbour, options: NvmeTierConfig) -> Remark:
    return Remark(
        "path",
        f"{each.directory} ({approximate_size(each.slots_nbytes)}) was made by a later version "
        f"of kvtier, and the capacity of {approximate_size(options.capacity_bytes)} is not "
        "enough beside it",
        "remove it if that version is not to come back, or give this one another path",
    )


def _side_by_side(each: Neighbour, options: NvmeTierConfig) -> Remark:
    ours, theirs = map(approximate_size, (options.capacity_bytes, each.slots_nbytes))
    return Remark(
        "path",
        f"{each.holder} has {each.directory} open for model {each.model}: each engine keeps to "
        f"its own capacity, so together they take {theirs} and {ours}",
        "give each engine a path of its own",
    )
