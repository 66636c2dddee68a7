"""One capacity for all models that used a store: the namespaces of others give way.

Except those that only an engine of another size could read. They are the cache of the very same
model, and what changed is a command line: to remove them would lose for a typing error what the
store is for.
"""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.namespace import Layout, Namespace, read_layout
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
    engine's own capacity and is left alone; so is everything that is not ours. Nothing is
    removed if the disk could not hold the file anyway.

    Raises:
        ConfigError: The disk has too little room, even without the idle namespaces; or one that
            would have to leave is of the same model at another number of ranks.
        OSError: The file system failed.
    """
    growth = spec.nbytes - own.slots_nbytes
    with contextlib.ExitStack() as stack:
        idle: list[Namespace] = []
        for directory in own.directory.parent.iterdir():
            if directory != own.directory and _NAMESPACE.fullmatch(directory.name):
                other = Namespace.open_idle(directory, io)
                if other is not None:
                    stack.callback(other.close)
                    idle.append(other)
        leaving = _choose(idle, excess=spec.nbytes - capacity_bytes)
        for other in leaving:
            _require_other_model(spec.tier, own, other, io)
        free_nbytes = io.free_nbytes(own.directory)
        reclaimed = sum(other.slots_nbytes for other in leaving)
        if growth > 0 and free_nbytes is not None and free_nbytes + reclaimed < growth:
            raise no_room(spec, free_nbytes)
        for other in leaving:
            _remove(spec.tier, other, io)


def _choose(idle: list[Namespace], *, excess: int) -> list[Namespace]:
    """Pick the namespaces to remove; ``excess`` is by how much the new file alone is over."""
    excess += sum(other.slots_nbytes for other in idle)
    leaving: list[Namespace] = []
    for other in sorted(idle, key=lambda other: other.last_opened):
        if excess <= 0:
            break
        if other.slots_nbytes:
            leaving.append(other)
            excess -= other.slots_nbytes
    return leaving


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
