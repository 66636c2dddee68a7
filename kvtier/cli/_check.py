"""What ``kvtier check`` asks of a file and of this machine."""

from __future__ import annotations

from kvtier.config import KvtierConfig, check_environment
from kvtier.errors import ConfigError
from kvtier.manager.building import check_policies

__all__ = ["check_start"]


def check_start(config: KvtierConfig) -> list[str]:
    """Make sure that kvtier could start with ``config`` here.

    Returns:
        Warnings: what works, but probably not as meant.

    Raises:
        ConfigError: It could not; one line per problem.
    """
    check_policies(config)
    problems, warnings = _page_problems(config), list[str]()
    try:
        warnings = check_environment(config)
    except ConfigError as error:
        problems = [*str(error).splitlines(), *problems]
    if problems:
        raise ConfigError("\n".join(problems))
    return warnings


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
