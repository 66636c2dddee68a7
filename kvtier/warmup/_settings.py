"""Writes the configuration of a warm-up's engine.

It is the user's configuration, changed so that the engine writes every chunk to every tier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    PlacementConfig,
    TierConfig,
    TraceConfig,
    resolve_load_path,
    vllm_transfer_config,
)

__all__ = ["WARMUP_FILE", "write_settings"]

WARMUP_FILE: Final = "kvtier-warmup.yaml"
_ALWAYS_S: Final = 3650 * 86400.0


def write_settings(
    config: KvtierConfig, directory: Path, *, may_remove: bool
) -> dict[str, Any]:
    """Write the configuration of a warm-up's engine to ``directory``.

    The engine writes every chunk to every tier at once. It loads every stored chunk, so that
    nothing is computed twice. It does not record requests. These changes do not affect the
    identity of a store, so the deployment's engines read the chunks.

    Args:
        config: The user's configuration.
        directory: The directory for the file.
        may_remove: Whether the engine may remove a cache of another identity, if the user's
            file allows it. If False, wrong arguments cannot remove the deployment's cache.

    Returns:
        The value of vLLM's ``--kv-transfer-config`` that makes vLLM read the file.
    """
    rules = config.placement
    tiers = config.tiers if may_remove else tuple(map(_refusing, config.tiers))
    changed = config.model_copy(
        update={
            "tiers": tiers,
            "placement": PlacementConfig(
                pin_budget=rules.pin_budget, backlog_limit=1.0, load_if="always"
            ),
            "trace": TraceConfig(),
            "shadow": (),
        }
    )
    file = directory / WARMUP_FILE
    file.write_text(changed.model_dump_json(by_alias=True, exclude_none=True), "utf-8")
    return vllm_transfer_config(file, resolve_load_path(changed))


def _refusing(tier: TierConfig) -> TierConfig:
    """Return ``tier`` changed so that opening it never removes another cache's chunks."""
    if not isinstance(tier, NvmeTierConfig):
        return tier
    return tier.model_copy(update={"on_mismatch": "refuse", "keep_for_s": _ALWAYS_S})
