"""One capacity for all models that used a store: make room for the one that is opened.

:mod:`kvtier.tiers.slab.start_plan` decides what leaves. Here it is locked and removed.

The capacity is that of the slot files, where the bytes are. The index beside each takes some
120 bytes a slot and 20 MiB, which must be free when a slot file is made or grows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvtier.config import NvmeTierConfig, Remark
from kvtier.errors import ConfigError
from kvtier.logs import get_logger
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.inspect import StoredNamespace, count_chunks
from kvtier.tiers.slab.lock import LOCK, last_opened, read_holder, try_acquire
from kvtier.tiers.slab.namespace import (
    INDEX,
    SLOTS,
    Namespace,
    Occupied,
    is_named_as_one,
    is_of_later_version,
    is_ours,
    nbytes_of,
    read_layout,
    why_unreadable,
)
from kvtier.tiers.slab.slots import SlotFileSpec, no_room
from kvtier.tiers.slab.start_plan import (
    Neighbour,
    Opening,
    State,
    plan_start,
    wanted_nbytes,
)

__all__ = ["describe_neighbour", "make_room", "unix_time_s", "unreadable_neighbours"]

logger = get_logger(__name__)


def make_room(
    own: Namespace, spec: SlotFileSpec, options: NvmeTierConfig, io: BlockIo, *, patient: bool
) -> Occupied | None:
    """Remove idle namespaces until they and this slot file fit the capacity.

    Nothing is removed if the disk could not hold the file anyway.

    Args:
        own: The namespace that is being opened.
        spec: Its slot file.
        options: The capacity for all of them, and what may be removed.
        io: Does it.
        patient: Whether a holder that is not found running is said to be in the way, for it may
            be the I/O of an engine that died. Otherwise it counts as an engine: in a container
            of its own one is not found either.

    Returns:
        None if all is within the capacity now. Otherwise what has to leave and cannot yet,
        because somebody who is no engine has it; then nothing was removed.

    Raises:
        ConfigError: The disk has too little room, even without the idle namespaces; or one that
            would have to leave is protected, or was made by a later version.
        OSError: The file system failed.
    """
    with contextlib.ExitStack() as stack:
        locked, occupied, neighbours = _look_around(own, io, stack, patient=patient)
        plan = plan_start(_opening(own, spec, io), neighbours, options)
        if plan.refusals:
            raise ConfigError("\n".join(_line(spec, each) for each in plan.refusals))
        if plan.awaited is not None:
            return occupied[plan.awaited.directory]
        for remark in unreadable_neighbours(own.directory.parent, io):
            logger.warning("%s", _line(spec, remark))
        _require_room(own, spec, plan.reclaimed_nbytes, io)
        for remark in plan.warnings:
            logger.warning("%s", _line(spec, remark))
        for each in plan.leaving:
            if not each.slots_nbytes:
                logger.info("tier %s: removing the rest of %s", spec.tier, each.directory)
            locked[each.directory].remove()
    return None


def describe_neighbour(
    directory: Path, state: State, io: BlockIo, *, holder: str = ""
) -> Neighbour:
    """Return what is known of a namespace; chunks are counted where nobody has it.

    Raises:
        OSError: Its files cannot be looked at.
    """
    layout = read_layout(directory, io)
    slots_nbytes = nbytes_of(directory / SLOTS)
    chunks = None
    if layout is not None and state is State.IDLE and slots_nbytes:
        chunks = count_chunks(StoredNamespace(directory, layout))
    found = list(_statuses(directory))
    # The change time too: a copy that keeps other times arrived here when it was made.
    used = (max(status.st_mtime, status.st_ctime) for status in found)
    return Neighbour(
        directory=directory,
        state=state,
        slots_nbytes=slots_nbytes,
        slot_nbytes=0 if layout is None else layout.slot_nbytes,
        model="unknown" if layout is None else layout.model,
        fields=None if layout is None else layout.fingerprint.fields,
        chunks=chunks,
        last_opened=last_opened(directory),
        last_used_s=max(used, default=0.0),
        holder=holder,
    )


def unreadable_neighbours(root: Path, io: BlockIo) -> Iterator[Remark]:
    """Yield what takes room in the store at ``root`` that cannot be counted."""
    for directory in filter(is_named_as_one, root.iterdir()):
        if reason := why_unreadable(directory, io):
            problem = (
                f"{directory} looks like a cache of kvtier's, but {reason}: its room is not "
                "counted against the capacity"
            )
            yield Remark("path", problem, "remove it, or let this user read it")


def unix_time_s() -> float:
    """Return the time of day, which files' times are compared with."""
    return datetime.now(UTC).timestamp()


def _line(spec: SlotFileSpec, remark: Remark) -> str:
    return f"tier {spec.tier}: {remark.problem}; {remark.remedy}"


def _opening(own: Namespace, spec: SlotFileSpec, io: BlockIo) -> Opening:
    layout = read_layout(own.directory, io)
    fields = {} if layout is None else layout.fingerprint.fields
    return Opening(fields, spec.nbytes, unix_time_s())


def _look_around(
    own: Namespace, io: BlockIo, stack: contextlib.ExitStack, *, patient: bool
) -> tuple[dict[Path, Namespace], dict[Path, Occupied], list[Neighbour]]:
    """Return the other namespaces: those that are locked now, those of others, and all."""
    locked: dict[Path, Namespace] = {}
    occupied: dict[Path, Occupied] = {}
    neighbours: list[Neighbour] = []
    for directory in filter(is_named_as_one, own.directory.parent.iterdir()):
        if directory == own.directory:
            continue
        other = Namespace.open_idle(directory, io)
        holder = ""
        if isinstance(other, Namespace):
            stack.callback(other.close)
            locked[directory] = other
            state = State.IDLE
        elif other is not None and (patient or other.by_tool):
            occupied[directory] = other
            state, holder = State.PASSING, other.holder
        elif not (is_ours(directory, io) or is_of_later_version(directory, io)):
            continue
        elif not _is_idle(directory, io):
            state, holder = State.ENGINE, read_holder(directory) or "another process"
        elif is_of_later_version(directory, io):
            state = State.LATER
        else:
            continue
        neighbours.append(describe_neighbour(directory, state, io, holder=holder))
    return locked, occupied, neighbours


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
    wanted = wanted_nbytes(spec.nbytes, spec.capacity_slots, own.slots_nbytes, own.index_nbytes)
    free_nbytes = io.free_nbytes(own.directory)
    if free_nbytes is not None and free_nbytes + reclaimed_nbytes < wanted:
        index_nbytes = max(wanted - (spec.nbytes - own.slots_nbytes), 0)
        raise no_room(spec, free_nbytes, index_nbytes)


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file that tells when a namespace was used."""
    for name in (SLOTS, INDEX, f"{INDEX}-wal", LOCK):
        with contextlib.suppress(FileNotFoundError):
            yield (directory / name).stat()
