"""Check without an engine whether kvtier could start with a configuration on this machine.

``kvtier check``, ``doctor`` and ``vllm-args`` print the report. Every tier examines its own
store (:meth:`kvtier.tiers.base.StorageTier.examine`); this adds up the stores of one disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import (
    KvtierConfig,
    LocalStore,
    Remark,
    TierConfig,
    check_environment,
    resolve_rank_paths,
)
from kvtier.errors import ConfigError
from kvtier.tiers.base import Fields, StoreExamination
from kvtier.tiers.registry import examine_tier
from kvtier.units import approximate_size, format_size

__all__ = ["StartReport", "examine_start", "examine_stores"]


@dataclass(slots=True)
class StartReport:
    """What a start would find, in lines that name the place in the file and a remedy.

    Attributes:
        problems: Reasons why it would not start.
        warnings: Settings that work, but probably not as intended.
        notes: Other remarks.
        stores: Examined stores by the tier's number, one for each rank.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stores: dict[int, list[StoreExamination]] = field(default_factory=dict)


def examine_start(config: KvtierConfig, identity: Fields, *, ranks: int = 1) -> StartReport:
    """Return what a start would find on this machine: directories, memory, disks, stores.

    Args:
        config: The configuration, as its file has it.
        identity: The known part of the engine's identity.
        ranks: Data-parallel ranks on this machine.

    Raises:
        ConfigError: The ranks would share a path.
    """
    report = examine_stores(config, identity, ranks=ranks)
    try:
        report.warnings[:0] = check_environment(config, ranks=ranks)
    except ConfigError as error:
        report.problems[:0] = str(error).splitlines()
    return report


def examine_stores(
    config: KvtierConfig, identity: Fields, *, ranks: int = 1, only_existing: bool = False
) -> StartReport:
    """Return what a start would find in its stores; blocks for half a second for each.

    Args:
        config: The configuration, as its file has it.
        identity: The known part of the engine's identity.
        ranks: Data-parallel ranks on this machine.
        only_existing: Whether to leave out stores that do not exist yet.

    Raises:
        ConfigError: The ranks would share a path.
    """
    numbers = range(ranks) if ranks > 1 else (None,)
    engines = [resolve_rank_paths(config, rank=rank) for rank in numbers]
    examiner = _Examiner(config, identity, only_existing=only_existing)
    for number in range(len(config.tiers)):
        examiner.examine(number, [engine.tiers[number] for engine in engines])
    return examiner.report


@dataclass(slots=True)
class _Disk:
    """Room that earlier tiers take of a disk.

    Attributes:
        nbytes: Bytes that they take.
        tiers: Names of the tiers.
    """

    nbytes: int = 0
    tiers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Examiner:
    """Examines the tiers in order and adds up the room they take of each disk."""

    config: KvtierConfig
    identity: Fields
    only_existing: bool
    report: StartReport = field(default_factory=StartReport)
    disks: dict[int, _Disk] = field(default_factory=dict)

    def examine(self, number: int, tiers: Sequence[TierConfig]) -> None:
        """Examine the stores of a tier, one for each rank."""
        on_disk = dict[int, list[StoreExamination]]()
        for tier in tiers:
            store = tier.local_store()
            if store is None:
                continue
            device = _device_of(store.path, only_existing=self.only_existing)
            if device is None:
                continue
            try:
                found = examine_tier(tier, self.identity)
            except (ConfigError, OSError) as error:
                key = f"tiers[{number}].{store.key}"
                place = self.config.origin.locate(key, value=store.path)
                self.report.problems.append(f"{place}: {error}")
                continue
            if found is None:
                continue
            self._add(number, store, found)
            on_disk.setdefault(device, []).append(found)
        for device, found_there in on_disk.items():
            disk = self.disks.setdefault(device, _Disk())
            problems = _room_problem(self.config, number, found_there, disk)
            self.report.problems.extend(problems)

    def _add(self, number: int, store: LocalStore, found: StoreExamination) -> None:
        def lines(remarks: Sequence[Remark]) -> Iterator[str]:
            for key, problem, remedy in remarks:
                value = store.path if key == store.key else None
                place = f"tiers[{number}].{key}"
                yield self.config.origin.format_problem(place, problem, remedy, value=value)

        self.report.stores.setdefault(number, []).append(found)
        self.report.problems.extend(lines(found.refusals))
        self.report.warnings.extend(lines(found.warnings))
        self.report.notes.extend(lines(found.notes))


def _device_of(path: Path, *, only_existing: bool) -> int | None:
    """Return the file system of the store at ``path``; None if it does not exist."""
    try:
        place = path if only_existing or path.exists() or path.is_symlink() else path.parent
        return place.stat().st_dev if place.is_dir() else None
    except OSError:  # it vanished, or permission is missing
        return None


def _room_problem(
    config: KvtierConfig, number: int, stores: Sequence[StoreExamination], disk: _Disk
) -> Iterator[str]:
    """Yield a problem if the disk has too little room for ``stores``; then add them to it."""
    tier = config.tiers[number]
    frees = [store.free_nbytes for store in stores if store.free_nbytes is not None]
    reclaimed_nbytes = sum(store.reclaimed_nbytes for store in stores)
    wanted_nbytes = sum(store.wanted_nbytes for store in stores)
    room_nbytes = min(frees, default=wanted_nbytes) - disk.nbytes + reclaimed_nbytes
    if frees and room_nbytes < wanted_nbytes:
        has_nbytes = max(room_nbytes, 0) + sum(store.own_nbytes for store in stores)
        problem = f"the disk has room for {approximate_size(has_nbytes)}"
        if disk.tiers:
            problem = f"beside {' and '.join(disk.tiers)}, {problem}"
        if index_nbytes := sum(store.index_nbytes for store in stores):
            problem = f"with {approximate_size(index_nbytes)} for the index, {problem}"
        if len(stores) > 1:
            taken = approximate_size(tier.capacity_bytes * len(stores))
            problem = f"{len(stores)} ranks take {taken}, and {problem}"
        remedy = "lower it or free space: all of it is reserved at start"
        value = format_size(tier.capacity_bytes)
        yield config.origin.format_problem(
            f"tiers[{number}].capacity", problem, remedy, value=value
        )
    disk.nbytes += wanted_nbytes - reclaimed_nbytes
    disk.tiers.append(tier.name)
