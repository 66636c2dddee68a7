"""What a file cannot say about itself: is there room here, and does one chunk fit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvtier.config._models import KvtierConfig, TierConfig
from kvtier.config._own_paths import resolve_rank_paths
from kvtier.errors import ConfigError
from kvtier.os.ownership import find_exposure
from kvtier.printable import printable
from kvtier.units import approximate_size, format_size

__all__ = [
    "SLOT_ALIGNMENT_NBYTES",
    "allocated_bytes",
    "check_chunk_fits",
    "check_environment",
    "slot_nbytes",
    "why_not_writable",
]

SLOT_ALIGNMENT_NBYTES = 4096
"""A slot is a multiple of this: direct I/O moves whole pages only."""


_OF_SLOWER_TIERS: Final = (
    "write",
    "write_after",
    "min_chunks",
    "promote",
    "promote_after",
    "admit",
    "write_budget_per_day_bytes",
)
"""Keys of ``placement`` that say what goes to slower tiers, and what comes back."""


def slot_nbytes(chunk_nbytes: int) -> int:
    """Return the bytes of the slot that a chunk of ``chunk_nbytes`` (all ranks) takes.

    >>> slot_nbytes(1), slot_nbytes(8192)
    (4096, 8192)
    """
    return -(-chunk_nbytes // SLOT_ALIGNMENT_NBYTES) * SLOT_ALIGNMENT_NBYTES


def check_chunk_fits(config: KvtierConfig, chunk_nbytes: int) -> None:
    """Make sure that every tier holds at least one chunk.

    Args:
        config: The configuration.
        chunk_nbytes: Bytes of one chunk over all ranks.

    Raises:
        ConfigError: A tier is too small; names its key, its capacity and the size it needs.
    """
    need = slot_nbytes(chunk_nbytes)
    problems = [
        config.origin.format_problem(
            f"tiers[{number}].capacity",
            f"smaller than one chunk, which takes {format_size(need)}",
            "raise the capacity or lower engine.blocks_per_chunk",
            value=format_size(tier.capacity_bytes),
        )
        for number, tier in enumerate(config.tiers)
        if tier.capacity_bytes < need
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def check_environment(config: KvtierConfig, *, ranks: int = 1) -> list[str]:
    """Look at the directories and the memory of this machine.

    The disks' room and what is in the stores, :mod:`kvtier.tiers.start` looks at.

    A file is created in each store's directory, or next to it, and removed at once: nothing
    else tells reliably whether one can be.

    Args:
        config: The configuration, as its file has it.
        ranks: Data-parallel ranks that are to run on this machine.

    Returns:
        Warnings: what works, but probably not as meant.

    Raises:
        ConfigError: Something that cannot work here, one line each.
    """
    numbers = range(ranks) if ranks > 1 else (None,)
    engines = [resolve_rank_paths(config, rank=rank) for rank in numbers]
    problems = [*_memory_problems(config, ranks)]
    stores = {
        number: [store.path for each in engines if (store := each.tiers[number].local_store())]
        for number, tier in enumerate(config.tiers)
        if tier.local_store()
    }
    problems += _store_problems(config, stores)
    recordings = [each.trace.record for each in engines if each.trace.record is not None]
    problems += _obstacles(config, "trace.record", recordings, _obstacle_at)
    remarks, refusals = _tier_remarks(config, engines[0].tiers)
    problems += refusals
    if problems:
        raise ConfigError("\n".join(problems))
    return [*_ladder_warnings(config), *_idle_warnings(config), *remarks]


def _memory_problems(config: KvtierConfig, ranks: int) -> Iterator[str]:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ram_bytes = config.tiers[0].capacity_bytes
    if ram_bytes * ranks > memory_bytes:
        all_ranks = _all_ranks(ram_bytes, ranks)
        problem = f"{all_ranks}this machine has {approximate_size(memory_bytes)} of memory"
        remedy = "lower it, leaving room for the engine: pinned memory cannot be swapped out"
        value = format_size(ram_bytes)
        yield config.origin.format_problem("tiers[0].capacity", problem, remedy, value=value)


def _store_problems(config: KvtierConfig, stores: dict[int, list[Path]]) -> Iterator[str]:
    """Look at the directories of every tier, one for each rank."""
    for number, paths in stores.items():
        yield from _obstacles(config, _store_key(config, number), paths, _obstacle_to_store)


def _all_ranks(nbytes: int, ranks: int) -> str:
    """Return what ``ranks`` take together, as the first half of a sentence."""
    return f"{ranks} ranks take {approximate_size(nbytes * ranks)}, and " if ranks > 1 else ""


def _obstacles(
    config: KvtierConfig,
    key: str,
    paths: list[Path],
    look: Callable[[Path], tuple[str, str] | None],
) -> list[str]:
    """Name what stands against each of ``paths``, what several have in common once."""
    found = dict.fromkeys(obstacle for path in paths if (obstacle := _obstacle(path, look)))
    return [config.origin.format_problem(key, *each, value=paths[0]) for each in found]


def _obstacle(
    path: Path, look: Callable[[Path], tuple[str, str] | None]
) -> tuple[str, str] | None:
    """Return why ``path`` cannot be used, and what to do; None if it can."""
    try:
        return look(path)
    except OSError as error:  # a directory above may not be entered, or the name is too long
        remedy = "run this as the user that runs the engine, or use another path"
        return f"cannot be looked at: {error.strerror}", remedy


def _obstacle_to_store(path: Path) -> tuple[str, str] | None:
    return _obstacle_at(path) or find_exposure(path)


def _obstacle_at(path: Path) -> tuple[str, str] | None:
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        parent = "" if there == path else f"its parent {there} is "
        return f"{parent}not a directory", "name a directory that kvtier may fill"
    if path.is_symlink() and not path.exists():
        problem = f"leads to {printable(str(path.readlink()))}, which does not exist"
        return problem, "create it, or mount the disk there"
    place = _existing(path)
    if not place.is_dir():
        problem = f"its parent {place} does not exist"
        return problem, f"mount the disk or run: mkdir -p {place}"
    cause = why_not_writable(place)
    if not cause:
        return None
    make = "" if place == path else "make the directory as root and "
    remedy = f"{make}give it to the user that runs the engine, or use another path"
    return f"{place} is not writable: {cause}", remedy


def why_not_writable(directory: Path) -> str:
    """Return why this process can make no file in ``directory``; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _existing(path: Path) -> Path:
    """Return ``path``, or its parent as long as kvtier has not created it yet."""
    return path if path.exists() else path.parent


