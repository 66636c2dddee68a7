"""What the engine must be told so that it loads kvtier with this configuration."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from kvtier.config._models import KvtierConfig
from kvtier.errors import ConfigError

__all__ = ["VllmEntryPoint", "resolve_load_path", "vllm_transfer_config"]


class VllmEntryPoint(enum.StrEnum):
    """How vLLM loads kvtier."""

    CONNECTOR = "connector"
    """kvtier's own connector, the default. A request recomputes what fails to load."""
    SPEC = "spec"
    """A spec for vLLM's ``OffloadingConnector``, which stops when a load fails."""


def resolve_load_path(
    config: KvtierConfig, entry_point: VllmEntryPoint = VllmEntryPoint.CONNECTOR
) -> KvtierConfig:
    """Return ``config`` with ``load_path: auto`` replaced by the entry point's choice.

    Args:
        config: The configuration.
        entry_point: How vLLM loads kvtier.

    Raises:
        ConfigError: The entry point does not support the file's ``load_path``.
    """
    transfer = config.transfer
    if entry_point is VllmEntryPoint.SPEC and transfer.load_path == "direct":
        problem = "the spec entry point cannot report a load that fails"
        remedy = "use --entry-point connector of `kvtier vllm-args`, or load_path: staged"
        at = "transfer.load_path"
        raise ConfigError(config.origin.format_problem(at, problem, remedy, value="direct"))
    if transfer.load_path != "auto":
        return config
    path = "staged" if entry_point is VllmEntryPoint.SPEC else "direct"
    resolved = transfer.model_copy(update={"load_path": path})
    return config.model_copy(update={"transfer": resolved})


def vllm_transfer_config(
    path: Path | str,
    config: KvtierConfig,
    *,
    entry_point: VllmEntryPoint = VllmEntryPoint.CONNECTOR,
) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config`` for ``config``.

    Args:
        path: The file ``config`` was read from. Every engine process reads it again, from
            whatever directory it runs in, so the path is made absolute.
        config: The configuration; chunk size and offload scope must be equal on both sides.
        entry_point: How vLLM loads kvtier.
    """
    extra: dict[str, Any] = {
        "kvtier_config": str(Path(path).absolute()),
        "blocks_per_chunk": config.engine.blocks_per_chunk,
        "offload_prompt_only": not config.engine.store_decode,
    }
    if entry_point is VllmEntryPoint.SPEC:
        spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
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
