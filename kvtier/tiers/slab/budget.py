"""One capacity for all models that used a store: the namespaces of others give way.

Except those that only an engine of another size could read. They are the cache of the very same
model, and what changed is a command line: to remove them would lose for a typing error what the
store is for.

The capacity is that of the slot files, where the bytes are. The index beside each takes some
100 bytes a slot and 20 MiB, which must be free when a slot file is made or grows.
"""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.index import index_room_nbytes
from kvtier.tiers.slab.lock import LOCK, try_acquire
from kvtier.tiers.slab.namespace import (
    SLOTS,
    Layout,
    Namespace,
    is_of_another_version,
    read_layout,
)
from kvtier.tiers.slab.slots import SlotFileSpec, no_room
from kvtier.units import approximate_size

__all__ = ["make_room"]

logger = logging.getLogger(__name__)

_NAMESPACE: Final = re.compile("[0-9a-f]{16}")
_RANKS: Final = "ranks"
_SPLIT: Final = {_RANKS, "stripes", "stripe_nbytes"}
"""Fields of a fingerprint that say how the ranks of an engine share a chunk."""


def make_room(own: Namespace, spec: SlotFileSpec, capacity_bytes: int, io: BlockIo) -> None:
    """Remove idle namespaces until they and this slot file fit ``capacity_bytes``.

    The least recently opened goes first. One that an engine has open counts against that
    engine's own capacity and is left alone; so is everything that is not ours. What another
    version of kvtier made and nobody has open counts and stays. What a removal cut short left
    goes in any case. Nothing is removed if the disk could not hold the file anyway.

    Raises:
        ConfigError: The disk has too little room, even without the idle namespaces; or one that
            would have to leave is of the same model at another number of ranks.
        OSError: The file system failed.
    """
    with contextlib.ExitStack() as stack:
        idle, foreign_nbytes = _look_around(own, spec.tier, io, stack)
        leaving = _choose(idle, excess=spec.nbytes + foreign_nbytes - capacity_bytes)
        for other in filter(_has_slots, leaving):
            _require_other_model(spec.tier, own, other, io)
        _require_room(own, spec, sum(other.slots_nbytes for other in leaving), io)
        for other in leaving:
            _remove(spec.tier, other, io)


def _look_around(
    own: Namespace, tier: str, io: BlockIo, stack: contextlib.ExitStack
) -> tuple[list[Namespace], int]:
    """Return idle namespaces, locked until ``stack`` ends, and the bytes of foreign ones."""
    idle: list[Namespace] = []
    foreign_nbytes = 0
    for directory in own.directory.parent.iterdir():
        if directory == own.directory or not _NAMESPACE.fullmatch(directory.name):
            continue
        other = Namespace.open_idle(directory, io)
        if other is not None:
            stack.callback(other.close)
            idle.append(other)
        elif is_of_another_version(directory, io) and _is_idle(directory, io):
            foreign_nbytes += _nbytes_of_another_version(tier, directory)
    return idle, foreign_nbytes


def _is_idle(directory: Path, io: BlockIo) -> bool:
    """Return whether no engine has ``directory`` open, of whichever version it is."""
    try:
        io.close(try_acquire(directory / LOCK, io))
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


def _choose(idle: list[Namespace], *, excess: int) -> list[Namespace]:
    """Pick the namespaces to remove; ``excess`` is by how much the new file alone is over."""
    excess += sum(other.slots_nbytes for other in idle)
    leaving = [other for other in idle if not _has_slots(other)]
    for other in sorted(filter(_has_slots, idle), key=lambda other: other.last_opened):
        if excess <= 0:
            break
        leaving.append(other)
        excess -= other.slots_nbytes
    return leaving


def _has_slots(namespace: Namespace) -> bool:
    """Return whether there is anything in it; its slots are the first thing a removal takes."""
    return namespace.slots_nbytes > 0


def _nbytes_of_another_version(tier: str, directory: Path) -> int:
    nbytes = sum(path.lstat().st_size for path in directory.glob(SLOTS))
    logger.warning(
        "tier %s: %s (%s) was made by another version of kvtier: it counts against the "
        "capacity and is not removed; remove it if that version is not to come back",
        tier,
        directory,
        approximate_size(nbytes),
    )
    return nbytes


def _require_other_model(tier: str, own: Namespace, other: Namespace, io: BlockIo) -> None:
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
        model,
        approximate_size(namespace.slots_nbytes),
        namespace.directory,
    )
    namespace.remove()
