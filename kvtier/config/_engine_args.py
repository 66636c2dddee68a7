"""What the engine must be told so that it loads kvtier with this configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.config._models import KvtierConfig

__all__ = ["vllm_transfer_config"]


def vllm_transfer_config(path: Path | str, config: KvtierConfig) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config`` for ``config``.

    Args:
        path: The file ``config`` was read from. Every engine process reads it again, from
            whatever directory it runs in, so the path is made absolute.
        config: The configuration; chunk size and offload scope must be equal on both sides.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm",
            "kvtier_config": str(Path(path).absolute()),
            "blocks_per_chunk": config.engine.blocks_per_chunk,
            "offload_prompt_only": not config.engine.store_decode,
        },
    }
