"""Plans what a starting engine does with the other caches in its directory.

All namespaces in a cache directory share the capacity, so a new cache may need the room of
another cache. This module decides which caches to remove and whether that is allowed. The start
executes the plan; ``kvtier check``, ``doctor`` and ``vllm-args`` print it.

A cache that holds chunks and was used within ``keep_for`` is removed only with ``on_mismatch:
remove``. A typing error in a command line also makes a new identity, and must not delete such a
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvtier.config import NvmeTierConfig, Remark, TierConfig
from kvtier.errors import ConfigError
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.neighbours import Neighbour, State
from kvtier.tiers.slab.schema import index_room_nbytes
from kvtier.units import approximate_size

__all__ = [
    "Opening",
    "StartPlan",
    "describe_difference",
    "plan_start",
    "room_needed",
    "slab_options",
]


@dataclass(frozen=True, slots=True)
class Opening:
    """The namespace that is about to be opened.

    Attributes:
        fields: The namespace's identity, or the known part of it.
        nbytes: Bytes of the namespace's slot file.
        now_s: The present time, in seconds since the epoch.
    """

    fields: Fields
    nbytes: int
    now_s: float = field(default_factory=lambda: datetime.now(UTC).timestamp())


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What a starting engine does with the other namespaces in its cache directory.

    The namespaces to remove are in order. If there are refusals, no namespace is removed.
    """

    removed: Sequence[Neighbour] = ()
    refusals: Sequence[Remark] = ()
    warnings: Sequence[Remark] = ()

    @property
    def awaited(self) -> Neighbour | None:
        """The first namespace that must be removed but is still open; None if all are idle."""
        return next((each for each in self.removed if each.state is State.PASSING), None)

    @property
    def reclaimed_nbytes(self) -> int:
        """Bytes of the slot files to remove."""
        return sum(each.slots_nbytes for each in self.removed)


def plan_start(
    opening: Opening, neighbours: Sequence[Neighbour], options: NvmeTierConfig
) -> StartPlan:
    """Plan what a starting engine does with ``neighbours``, the directory's other namespaces.

    The least recently opened namespace is removed first. A namespace stays if an engine has it
    open or another version made it. An idle namespace without a slot file is always removed: it
    is left over from an interrupted removal.
    """
    warnings = [
        _side_by_side(each, options) for each in neighbours if each.state is State.ENGINE
    ]
    others = [
        each for each in neighbours if each.state is State.OTHER_VERSION and each.slots_nbytes
    ]
    excess = opening.nbytes - options.capacity_bytes
    excess += sum(each.slots_nbytes for each in others)
    if excess > 0 and others:
        refusals = [_other_version(each, options) for each in others]
        return StartPlan(refusals=refusals, warnings=warnings)
    removed = _choose(neighbours, excess)
    refusals = [
        _mismatch(each, opening, options)
        for each in removed
        if _is_protected(each, opening, options)
    ]
    if not refusals:
        warnings += [_removal(each, opening) for each in removed if each.slots_nbytes]
    return StartPlan(removed, refusals, warnings)


def slab_options(options: TierConfig) -> NvmeTierConfig:
    """Return ``options``; raise a ConfigError if they are not the options of a slab tier."""
    if not isinstance(options, NvmeTierConfig):
        raise ConfigError(f"a slab tier takes NvmeTierConfig, not {type(options).__name__}")
    return options


def room_needed(
    nbytes: int, slots: int, own_slots_nbytes: int, own_index_nbytes: int
) -> tuple[int, int]:
    """Return how many more bytes of disk the slot file needs, and how many its index.

    If the slot file does not grow, both numbers are 0.

    Args:
        nbytes: Bytes of the slot file to open.
        slots: Number of slots.
        own_slots_nbytes: Present bytes of the slot file.
        own_index_nbytes: Present bytes of the index.
    """
    if nbytes <= own_slots_nbytes:
        return 0, 0
    index_nbytes = max(index_room_nbytes(slots) - own_index_nbytes, 0)
    return nbytes - own_slots_nbytes, index_nbytes


def describe_difference(theirs: Fields | None, ours: Fields) -> str:
    """Describe the fields of ``ours`` that differ in ``theirs``; empty if all are equal.

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
    """Return the namespaces to remove.

    ``excess`` is by how many bytes the new slot file and those of other versions exceed the
    capacity.
    """
    candidates = [each for each in neighbours if each.state in {State.IDLE, State.PASSING}]
    removed = [
        each for each in candidates if not each.slots_nbytes and each.state is State.IDLE
    ]
    stored = [each for each in candidates if each.slots_nbytes]
    excess += sum(each.slots_nbytes for each in stored)
    for each in sorted(stored, key=lambda each: each.last_opened):
        if excess <= 0:
            break
        removed.append(each)
        excess -= each.slots_nbytes
    return removed


def _is_protected(each: Neighbour, opening: Opening, options: NvmeTierConfig) -> bool:
    """Return whether ``each`` is an idle namespace that ``options`` protect from removal."""
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


def _other_version(each: Neighbour, options: NvmeTierConfig) -> Remark:
    return Remark(
        "path",
        f"{each.directory} ({approximate_size(each.slots_nbytes)}) was made by another version "
        f"of kvtier, and the capacity of {approximate_size(options.capacity_bytes)} is not "
        "enough beside it",
        "remove it if you no longer use that version, or give this one another path",
    )


def _side_by_side(each: Neighbour, options: NvmeTierConfig) -> Remark:
    ours, theirs = map(approximate_size, (options.capacity_bytes, each.slots_nbytes))
    return Remark(
        "path",
        f"{each.holder} has {each.directory} open for model {each.model}: each engine keeps to "
        f"its own capacity, so together they take {theirs} and {ours}",
        "give each engine a path of its own",
    )
