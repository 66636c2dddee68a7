"""Refuses unsupported engines at the start; each error names the reason and a remedy.

Some engines would store wrong KV. In some engines a request cannot use the KV of another
request; vLLM disables prefix caching for most of these engines, but still calls connectors. In
other engines the processes would wait for each other until a timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config import KvtierConfig, check_chunk_fits, variable
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.vllm.engine import EngineFacts

__all__ = ["refuse_layout", "refuse_worker", "warn_of_restarts"]

logger = get_logger(__name__)


def refuse_layout(engine: EngineFacts, config: KvtierConfig) -> None:
    """Refuse engines whose KV kvtier cannot store correctly, before kvtier allocates memory.

    Raises:
        UnsupportedError: kvtier does not support the engine's parallelism or layout.
        ConfigError: The engine's chunk size differs from the one in the file, or a tier is
            smaller than a chunk.
    """
    if engine.pp_size > 1 or engine.pcp_size > 1 or engine.dcp_size > 1:
        raise UnsupportedError(
            "kvtier supports tensor parallelism only; pipeline and context parallel sizes "
            f"are {engine.pp_size}, {engine.pcp_size} and {engine.dcp_size}"
        )
    layout = engine.kv_layout
    if 0 <= layout.find("H") < layout.find("B"):
        raise UnsupportedError(
            f"the KV cache layout {layout} stores each head separately, and vLLM passes only "
            "the first head to connectors: start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    if engine.canonical_layout:
        raise UnsupportedError("kvtier does not support canonical_layout: remove it")
    if engine.worker_kv_bytes_per_block <= 0:
        raise UnsupportedError("the engine has no KV cache: start vLLM without kvtier")
    if engine.blocks_per_chunk != config.engine.blocks_per_chunk:
        raise ConfigError(
            f"engine.blocks_per_chunk is {config.engine.blocks_per_chunk} in the file but "
            f"vLLM was started with {engine.blocks_per_chunk}: start it with what "
            "`kvtier vllm-args` prints"
        )
    # The bytes of one worker are a lower bound of a chunk. The workers check the full size.
    check_chunk_fits(config, engine.worker_kv_bytes_per_block * engine.blocks_per_chunk)


def refuse_worker(config: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse an engine that would serve wrong or useless chunks, or hang until a timeout.

    Args:
        config: vLLM's configuration in a worker, once the model is built.
        engine: The engine.

    Raises:
        UnsupportedError: The engine is refused.
        AttributeError: vLLM's configuration lacks an attribute that every release has.
    """
    layers = config.compilation_config.static_forward_context
    _refuse_changing_scales(
        {name: layers[name] for _, group in engine.groups for name in group}
    )
    _refuse_separate_schedulers(config.parallel_config, engine)
    _refuse_fault_tolerance(config.parallel_config)
    _refuse_sleep(config.model_config, engine)
    _refuse_unshareable_kv(config, layers)


def warn_of_restarts(vllm_config: Any, config: KvtierConfig) -> None:  # noqa: ANN401 - vLLM's
    """Warn of settings of vLLM that make cached KV wrong, unsafe or useless after a restart."""
    if len(config.tiers) == 1:
        return
    _warn_of_weak_hashes(vllm_config.cache_config.prefix_caching_hash_algo)
    _warn_of_moving_model(vllm_config.model_config, config)


def _warn_of_weak_hashes(algorithm: str) -> None:
    if algorithm.startswith("sha256"):
        return
    logger.warning(
        "--prefix-caching-hash-algo %s is not collision-resistant: a crafted prompt can read "
        "the KV of another prompt, also after a restart; use sha256 or sha256_cbor",
        algorithm,
    )
    if variable("PYTHONHASHSEED") is None:
        logger.warning(
            "vLLM seeds %s block hashes at random, so nothing stored is found after a "
            "restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256",
            algorithm,
        )