def allocated_bytes(directory: Path) -> int:
    """Return what the files below ``directory`` take of their disk."""
    # It passes over directories that go away meanwhile, or that this user may not look into.
    return sum(
        _allocated_bytes(Path(parent, name))
        for parent, directories, files in os.walk(directory)
        for name in (*directories, *files)
    )


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # as above
        return 0


def _ladder_warnings(config: KvtierConfig) -> Iterator[str]:
    for number, (faster, slower) in enumerate(pairwise(config.tiers), start=1):
        if slower.capacity_bytes <= faster.capacity_bytes:
            problem = f"no larger than the faster tier {faster.name}, so of little use"
            remedy = "capacities should grow downward"
            value = format_size(slower.capacity_bytes)
            key = f"tiers[{number}].capacity"
            yield config.origin.format_problem(key, problem, remedy, value=value)


def _idle_warnings(config: KvtierConfig) -> Iterator[str]:
    """Name what is said of slower tiers where there are none."""
    if len(config.tiers) > 1:
        return
    fields = type(config.placement).model_fields
    for name in _OF_SLOWER_TIERS:
        value = getattr(config.placement, name)
        if value != fields[name].default:
            key = f"placement.{fields[name].serialization_alias or name}"
            problem = "no effect: there is no slower tier"
            yield config.origin.format_problem(
                key, problem, "leave it out or add one", value=value
            )


def _store_key(config: KvtierConfig, number: int) -> str:
    """Return the key that names the directory of a tier that has one."""
    store = config.tiers[number].local_store()
    return f"tiers[{number}].{store.key}" if store else f"tiers[{number}]"


def _tier_remarks(
    config: KvtierConfig, tiers: Sequence[TierConfig]
) -> tuple[list[str], list[str]]:
    """Return the warnings of the tiers themselves, and why some cannot work here."""
    warnings, problems = list[str](), list[str]()
    for number, tier in enumerate(tiers):
        key = f"tiers[{number}]"
        try:
            warnings += [
                config.origin.format_problem(
                    f"{key}.{remark.key}", remark.problem, remark.remedy
                )
                for remark in tier.remarks()
            ]
        except ConfigError as error:
            problems.append(f"{config.origin.locate(key)}: {error}")
        except Exception as error:  # noqa: BLE001 - a tier may be somebody else's code
            problem = f"the tier's remarks() failed: {error!r}"
            problems.append(
                config.origin.format_problem(key, problem, "repair the tier's class")
            )
    return warnings, problems
