"""Whether kvtier could start with a configuration on this machine, found without an engine.

``kvtier check``, ``doctor`` and ``vllm-args`` print what this finds. What a start does with the
caches in a store is decided where the start decides it, in
:mod:`kvtier.tiers.slab.start_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import (
    KvtierConfig,
    LocalStore,
    NvmeTierConfig,
    Remark,
    TierConfig,
    allocated_bytes,
    check_environment,
    resolve_rank_paths,
)
from kvtier.errors import ConfigError
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.examine import StoreExamination, examine_store
from kvtier.tiers.slab.start_plan import Fields
from kvtier.units import approximate_size, format_size

__all__ = ["StartReport", "examine_start", "examine_stores"]


@dataclass(slots=True)
class StartReport:
    """What a start would find, in lines that name the place in the file and a remedy.

    Attributes:
        problems: Why it would not start.
        warnings: What works, but probably not as meant.
        notes: What else is good to know.
        stores: What is in the stores, by the tier's number: one for each rank.
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
        ranks: Data-parallel ranks that are to run on this machine.

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
        ranks: Data-parallel ranks that are to run on this machine.
        only_existing: Whether to leave out stores that are not there yet.

    Raises:
        ConfigError: The ranks would share a path.
    """
    numbers = range(ranks) if ranks > 1 else (None,)
    engines = [resolve_rank_paths(config, rank=rank) for rank in numbers]
    examiner = _Examiner(config, identity, only_existing=only_existing)
    for number in range(len(config.tiers)):
        examiner.look(number, [engine.tiers[number] for engine in engines])
    return examiner.report


@dataclass(slots=True)
class _Disk:
    """What the tiers before take of a disk.

    Attributes:
        nbytes: So much.
        tiers: Their names.
    """

    nbytes: int = 0
    tiers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Examiner:
    """Looks at one tier after the other, each beside the ones before."""

    config: KvtierConfig
    identity: Fields
    only_existing: bool
    report: StartReport = field(default_factory=StartReport)
    disks: dict[int, _Disk] = field(default_factory=dict)

    def look(self, number: int, tiers: Sequence[TierConfig]) -> None:
        """Look at the stores of a tier, one for each rank."""
        on_disk = dict[int, list[StoreExamination]]()
        for tier in tiers:
            store = tier.local_store()
            if store is None:
                continue
            device = _device_of(store.path, only_existing=self.only_existing)
            if device is None:
                continue
            try:
                found = self._examine(tier, store)
            except ConfigError as error:
                key = f"tiers[{number}].{store.key}"
                place = self.config.origin.locate(key, value=store.path)
                self.report.problems.append(f"{place}: {error}")
                continue
            self._add(number, store, found)
            on_disk.setdefault(device, []).append(found)
        for device, found_there in on_disk.items():
            disk = self.disks.setdefault(device, _Disk())
            problems = _room_problem(self.config, number, found_there, disk)
            self.report.problems.extend(problems)

    def _examine(self, tier: TierConfig, store: LocalStore) -> StoreExamination:
        if isinstance(tier, NvmeTierConfig):
            return examine_store(tier, self.identity)
        # Nobody knows what a tier of another kind has reserved, or how its index grows.
        held_nbytes = allocated_bytes(store.path)
        place = store.path if store.path.exists() else store.path.parent
        return StoreExamination(
            free_nbytes=BlockIo().free_nbytes(place),
            wanted_nbytes=max(tier.capacity_bytes - held_nbytes, 0),
            own_nbytes=held_nbytes,
        )

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
    """Return the file system of the store at ``path``; None if there is nothing to look at."""
    try:
        place = path if only_existing or path.exists() or path.is_symlink() else path.parent
        return place.stat().st_dev if place.is_dir() else None
    except OSError:  # it vanished, or a directory above may not be entered
        return None


def _room_problem(
    config: KvtierConfig, number: int, stores: Sequence[StoreExamination], disk: _Disk
) -> Iterator[str]:
    """Say if the disk has no room for ``stores``, and take what they need of it."""
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