def _warn_of_moving_model(model: Any, config: KvtierConfig) -> None:  # noqa: ANN401 - vLLM's
    """Warn if a later start may load other weights under the same model name.

    This happens when the branch of a model on a hub moves.
    """
    # Some releases of vLLM replace the revision by an object that holds the given text.
    revision = getattr(model.revision, "initial", model.revision)
    identity = config.identity
    if revision or identity.name or identity.model_revision or Path(model.model).exists():
        return
    logger.warning(
        "the model %s has no revision: if its branch moves, a restart serves KV of the old "
        "weights; start vLLM with --revision COMMIT, or set identity.model_revision",
        model.model,
    )


def _refuse_changing_scales(layers: Mapping[str, Any]) -> None:
    """Refuse layers whose scales vLLM sets to 1 in the first forward pass.

    Chunks that were loaded before this pass would lose their scales.
    """
    for name, layer in layers.items():
        if str(getattr(layer, "kv_cache_dtype", "")).endswith("_per_token_head"):
            raise UnsupportedError(
                f"layer {name} keeps scales of each token and head, and vLLM resets them after "
                "chunks may have been loaded: choose another --kv-cache-dtype"
            )


def _refuse_separate_schedulers(parallel: Any, engine: EngineFacts) -> None:  # noqa: ANN401
    """Refuse engines whose workers run on several hosts or have separate schedulers."""
    if parallel.nnodes_within_dp > 1:
        raise UnsupportedError(
            f"this engine's workers run on {parallel.nnodes_within_dp} hosts, and those of one "
            "engine must share memory: start an engine on each host"
        )
    launcher = parallel.distributed_executor_backend
    if launcher == "external_launcher" and engine.world_size > 1:
        raise UnsupportedError(
            f"with --distributed-executor-backend external_launcher each of the "
            f"{engine.world_size} workers has its own scheduler, but a RAM tier serves only "
            "one: use mp"
        )


def _refuse_fault_tolerance(parallel: Any) -> None:  # noqa: ANN401 - vLLM's
    if parallel.enable_fault_tolerance:
        raise UnsupportedError(
            "remove --enable-fault-tolerance: after a failed step vLLM counts uncomputed "
            "tokens as computed, and kvtier would store them"
        )


def _refuse_sleep(model: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse workers that may free KV memory while a store reads it.

    An engine in its own process sleeps only when its connector has no work left. An engine in
    its caller's process does not wait for the connector. In that case the cache reset before
    the sleep waits for stores, but only for stores of a worker in the same process. If an
    engine has several workers, each worker has a separate process. So such engines are refused.
    """
    in_process = variable("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    if model.enable_sleep_mode and engine.world_size > 1 and in_process:
        raise UnsupportedError(
            "with --enable-sleep-mode, several workers and VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "vLLM frees the KV cache while kvtier may still copy chunks from it, which ends "
            "the engine; unset that variable, or start without sleep mode"
        )


def _refuse_unshareable_kv(config: Any, layers: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Refuse an engine if its chunks would be wrong or useless for other requests."""
    model = config.model_config
    specs = [
        layer.get_kv_cache_spec(config)
        for layer in layers.values()
        if hasattr(layer, "get_kv_cache_spec")
    ]
    # With an R-SWA window a token sees less of the generated tokens than of the prompt.
    if any(
        getattr(spec, "non_causal", False) or hasattr(spec, "rswa_window") for spec in specs
    ):
        raise UnsupportedError(
            "this model's keys and values depend on more than the tokens before them, so no "
            "other request can use them: vLLM has no prefix caching for it either; start vLLM "
            "without kvtier"
        )
    if model.is_diffusion:
        raise UnsupportedError(
            "kvtier does not support diffusion models, because the KV of an answer changes "
            "while it is written; start vLLM without kvtier"
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise UnsupportedError(
            "this pooling model needs all tokens of a prompt to be computed, so nothing of it "
            "can be loaded: vLLM has no prefix caching for it either, and its engine ends when "
            "a connector loads a prefix; start vLLM without kvtier"
        )
    media = model.multimodal_config
    # Without both of its caches vLLM numbers media from its start on instead of hashing them.
    if (
        media is not None
        and media.mm_processor_cache_gb == 0
        and not media.language_model_only
        and not config.cache_config.enable_prefix_caching
    ):
        raise UnsupportedError(
            "with --mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM does not name "
            "images and other media by their content, so a request could get the KV of other "
            "media; remove one of the two, or add --language-model-only"
        )
