"""The directory of an NVMe tier: may it be used, is there room, who uses it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtier.doctor._finding import Finding, Verdict
from kvtier.errors import ConfigError
from kvtier.os.ownership import Exposure, find_exposure
from kvtier.tiers.base import StoreExamination
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.tiers.slab.namespace import find_foreign_file, has_namespace_name
from kvtier.units import approximate_size

__all__ = [
    "Room",
    "check_direct_io",
    "check_directory",
    "check_room",
    "check_use",
    "find_intruder",
    "find_room",
    "stored_chunk_nbytes",
]

_SPARE_NBYTES = 256 << 20
_SPARE_INODES = 64


@dataclass(frozen=True, slots=True)
class Room:
    """Room for a store.

    Attributes:
        free_bytes: What this process may still allocate; None where nobody counts.
        allocated_bytes: What the cache has already, and what a start would remove.
        wanted_bytes: Free bytes that the cache and its index would take.
        free_inodes: Files that may still be made; None where nobody counts.
    """

    free_bytes: int | None
    allocated_bytes: int
    wanted_bytes: int
    free_inodes: int | None


def find_room(found: StoreExamination, place: Path) -> Room:
    """Return the room for the store that was examined, on the file system of ``place``."""
    status = os.statvfs(place)
    inodes = status.f_favail if status.f_files else None
    return Room(
        found.free_nbytes,
        found.own_nbytes + found.reclaimed_nbytes,
        found.wanted_nbytes - found.reclaimed_nbytes,
        inodes,
    )


def check_room(tier: str, room: Room, capacity_bytes: int, key: str) -> Iterator[Finding]:
    """Say whether the capacity fits, and with it what the file system needs for its own."""
    check = f"{tier}: free space"
    free_bytes = sys.maxsize if room.free_bytes is None else room.free_bytes
    left_bytes = free_bytes - room.wanted_bytes
    free = "unknown room" if room.free_bytes is None else approximate_size(room.free_bytes)
    found = (
        f"{free} free and {approximate_size(room.allocated_bytes)} in the store, "
        f"for a capacity of {approximate_size(capacity_bytes)} and its index"
    )
    if left_bytes < 0:
        remedy = "lower the capacity or free space: all of it is reserved at start"
        yield Finding(check, Verdict.PROBLEM, found, remedy, key)
    elif left_bytes < _SPARE_NBYTES:
        found = f"{found}: little is left for others"
        remedy = f"lower the capacity by {approximate_size(_SPARE_NBYTES)} or free space"
        yield Finding(check, Verdict.WARNING, found, remedy, key)
    else:
        yield Finding(check, Verdict.OK, found, key=key)
    if room.free_inodes is not None and room.free_inodes < _SPARE_INODES:
        found = f"{room.free_inodes} inodes left; a store takes about ten"
        yield Finding(check, Verdict.WARNING, found, "remove files, or use another disk", key)


def find_intruder(path: Path) -> Exposure | None:
    """Return how another user can replace what is in the store at ``path``, or did."""
    if exposure := find_exposure(path):
        return exposure
    for directory in filter(has_namespace_name, path.iterdir() if path.is_dir() else ()):
        if stranger := find_foreign_file(directory):
            return Exposure(stranger, "an engine does not open it: move it away or remove it")
    return None


def check_directory(
    tier: str,
    path: Path,
    status: os.stat_result | None,
    intruder: Exposure | None,
    key: str,
) -> Finding:
    """Say whether the store's directory is this user's, and this user's only.

    Args:
        tier: Name of the tier.
        path: The directory of the store.
        status: Its status; None if it is not there yet.
        intruder: How another user can replace what is in it.
        key: Key of the path in the configuration.
    """
    check = f"{tier}: directory"
    if intruder is not None:
        return Finding(check, Verdict.PROBLEM, intruder.problem, intruder.remedy, key)
    if status is None:
        return Finding(check, Verdict.OK, f"{path} is not there yet; kvtier makes it", key=key)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        found = f"{path} has mode {mode:04o}: others get at what users asked the model"
        return Finding(check, Verdict.WARNING, found, f"chmod 700 {path}", key)
    return Finding(check, Verdict.OK, f"{path}, mode {mode:04o}, user {status.st_uid}", key=key)


def check_use(tier: str, holders: Sequence[str]) -> Iterator[Finding]:
    """Say who has the store open; nothing if nobody has."""
    for holder in holders:
        remedy = (
            "stop it before another engine with this model starts; rates are shared with it"
        )
        yield Finding(f"{tier}: in use", Verdict.NOTE, f"by {holder}", remedy)


def check_direct_io(
    tier: str, refusal: str, wanted: Literal["auto", "require", "off"], key: str
) -> Finding:
    """Say whether the page cache is bypassed.

    Args:
        tier: Name of the tier.
        refusal: Why O_DIRECT does not work; empty if it does.
        wanted: The tier's ``direct_io``.
        key: Its key in the configuration.
    """
    check = f"{tier}: O_DIRECT"
    if refusal:
        found = f"does not work ({refusal}): through the page cache, slower and out of memory"
        verdict = {"require": Verdict.PROBLEM, "auto": Verdict.WARNING, "off": Verdict.NOTE}
        remedy = "use a local ext4 or xfs"
        if wanted == "require":
            found, remedy = f"does not work ({refusal})", f"{remedy}, or set direct_io: auto"
        return Finding(check, verdict[wanted], found, remedy, key)
    if wanted == "off":
        found = "works, but direct_io: off goes through the page cache"
        return Finding(check, Verdict.NOTE, found, "remove direct_io: off", key)
    return Finding(check, Verdict.OK, "reads and writes at multiples of 4 KiB", key=key)


def stored_chunk_nbytes(path: Path) -> int | None:
    """Return the slot size of the model that used the store last; None if none ever did."""
    spaces = _namespaces(path)
    if not spaces:
        return None
    # Opening and closing an index makes and removes files beside it.
    last = max(spaces, key=lambda space: space.directory.stat().st_mtime_ns)
    return last.layout.slot_nbytes


def _namespaces(path: Path) -> list[StoredNamespace]:
    try:
        return find_namespaces(path) if path.exists() else []
    except ConfigError as error:
        if error.__cause__ is not None:
            raise
        return []  # no engine has made a store of the directory yet
