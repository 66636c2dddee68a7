"""One capacity for all models that used a store: the namespaces of others give way.

Except those that only an engine of another size could read. They are the cache of the very same
model, and what changed is a command line: to remove them would lose for a typing error what the
store is for.

The capacity is that of the slot files, where the bytes are. The index beside each takes some
120 bytes a slot and 20 MiB, which must be free when a slot file is made or grows.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.logs import get_logger
from kvtier.printable import printable
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.index import index_room_nbytes
from kvtier.tiers.slab.lock import try_acquire
from kvtier.tiers.slab.namespace import (
    SLOTS,
    Layout,
    Namespace,
    Occupied,
    is_named_as_one,
    is_of_later_version,
    nbytes_of,
    read_layout,
    why_unreadable,
)
from kvtier.tiers.slab.slots import SlotFileSpec, no_room
from kvtier.units import approximate_size

__all__ = ["make_room"]

logger = get_logger(__name__)

_RANKS: Final = "ranks"
_SPLIT: Final = {_RANKS, "stripes", "stripe_nbytes"}
"""Fields of a fingerprint that say how the ranks of an engine share a chunk."""


def make_room(
    own: Namespace, spec: SlotFileSpec, capacity_bytes: int, io: BlockIo, *, patient: bool
) -> Occupied | None:
    """Remove idle namespaces until they and this slot file fit ``capacity_bytes``.

    The least recently opened goes first. One that an engine has open counts against that
    engine's own capacity and is left alone; so is everything that is not ours. What a later
    version of kvtier made and nobody has open counts and stays, so there may be no room for
    this one. What a removal cut short left goes in any case. Nothing is removed if the disk
    could not hold the file anyway.

    Args:
        own: The namespace that is being opened.
        spec: Its slot file.
        capacity_bytes: For all of them.
        io: Does it.
        patient: Whether a holder that is not found running is said to be in the way, for it may
            be the I/O of an engine that died. Otherwise it counts as an engine: in a container
            of its own one is not found either.

    Returns:
        None if all is within the capacity now. Otherwise what has to leave and cannot yet,
        because somebody who is no engine has it; then nothing was removed.

    Raises:
        ConfigError: The disk has too little room, even without the idle namespaces; or one that
            would have to leave is of the same model at another number of ranks, or was made by
            a later version.
        OSError: The file system failed.
    """
    with contextlib.ExitStack() as stack:
        others, foreign = _look_around(own, io, stack, patient=patient)
        _require_capacity(spec, foreign, capacity_bytes)
        leaving = _choose(others, spec.nbytes + sum(foreign.values()) - capacity_bytes)
        occupied = [other for other in leaving if isinstance(other, Occupied)]
        if occupied:
            return occupied[0]
        _warn_of_unreadable(spec.tier, own, io)
        for other in filter(_has_slots, leaving):
            _require_other_model(spec.tier, own, other, io)
        _require_room(own, spec, sum(other.slots_nbytes for other in leaving), io)
        for other in leaving:
            if isinstance(other, Namespace):
                _remove(spec.tier, other, io)
    return None


def _look_around(
    own: Namespace, io: BlockIo, stack: contextlib.ExitStack, *, patient: bool
) -> tuple[list[Namespace | Occupied], dict[Path, int]]:
    """Return namespaces of no engine, and the bytes of those of a later version.

    The former are locked until ``stack`` ends, but for those that somebody else has.
    """
    others: list[Namespace | Occupied] = []
    foreign: dict[Path, int] = {}
    for directory in own.directory.parent.iterdir():
        if directory == own.directory or not is_named_as_one(directory):
            continue
        other = Namespace.open_idle(directory, io)
        if isinstance(other, Namespace):
            stack.callback(other.close)
            others.append(other)
        elif other is not None and (patient or other.by_tool):
            others.append(other)
        elif is_of_later_version(directory, io) and _is_idle(directory, io):
            foreign[directory] = nbytes_of(directory / SLOTS)
    return others, foreign


def _is_idle(directory: Path, io: BlockIo) -> bool:
    """Return whether no engine has ``directory`` open, of whichever version it is."""
    try:
        io.close(try_acquire(directory, io))
    except OSError:
        return False
    return True


def _require_room(
    own: Namespace, spec: SlotFileSpec, reclaimed_nbytes: int, io: BlockIo
) -> None:
    """Refuse a slot file, or its growth, that the disk cannot hold together with its index."""
    if spec.nbytes <= own.slots_nbytes:
        return  # what is reserved already is no reason not to start
    index_nbytes = max(index_room_nbytes(spec.capacity_slots) - own.index_nbytes, 0)
    wanted_nbytes = spec.nbytes - own.slots_nbytes + index_nbytes
    free_nbytes = io.free_nbytes(own.directory)
    if free_nbytes is not None and free_nbytes + reclaimed_nbytes < wanted_nbytes:
        raise no_room(spec, free_nbytes, index_nbytes)


def _choose(others: list[Namespace | Occupied], excess: int) -> list[Namespace | Occupied]:
    """Pick the namespaces to remove; ``excess`` is by how much the new file alone is over."""
    excess += sum(other.slots_nbytes for other in others)
    rests = (other for other in others if not _has_slots(other))
    leaving: list[Namespace | Occupied] = [
        other for other in rests if isinstance(other, Namespace)
    ]
    for other in sorted(filter(_has_slots, others), key=lambda other: other.last_opened):
        if excess <= 0:
            break
        leaving.append(other)
        excess -= other.slots_nbytes
    return leaving


def _has_slots(namespace: Namespace | Occupied) -> bool:
    """Return whether there is anything in it; its slots are the first thing a removal takes."""
    return namespace.slots_nbytes > 0


def _require_capacity(
    spec: SlotFileSpec, foreign: dict[Path, int], capacity_bytes: int
) -> None:
    """Refuse a slot file that would exceed the capacity whatever of ours leaves."""
    if spec.nbytes + sum(foreign.values()) <= capacity_bytes:
        return
    capacity = approximate_size(capacity_bytes)
    problems = [
        f"tier {spec.tier}: {directory} ({approximate_size(nbytes)}) was made by a later "
        f"version of kvtier, and the capacity of {capacity} is not enough beside it; remove it "
        "if that version is not to come back, or give this one another path"
        for directory, nbytes in foreign.items()
        if nbytes
    ]
    raise ConfigError("\n".join(problems))


def _warn_of_unreadable(tier: str, own: Namespace, io: BlockIo) -> None:
    """Say what takes room that cannot be counted."""
    for directory in filter(is_named_as_one, own.directory.parent.iterdir()):
        if reason := why_unreadable(directory, io):
            logger.warning(
                "tier %s: %s looks like a cache of kvtier's, but %s: its room is not counted "
                "against the capacity; remove it, or let this user read it",
                tier,
                directory,
                reason,
            )


def _require_other_model(
    tier: str, own: Namespace, other: Namespace | Occupied, io: BlockIo
) -> None:
    """Refuse to remove what the same model stored at another number of ranks."""
    ours, theirs = read_layout(own.directory, io), read_layout(other.directory, io)
    if ours is None or theirs is None or _but_split(ours) != _but_split(theirs):
        return
    here, there = (layout.fingerprint.fields.get(_RANKS) for layout in (ours, theirs))
    if here == there or not (isinstance(here, int) and isinstance(there, int)):
        return
    raise ConfigError(
        f"tier {tier}: {other.directory} keeps the cache of this model for {there} ranks "
        f"(--tensor-parallel-size), which an engine of {here} cannot read, and the capacity is "
        f"not enough for both; start it with {there} as before, give it another path, or "
        "remove that directory"
    )


def _but_split(layout: Layout) -> dict[str, object]:
    fields = layout.fingerprint.fields
    return {name: fields[name] for name in fields if name not in _SPLIT}


def _remove(tier: str, namespace: Namespace, io: BlockIo) -> None:
    if not _has_slots(namespace):
        logger.info("tier %s: removing the rest of %s", tier, namespace.directory)
        namespace.remove()
        return
    layout = read_layout(namespace.directory, io)
    model = layout.fingerprint.fields.get("model", "unknown") if layout else "unknown"
    logger.warning(
        "tier %s: removing the cache of model %s (%s in %s) to stay within capacity",
        tier,
        printable(str(model)),
        approximate_size(namespace.slots_nbytes),
        namespace.directory,
    )
    namespace.remove()
