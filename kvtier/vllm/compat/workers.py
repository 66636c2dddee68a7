"""What only a worker can tell of its engine: an offloading spec is not told.

All is asked of the configuration that vLLM has set where a worker registers its KV memory,
once :func:`~kvtier.vllm.compat.engine.kv_content` took it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvtier.vllm.compat.checks import Load
from kvtier.vllm.compat.halves import offers_late, uses_second_runner
from kvtier.vllm.compat.sharing import layer_kinds

if TYPE_CHECKING:
    from kvtier.vllm.compat.engine import EngineFacts

__all__ = [
    "clears_for_nobody",
    "current_config",
    "hands_over_lost_states",
    "has_adapters",
    "worker_offers_late",
    "worker_writes_to_blocks_first",
]


def current_config(*, load: Load = importlib.import_module) -> Any:  # noqa: ANN401 - vLLM's
    """Return vLLM's configuration, with the layers of the model; None outside of a worker.

    Args:
        load: Imports a module.
    """
    return load("vllm.config").get_current_vllm_config_or_none()


def worker_offers_late(
    config: Any,  # noqa: ANN401 - vLLM's
    engine: EngineFacts,
    *,
    load: Load = importlib.import_module,
) -> bool:
    """Return whether the scheduler half of a worker's engine offers chunks late.

    As :func:`~kvtier.vllm.compat.halves.offers_late` says, of what the engine's layers keep.

    Args:
        config: What :func:`current_config` returned.
        engine: The engine.
        load: Imports a module.
    """
    layers = config.compilation_config.static_forward_context
    groups = (
        (tokens, layers[names[0]].get_kv_cache_spec(config)) for tokens, names in engine.groups
    )
    return offers_late(config, groups, blocks_per_chunk=engine.blocks_per_chunk, load=load)


def has_adapters(config: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether requests to a worker's engine may ask for LoRA adapters."""
    return getattr(config, "lora_config", None) is not None


def worker_writes_to_blocks_first(
    config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Load = importlib.import_module,
) -> bool:
    """Return whether workers write to blocks before they end the stores that read them.

    As :func:`~kvtier.vllm.compat.halves.writes_to_blocks_first` tells a scheduler.

    Args:
        config: What :func:`current_config` returned.
        load: Imports a module.
    """
    return uses_second_runner(config) and _clears_blocks(config, load)


def clears_for_nobody(
    config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Load = importlib.import_module,
) -> bool:
    """Return whether a worker may clear blocks of which vLLM's half does not hear.

    With priorities a request may lose its blocks in the step that gave it some, and they are
    cleared all the same.

    Args:
        config: What :func:`current_config` returned.
        load: Imports a module.
    """
    scheduler = getattr(config, "scheduler_config", None)
    return getattr(scheduler, "policy", None) == "priority" and _clears_blocks(config, load)


def _clears_blocks(config: Any, load: Load) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether new blocks of a worker's engine are cleared."""
    interface = load("vllm.v1.kv_cache_interface")
    kinds = layer_kinds(config).values()
    precisions = {
        (kind.dtype, getattr(kind, "kv_quant_mode", None))
        for kind in kinds
        if isinstance(kind, interface.AttentionSpec)
    }
    return len(precisions) > 1 or any(isinstance(kind, interface.MambaSpec) for kind in kinds)


def hands_over_lost_states(config: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether the scheduler of a worker's engine hands over states that are gone.

    It does so where the tokens of one step may pass the end of a block by two: it then frees
    the block's state before it hands the state over.
    """
    scheduler = getattr(config, "scheduler_config", None)
    return (
        getattr(config.cache_config, "mamba_cache_mode", None) == "align"
        and bool(getattr(scheduler, "async_scheduling", False))
        and getattr(config, "num_speculative_tokens", 0) > 1
    )
