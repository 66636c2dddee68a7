"""What the engine must be told so that it loads kvtier with this configuration."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from kvtier.config._models import KvtierConfig
from kvtier.errors import ConfigError

__all__ = ["Door", "resolve_load_path", "vllm_transfer_config"]


class Door(enum.StrEnum):
    """A way into vLLM."""

    CONNECTOR = "connector"
    """A connector of kvtier's own, the recommended one: a load that fails is computed."""
    SPEC = "spec"
    """A specification for vLLM's own connector, which cannot survive a load that fails."""


def resolve_load_path(config: KvtierConfig, door: Door = Door.CONNECTOR) -> KvtierConfig:
    """Return ``config`` with the load path that ``auto`` means behind ``door``.

    Whoever runs a configuration, or predicts what it does, asks here.

    Args:
        config: The configuration.
        door: The way into vLLM.

    Raises:
        ConfigError: The file asks for a way to load that this door cannot take.
    """
    transfer = config.transfer
    if door is Door.SPEC and transfer.load_path == "direct":
        problem = "this entry point cannot report a load that fails on its way"
        remedy = "use --door connector of `kvtier vllm-args`, or load_path: staged"
        at = "transfer.load_path"
        raise ConfigError(config.origin.complain(at, problem, remedy, value="direct"))
    if transfer.load_path != "auto":
        return config
    path = "staged" if door is Door.SPEC else "direct"
    resolved = transfer.model_copy(update={"load_path": path})
    return config.model_copy(update={"transfer": resolved})


def vllm_transfer_config(
    path: Path | str, config: KvtierConfig, *, door: Door = Door.CONNECTOR
) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config`` for ``config``.

    Args:
        path: The file ``config`` was read from. Every engine process reads it again, from
            whatever directory it runs in, so the path is made absolute.
        config: The configuration; chunk size and offload scope must be equal on both sides.
        door: The way into vLLM.
    """
    extra: dict[str, Any] = {
        "kvtier_config": str(Path(path).absolute()),
        "blocks_per_chunk": config.engine.blocks_per_chunk,
        "offload_prompt_only": not config.engine.store_decode,
    }
    if door is Door.SPEC:
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
