"""Derives one engine's settings from a configuration: paths, load path, vLLM arguments.

Each data-parallel rank is an independent engine with its own tiers. All ranks start with the
same file. A placeholder in a path gives each rank its own directory.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from kvtier.config._fields import RANK_PLACEHOLDER
from kvtier.config._models import KvtierConfig
from kvtier.errors import ConfigError

__all__ = [
    "VllmEntryPoint",
    "has_rank_paths",
    "resolve_rank_paths",
    "vllm_transfer_config",
    "with_staged_loads",
]

ModelT = TypeVar("ModelT", bound=BaseModel)


def resolve_rank_paths(config: KvtierConfig, *, rank: int | None) -> KvtierConfig:
    """Return ``config`` with the rank of one engine in place of the placeholder in paths.

    Args:
        config: The configuration as read from its file.
        rank: Data-parallel rank of the engine; None for a single engine, which uses the
            paths of rank 0.

    Raises:
        ConfigError: A rank is given, and a path has no placeholder. The message has one line
            per such path.
    """
    if rank is not None and (problems := list(_shared_paths(config))):
        raise ConfigError("\n".join(problems))
    if not has_rank_paths(config):
        return config
    tiers = tuple(_with_rank(tier, rank or 0) for tier in config.tiers)
    trace = _with_rank(config.trace, rank or 0)
    return config.model_copy(update={"tiers": tiers, "trace": trace})


def has_rank_paths(config: KvtierConfig) -> bool:
    """Return whether a path of ``config`` has a placeholder for the rank."""
    sections = (*config.tiers, config.trace)
    return any(
        _has_placeholder(path) for section in sections for path in _paths(section).values()
    )


def _shared_paths(config: KvtierConfig) -> Iterator[str]:
    paths = {
        f"tiers[{number}].{store.key}": store.path
        for number, tier in enumerate(config.tiers)
        if (store := tier.local_directory())
    }
    if config.trace.record is not None:
        paths["trace.record"] = config.trace.record
    for key, path in paths.items():
        if not _has_placeholder(path):
            problem = "each data-parallel rank is an engine and needs a directory of its own"
            remedy = f"write {path / RANK_PLACEHOLDER}"
            yield config.origin.format_problem(key, problem, remedy, value=path)


def _with_rank(section: ModelT, rank: int) -> ModelT:
    paths = {
        name: Path(str(path).replace(RANK_PLACEHOLDER, str(rank)))
        for name, path in _paths(section).items()
        if _has_placeholder(path)
    }
    return section.model_copy(update=paths)


def _paths(section: BaseModel) -> dict[str, Path]:
    return {name: value for name, value in section if isinstance(value, Path)}


def _has_placeholder(path: Path) -> bool:
    return RANK_PLACEHOLDER in str(path)


class VllmEntryPoint(enum.StrEnum):
    """The entry point through which vLLM loads kvtier."""

    CONNECTOR = "connector"
    """kvtier's own connector, the default. The engine computes chunks that fail to load."""
    SPEC = "spec"
    """A spec for vLLM's ``OffloadingConnector``. A failed load ends the engine."""


def with_staged_loads(config: KvtierConfig) -> KvtierConfig:
    """Return ``config`` with staged loads, for :attr:`VllmEntryPoint.SPEC`.

    Raises:
        ConfigError: The file asks for direct loads or requires GDS reads.
    """
    transfer = config.transfer
    if transfer.load_path == "direct" and "load_path" in transfer.model_fields_set:
        raise _needs_connector(config, "transfer.load_path", "direct", "load_path: staged")
    if config.gds == "require":
        number = next(n for n, tier in enumerate(config.tiers) if tier.name == config.gds_tier)
        raise _needs_connector(config, f"tiers[{number}].gds", "require", "gds: off")
    staged = transfer.model_copy(update={"load_path": "staged"})
    return config.model_copy(update={"transfer": staged})


def _needs_connector(config: KvtierConfig, key: str, value: str, other: str) -> ConfigError:
    problem = "the spec entry point cannot report a load that fails"
    remedy = f"use --entry-point connector of `kvtier vllm-args`, or {other}"
    return ConfigError(config.origin.format_problem(key, problem, remedy, value=value))


def vllm_transfer_config(
    path: Path | str,
    config: KvtierConfig,
    *,
    entry_point: VllmEntryPoint = VllmEntryPoint.CONNECTOR,
) -> dict[str, Any]:
    """Return the value of vLLM's argument ``--kv-transfer-config`` for ``config``.

    Args:
        path: The file of ``config``. Every engine process reads the file again, perhaps in
            another working directory, so the path is made absolute.
        config: The configuration. The value contains the chunk size. For the spec entry
            point, the value also contains ``store_decode``.
        entry_point: The entry point through which vLLM loads kvtier.
    """
    extra: dict[str, Any] = {
        "kvtier_config": str(Path(path).absolute()),
        "blocks_per_chunk": config.engine.blocks_per_chunk,
    }
    if entry_point is VllmEntryPoint.SPEC:
        spec = {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm",
            "offload_prompt_only": not config.engine.store_decode,
        }
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": spec | extra,
        }
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
