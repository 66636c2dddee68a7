"""Checks of the file alone: classes that do not load, values without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from kvtier.config import (
    KvtierConfig,
    TierConfig,
    has_custom_policies,
    has_rank_paths,
    is_built_in,
)
from kvtier.doctor._findings import Finding, Status
from kvtier.errors import ConfigError
from kvtier.units import approximate_size

__all__ = ["check_classes", "check_ranks", "check_remarks", "check_values"]

_CHECK: Final = "configuration"
_SLOWER_TIER_KEYS: Final = (
    "write",
    "write_after",
    "promote",
    "admit",
    "write_budget_per_day_bytes",
)
"""Keys of ``placement`` that need a slower tier."""


def check_values(config: KvtierConfig) -> Iterator[Finding]:
    """List the tiers, and the values that have no effect."""
    sizes = (f"{tier.name} of {approximate_size(tier.capacity_bytes)}" for tier in config.tiers)
    yield Finding(_CHECK, Status.OK, ", ".join(sizes))
    for number, (faster, slower) in enumerate(pairwise(config.tiers), start=1):
        if slower.capacity_bytes <= faster.capacity_bytes:
            reason = f"no larger than the faster tier {faster.name}, so of little use"
            remedy = "give the slower tier the larger capacity"
            key = f"tiers[{number}].capacity"
            yield Finding(_CHECK, Status.WARNING, reason, remedy, key)
    if len(config.tiers) == 1:
        yield from _check_placement(config)


def _check_placement(config: KvtierConfig) -> Iterator[Finding]:
    fields = type(config.placement).model_fields
    for name in _SLOWER_TIER_KEYS:
        if getattr(config.placement, name) != fields[name].default:
            key = f"placement.{fields[name].serialization_alias or name}"
            reason, remedy = "no effect without a slower tier", "remove it or add a tier"
            yield Finding(_CHECK, Status.WARNING, reason, remedy, key)


def check_classes(config: KvtierConfig) -> Iterator[Finding]:
    """Check that policies and tiers from other packages load and are complete."""
    checks: list[Callable[[KvtierConfig], None]] = []
    # Importing the manager takes 0.2 s. Built-in policies and tiers always load.
    if has_custom_policies(config):
        from kvtier.manager.build import check_policies  # noqa: PLC0415

        checks.append(check_policies)
    if not all(is_built_in(tier.kind) for tier in config.tiers):
        from kvtier.tiers.registry import check_tiers  # noqa: PLC0415

        checks.append(check_tiers)
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            yield from map(_finding_of, str(error).splitlines())


def check_remarks(number: int, tier: TierConfig) -> Iterator[Finding]:
    """Yield the warnings that a tier's options report about themselves."""
    check, key = f"{tier.name}: options", f"tiers[{number}]"
    try:
        for name, problem, remedy in tier.remarks():
            yield Finding(check, Status.WARNING, problem, remedy, f"{key}.{name}")
    except ConfigError as error:
        reason, _, remedy = str(error).rpartition("; ")
        yield Finding(check, Status.PROBLEM, reason or remedy, remedy, key)
    except Exception as error:  # noqa: BLE001 - a tier may be another package's code
        reason = f"the tier's remarks() failed: {error!r}"
        yield Finding(check, Status.PROBLEM, reason, "repair the tier's class", key)


def check_ranks(config: KvtierConfig, ranks: int) -> Iterator[Finding]:
    """Report the memory and disk that all data-parallel ranks need together."""
    check = "data parallelism"
    if ranks > 1:
        ram_nbytes, *others = (tier.capacity_bytes * ranks for tier in config.tiers)
        sizes = f"{approximate_size(ram_nbytes)} of memory"
        if others:
            sizes += f" and {approximate_size(sum(others))} of slower tiers"
        yield Finding(check, Status.NOTE, f"{ranks} ranks need {sizes}")
    elif has_rank_paths(config):
        reason = "each rank needs all capacities; this examines one rank"
        remedy = "add --data-parallel-size N to examine N ranks"
        yield Finding(check, Status.NOTE, reason, remedy)


def _finding_of(line: str) -> Finding:
    reason, _, remedy = line.rpartition("; ")
    return Finding(_CHECK, Status.PROBLEM, reason or line, remedy)
