"""Checks of a tier's directory: permissions, existing caches, free space."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig, Remark, TierConfig
from kvtier.doctor._findings import Finding, Status
from kvtier.errors import ConfigError
from kvtier.os.ownership import find_exposure, holds_foreign_entries
from kvtier.printable import printable
from kvtier.tiers.base import Fields, TierExamination
from kvtier.tiers.registry import examine_tier
from kvtier.units import approximate_size

__all__ = ["DirectoryExaminer", "check_directories", "existing_directory"]

_SPARE_NBYTES: Final = 256 << 20


def existing_directory(path: Path) -> Path | None:
    """Return ``path``, or its parent if ``path`` is missing; None if that is no directory."""
    try:
        directory = path if path.exists() or path.is_symlink() else path.parent
        return directory if directory.is_dir() else None
    except OSError:  # a directory above may not be entered
        return None


def check_directories(check: str, key: str, paths: Sequence[Path]) -> list[Finding]:
    """Check that this user can use each of ``paths``, and that other users have no access.

    A problem that several paths share is reported once.
    """
    obstacles = dict.fromkeys(found for path in paths if (found := _obstacle(path)))
    problems = [Finding(check, Status.PROBLEM, *found, key) for found in obstacles]
    return problems or [_check_mode(check, key, paths[0])]


def _obstacle(path: Path) -> tuple[str, str] | None:
    """Return the problem and the remedy if ``path`` cannot be used for a cache, else None."""
    try:
        return _path_obstacle(path) or find_exposure(path)
    except OSError as error:  # a directory above may not be entered, or the name is too long
        remedy = "run this as the user that runs the engine, or use another path"
        return f"cannot be read: {error.strerror}", remedy


def _path_obstacle(path: Path) -> tuple[str, str] | None:
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir():
        subject = "" if nearest == path else f"its parent {nearest} is "
        return f"{subject}not a directory", "name a directory that kvtier may fill"
    if path.is_symlink() and not path.exists():
        problem = f"links to {printable(str(path.readlink()))}, which does not exist"
        return problem, "create it, or mount the disk there"
    directory = path if path.exists() else path.parent
    if not directory.is_dir():
        problem = f"its parent {directory} does not exist"
        return problem, f"mount the disk or run: mkdir -p {directory}"
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    make = "" if directory == path else "make the directory as root and "
    remedy = f"{make}give it to the user that runs the engine, or use another path"
    return f"{directory} is not writable for user {os.geteuid()}", remedy


def _check_mode(check: str, key: str, path: Path) -> Finding:
    if not path.exists():
        return Finding(check, Status.OK, f"{path} does not exist yet; kvtier creates it")
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        reason = f"{path} has mode {mode:04o}: other users can read the cached prompts"
        remedy = f"run: chmod 700 {path}"
        if holds_foreign_entries(path):
            remedy = f"use a directory that only kvtier fills, such as {path / 'kvtier'}"
        return Finding(check, Status.WARNING, reason, remedy, key)
    return Finding(check, Status.OK, f"{path}, mode {mode:04o}, user {status.st_uid}")


@dataclass(slots=True)
class _Disk:
    """The space that tiers need on one disk. Each examined tier is added.

    Attributes:
        nbytes: Number of bytes that the added tiers must still reserve.
        tiers: Names of the added tiers.
    """

    nbytes: int = 0
    tiers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DirectoryExaminer:
    """Examines the caches of all tiers, and checks that the disks have room for them.

    Attributes:
        config: The configuration as read from its file.
        identity: The known fields of the engine's identity.
        engine_runs: Whether an engine has one of the caches open.
    """

    config: KvtierConfig
    identity: Fields
    engine_runs: bool = False
    _disks: dict[int, _Disk] = field(default_factory=dict)

    def examine(self, number: int, tiers: Sequence[TierConfig]) -> Iterator[Finding]:
        """Yield findings about the caches of one tier, and about free space for them.

        Args:
            number: Position of the tier in the file, from 0.
            tiers: The section of the tier, once for each data-parallel rank.
        """
        by_disk = dict[int, list[TierExamination]]()
        for tier in tiers:
            store = tier.local_directory()
            if store is None or (directory := existing_directory(store.path)) is None:
                continue
            try:
                found = examine_tier(tier, self.identity)
            except (ConfigError, OSError) as error:
                yield _unreadable(tier.name, f"tiers[{number}].{store.key}", error)
                continue
            if found is None:
                continue
            yield from self._report(number, tier, found)
            by_disk.setdefault(directory.stat().st_dev, []).append(found)
        for device, stores in by_disk.items():
            disk = self._disks.setdefault(device, _Disk())
            yield _check_room(number, self.config.tiers[number], stores, disk)

    def _report(
        self, number: int, tier: TierConfig, found: TierExamination
    ) -> Iterator[Finding]:
        named = ""
        remarks: Iterable[tuple[Status, Sequence[Remark]]] = (
            (Status.PROBLEM, found.refusals),
            (Status.WARNING, found.warnings),
            (Status.NOTE, found.notes),
        )
        for status, group in remarks:
            for key, problem, remedy in group:
                named += problem
                place = f"tiers[{number}].{key}"
                yield Finding(f"{tier.name}: cache", status, problem, remedy, place)
        self.engine_runs |= bool(found.holders)
        for holder in found.holders:
            if holder not in named:
                remedy = "stop it before another engine with this model starts"
                yield Finding(f"{tier.name}: cache", Status.NOTE, f"in use by {holder}", remedy)


def _unreadable(tier: str, key: str, error: Exception) -> Finding:
    """Return the finding for a cache that cannot be examined."""
    reason, _, remedy = str(error).partition("; ")
    remedy = remedy or "run this as the user that runs the engine"
    return Finding(f"{tier}: cache", Status.PROBLEM, reason, remedy, key)


def _describe_need(tier: TierConfig, stores: Sequence[TierExamination]) -> str:
    """Return a text with the disk space that ``tier`` needs for all ranks."""
    needed = approximate_size(tier.capacity_bytes * len(stores))
    needed = f"{len(stores)} ranks need {needed}" if len(stores) > 1 else f"needs {needed}"
    if index_nbytes := sum(store.index_nbytes for store in stores):
        needed = f"{needed} and {approximate_size(index_nbytes)} for the index"
    return needed


def _check_room(
    number: int, tier: TierConfig, stores: Sequence[TierExamination], disk: _Disk
) -> Finding:
    """Check that the tier's caches fit on ``disk``; add the tier to ``disk``."""
    reclaimed_nbytes = sum(store.reclaimed_nbytes for store in stores)
    needed_nbytes = sum(store.wanted_nbytes for store in stores) - reclaimed_nbytes
    frees = [store.free_nbytes for store in stores if store.free_nbytes is not None]
    left_nbytes = min(frees, default=1 << 62) - disk.nbytes - needed_nbytes
    room_nbytes = max(left_nbytes + needed_nbytes + reclaimed_nbytes, 0)
    has_nbytes = room_nbytes + sum(store.own_nbytes for store in stores)
    room = approximate_size(has_nbytes) if frees else "an unknown room"
    reason = f"{_describe_need(tier, stores)}; the disk has {room}"
    if disk.tiers:
        reason = f"{reason} beside {' and '.join(disk.tiers)}"
    disk.nbytes += needed_nbytes
    disk.tiers.append(tier.name)
    check, key = f"{tier.name}: free space", f"tiers[{number}].capacity"
    if left_nbytes < 0:
        remedy = "lower the capacity or free space: all of it is reserved at start"
        return Finding(check, Status.PROBLEM, reason, remedy, key)
    if left_nbytes < _SPARE_NBYTES and needed_nbytes > 0:
        remedy = f"lower the capacity or free {approximate_size(_SPARE_NBYTES)}"
        return Finding(check, Status.WARNING, f"{reason}: little is left", remedy, key)
    return Finding(check, Status.OK, reason)
