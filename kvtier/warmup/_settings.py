"""The configuration of a warm-up's engine: the user's, but every chunk reaches the disk."""

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

    Every chunk goes to every tier at once, and every stored chunk is loaded, so that nothing is
    computed twice. Requests are not recorded. A store does not depend on any of that.

    Args:
        config: The user's configuration.
        directory: Where to write.
        may_remove: Whether the engine may remove a cache of another identity, as the user's
            file says. Otherwise wrong arguments would remove the cache of the deployment.

    Returns:
        vLLM's ``--kv-transfer-config``.
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
    """Return ``tier`` such that its start removes no cache that has chunks."""
    if not isinstance(tier, NvmeTierConfig):
        return tier
    return tier.model_copy(update={"on_mismatch": "refuse", "keep_for_s": _ALWAYS_S})
