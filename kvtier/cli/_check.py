"""What ``kvtier check`` asks of a file and of this machine."""

from __future__ import annotations

from kvtier.config import (
    KvtierConfig,
    check_environment,
    has_custom_policies,
    has_paths_of_ranks,
    is_built_in,
)
from kvtier.errors import ConfigError
from kvtier.units import approximate_size

__all__ = ["check_start", "notes_on_ranks"]


def check_start(config: KvtierConfig, *, ranks: int = 1) -> list[str]:
    """Make sure that kvtier could start with ``config`` here.

    Args:
        config: The configuration.
        ranks: Data-parallel ranks that are to run on this machine.

    Returns:
        Warnings: what works, but probably not as meant.

    Raises:
        ConfigError: It could not; one line per problem.
    """
    if has_custom_policies(config):
        # kvtier's own can be made; to load them and the manager takes a quarter of a second.
        from kvtier.manager.building import check_policies  # noqa: PLC0415

        check_policies(config)
    if not all(is_built_in(tier.kind) for tier in config.tiers):
        # The storage tiers and their packages are loaded only where a file needs them.
        from kvtier.tiers.registry import check_tiers  # noqa: PLC0415

        check_tiers(config)
    problems, warnings = _page_problems(config), list[str]()
    try:
        warnings = check_environment(config, ranks=ranks)
    except ConfigError as error:
        problems = [*str(error).splitlines(), *problems]
    if problems:
        raise ConfigError("\n".join(problems))
    return warnings


def notes_on_ranks(config: KvtierConfig, *, ranks: int = 1) -> list[str]:
    """Say what the sizes of ``config`` come to where they are those of several engines."""
    if ranks > 1:
        ram_bytes, *others = (tier.capacity_bytes * ranks for tier in config.tiers)
        sizes = f"{approximate_size(ram_bytes)} of memory"
        if others:
            sizes += f" and {approximate_size(sum(others))} below it"
        return [f"capacities are those of each rank: {ranks} ranks take {sizes}"]
    if has_paths_of_ranks(config):
        what = "capacities are those of each data-parallel rank: N ranks take N times as much"
        return [f"{what}; --data-parallel-size N checks whether there is room"]
    return []


def _page_problems(config: KvtierConfig) -> list[str]:
    """Say what the doctor says of huge pages, where the start depends on them."""
    if config.ram.huge_pages != "require":
        return []
    # The doctor loads the storage tier and its packages, which few files need here.
    from kvtier.doctor import Verdict, examine_pages  # noqa: PLC0415

    finding = examine_pages(config)
    if finding.verdict is not Verdict.PROBLEM:
        return []
    return [config.origin.complain(finding.key, finding.found, finding.remedy)]
