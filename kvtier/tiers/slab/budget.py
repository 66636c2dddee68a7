"""Make room for the namespace that is opened; all models share the store's capacity.

:mod:`kvtier.tiers.slab.start_plan` decides which namespaces to remove. This module locks and
removes them.

The capacity limits the slot files. The index beside each takes some 120 bytes a slot and 20
MiB, which must be free when a slot file is created or grows.
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
    has_namespace_name,
    is_of_other_version,
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
    """Remove idle namespaces until the rest and this slot file fit the capacity.

    Nothing is removed if the disk could not hold the file anyway.

    Args:
        own: The namespace that is being opened.
        spec: Its slot file.
        options: The tier's options.
        io: System calls.
        patient: Whether to wait for a holder whose process is not found, because it may be the
            I/O process of an engine that died. Otherwise it counts as an engine, because it may
            run in another container.

    Returns:
        None if everything is within the capacity now. Otherwise the namespace to wait for; then
        nothing was removed.

    Raises:
        ConfigError: The disk has too little room even without the idle namespaces; or one that
            must be removed is protected, or was made by another version.
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
        for each in plan.removed:
            if not each.slots_nbytes:
                logger.info("tier %s: removing the rest of %s", spec.tier, each.directory)
            locked[each.directory].remove()
    return None


def describe_neighbour(
    directory: Path, state: State, io: BlockIo, *, holder: str = ""
) -> Neighbour:
    """Return what is known about a namespace; chunks are counted only if it is idle.

    Raises:
        OSError: Its files cannot be looked at.
    """
    layout = read_layout(directory, io)
    slots_nbytes = nbytes_of(directory / SLOTS)
    chunks = None
    if layout is not None and state is State.IDLE and slots_nbytes:
        chunks = count_chunks(StoredNamespace(directory, layout))
    found = list(_statuses(directory))
    # The change time counts as well: a copy may keep the original's modification time.
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
    """Yield a remark on each directory in ``root`` that cannot be measured."""
    for directory in filter(has_namespace_name, root.iterdir()):
        if reason := why_unreadable(directory, io):
            problem = (
                f"{directory} looks like a cache of kvtier's, but {reason}: its room is not "
                "counted against the capacity"
            )
            yield Remark("path", problem, "remove it, or let this user read it")


def unix_time_s() -> float:
    """Return the time in seconds since the epoch, to compare with files' times."""
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
    """Return the other namespaces: those locked by this call, those to wait for, and all."""
    locked: dict[Path, Namespace] = {}
    occupied: dict[Path, Occupied] = {}
    neighbours: list[Neighbour] = []
    for directory in filter(has_namespace_name, own.directory.parent.iterdir()):
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
        elif not (is_ours(directory, io) or is_of_other_version(directory, io)):
            continue
        elif not _is_idle(directory, io):
            state, holder = State.ENGINE, read_holder(directory) or "another process"
        elif is_of_other_version(directory, io):
            state = State.OTHER_VERSION
        else:
            continue
        neighbours.append(describe_neighbour(directory, state, io, holder=holder))
    return locked, occupied, neighbours


def _is_idle(directory: Path, io: BlockIo) -> bool:
    """Return whether no process has ``directory`` locked, whatever its version."""
    try:
        io.close(try_acquire(directory, io))
    except OSError:
        return False
    return True


def _require_room(
    own: Namespace, spec: SlotFileSpec, reclaimed_nbytes: int, io: BlockIo
) -> None:
    """Raise ConfigError if the disk cannot hold the slot file and its index."""
    wanted = wanted_nbytes(spec.nbytes, spec.capacity_slots, own.slots_nbytes, own.index_nbytes)
    free_nbytes = io.free_nbytes(own.directory)
    if free_nbytes is not None and free_nbytes + reclaimed_nbytes < wanted:
        index_nbytes = max(wanted - (spec.nbytes - own.slots_nbytes), 0)
        raise no_room(spec, free_nbytes, index_nbytes)


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file whose times say when a namespace was used."""
    for name in (SLOTS, INDEX, f"{INDEX}-wal", LOCK):
        with contextlib.suppress(FileNotFoundError):
            yield (directory / name).stat()
