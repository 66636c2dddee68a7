"""Paths of data-parallel ranks: one file serves all of them, and each has its directories.

Ranks are engines that know nothing of each other: each has a KV cache and a scheduler of its
own, and its tiers are its own too. They are started with the same arguments, and so with the
same file, where a placeholder in a path says what differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from kvtier.config._fields import RANK_PLACEHOLDER
from kvtier.config._models import KvtierConfig
from kvtier.errors import ConfigError

__all__ = ["has_rank_paths", "resolve_rank_paths"]

ModelT = TypeVar("ModelT", bound=BaseModel)


def resolve_rank_paths(config: KvtierConfig, *, rank: int | None) -> KvtierConfig:
    """Return ``config`` with the paths of one engine.

    Args:
        config: The configuration, as its file has it.
        rank: The engine's number among data-parallel ones; None if it is alone, which gets the
            paths of number 0.

    Raises:
        ConfigError: The engine is not alone, and has a path that would be all ranks' path. One
            line for each.
    """
    if rank is not None and (problems := list(_shared_paths(config))):
        raise ConfigError("\n".join(problems))
    if not has_rank_paths(config):
        return config
    tiers = tuple(_filled_in(tier, rank or 0) for tier in config.tiers)
    trace = _filled_in(config.trace, rank or 0)
    return config.model_copy(update={"tiers": tiers, "trace": trace})


def has_rank_paths(config: KvtierConfig) -> bool:
    """Return whether a path of ``config`` differs between data-parallel ranks."""
    sections = (*config.tiers, config.trace)
    return any(_differs(path) for section in sections for path in _paths(section).values())


def _shared_paths(config: KvtierConfig) -> Iterator[str]:
    paths = {
        f"tiers[{number}].{store.key}": store.path
        for number, tier in enumerate(config.tiers)
        if (store := tier.local_store())
    }
    if config.trace.record is not None:
        paths["trace.record"] = config.trace.record
    for key, path in paths.items():
        if not _differs(path):
            problem = "each data-parallel rank is an engine and needs a directory of its own"
            remedy = f"write {path / RANK_PLACEHOLDER}"
            yield config.origin.format_problem(key, problem, remedy, value=path)


def _filled_in(section: ModelT, rank: int) -> ModelT:
    paths = {
        name: Path(str(path).replace(RANK_PLACEHOLDER, str(rank)))
        for name, path in _paths(section).items()
        if _differs(path)
    }
    return section.model_copy(update=paths)


def _paths(section: BaseModel) -> dict[str, Path]:
    return {name: value for name, value in section if isinstance(value, Path)}


def _differs(path: Path) -> bool:
    return RANK_PLACEHOLDER in str(path)
