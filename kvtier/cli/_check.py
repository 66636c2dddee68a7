"""What ``kvtier check`` asks of a file and of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.config import (
    KvtierConfig,
    has_custom_policies,
    has_rank_paths,
    is_built_in,
)
from kvtier.errors import ConfigError
from kvtier.tiers.start import StartReport, examine_start, examine_stores
from kvtier.units import approximate_size
from kvtier.vllm.identity import declared_identity

__all__ = ["check_start", "check_stores", "notes_on_ranks"]


def check_start(
    config: KvtierConfig, *, ranks: int = 1, model: str | None = None
) -> StartReport:
    """Make sure that kvtier could start with ``config`` here.

    Args:
        config: The configuration.
        ranks: Data-parallel ranks that are to run on this machine.
        model: What the engine is to be started with, if that is known.

    Raises:
        ConfigError: It could not; one line per problem.
    """
    if has_custom_policies(config):
        # kvtier's own can be made; to load them and the manager takes a quarter of a second.
        from kvtier.manager.build import check_policies  # noqa: PLC0415

        check_policies(config)
    if not all(is_built_in(tier.kind) for tier in config.tiers):
        # The storage tiers and their packages are loaded only where a file needs them.
        from kvtier.tiers.registry import check_tiers  # noqa: PLC0415

        check_tiers(config)
    report = examine_start(config, declared_identity(config, model), ranks=ranks)
    _require_no_problem([*report.problems, *_page_problems(config)])
    return report


def check_stores(config: KvtierConfig, *, model: str | None = None) -> StartReport:
    """Make sure that an engine could open the stores that are there already.

    Nothing else of this machine is looked at, for the engine may run on another one.

    Raises:
        ConfigError: It could not; one line per problem.
    """
    identity = declared_identity(config, model)
    report = examine_stores(config, identity, only_existing=True)
    _require_no_problem(report.problems)
    return report


def notes_on_ranks(config: KvtierConfig, *, ranks: int = 1) -> list[str]:
    """Say what the sizes of ``config`` come to where they are those of several engines."""
    if ranks > 1:
        ram_bytes, *others = (tier.capacity_bytes * ranks for tier in config.tiers)
        sizes = f"{approximate_size(ram_bytes)} of memory"
        if others:
            sizes += f" and {approximate_size(sum(others))} below it"
        return [f"capacities are those of each rank: {ranks} ranks take {sizes}"]
    if has_rank_paths(config):
        what = "capacities are those of each data-parallel rank: N ranks take N times as much"
        return [f"{what}; --data-parallel-size N checks whether there is room"]
    return []


def _require_no_problem(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _page_problems(config: KvtierConfig) -> list[str]:
    """Say what the doctor says of huge pages, where the start depends on them."""
    if config.ram.huge_pages != "require":
        return []
    # The doctor loads the storage tier and its packages, which few files need here.
    from kvtier.doctor import Verdict, examine_pages  # noqa: PLC0415

    finding = examine_pages(config)
    if finding.verdict is not Verdict.PROBLEM:
        return []
    return [config.origin.format_problem(finding.key, finding.found, finding.remedy)]
