"""What vLLM's configuration means in kvtier's terms."""

from __future__ import annotations

import hashlib
from typing import Any

from kvtier.config import KvtierConfig, check_chunk_fits, environment
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory import RegionGeometry
from kvtier.types import LayoutFingerprint
from kvtier.vllm.compat.engine import EngineFacts
from kvtier.vllm.identity import declared_identity

__all__ = [
    "fingerprint",
    "require_supported_layout",
    "warn_of_weak_hashes",
]

logger = get_logger(__name__)


def require_supported_layout(engine: EngineFacts, config: KvtierConfig) -> None:
    """Refuse what kvtier cannot store correctly, before anything is allocated.

    Raises:
        UnsupportedError: A parallelism or layout kvtier does not support.
        ConfigError: The engine was started with another chunk size than the file says, or a
            tier is smaller than a chunk.
    """
    if engine.pp_size > 1 or engine.pcp_size > 1 or engine.dcp_size > 1:
        raise UnsupportedError(
            "kvtier supports tensor parallelism only; pipeline and context parallel sizes "
            f"are {engine.pp_size}, {engine.pcp_size} and {engine.dcp_size}"
        )
    layout = engine.kv_layout or ""
    if 0 <= layout.find("H") < layout.find("B"):
        raise UnsupportedError(
            f"the KV cache's layout, {layout}, keeps the heads of a block apart, and vLLM "
            "hands over the first one only: start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    if engine.canonical_layout:
        raise UnsupportedError("kvtier does not support canonical_layout: remove it")
    if engine.worker_kv_bytes_per_block <= 0:
        raise UnsupportedError("the engine has no KV cache to offload")
    if engine.blocks_per_chunk != config.engine.blocks_per_chunk:
        raise ConfigError(
            f"engine.blocks_per_chunk is {config.engine.blocks_per_chunk} in the file but "
            f"vLLM was started with {engine.blocks_per_chunk}: start it with what "
            "`kvtier vllm-args` prints"
        )
    # What a chunk has at least: one worker's part. The workers know the rest, and check it.
    check_chunk_fits(config, engine.worker_kv_bytes_per_block * engine.blocks_per_chunk)


def fingerprint(
    engine: EngineFacts, config: KvtierConfig, geometry: RegionGeometry
) -> LayoutFingerprint:
    """Return everything stored bytes depend on besides the tokens, which the keys name."""
    groups = ";".join(f"{tokens}:{','.join(layers)}" for tokens, layers in engine.groups)
    if engine.group_ids != tuple(range(len(engine.groups))):
        # Keys end with them, and with a group more before them each would be the next one's.
        groups += f";{','.join(map(str, engine.group_ids))}"
    return LayoutFingerprint(
        {
            **declared_identity(config, engine.model_name),
            "kv_dtype": engine.kv_dtype,
            "kv_layout": engine.kv_layout or "",
            "kv_content": geometry.content,
            "groups": hashlib.sha256(groups.encode()).hexdigest()[:16],
            "tokens_per_hash": engine.tokens_per_hash,
            "ranks": "any" if geometry.is_portable else geometry.ranks,
            "stripes": geometry.stripes,
            "stripe_nbytes": geometry.stripe_nbytes,
        },
        label=config.identity.name or engine.model_name,
    )


def warn_of_weak_hashes(vllm_config: Any, config: KvtierConfig) -> None:  # noqa: ANN401 - vLLM's
    """Warn if vLLM's block hashes do not suit a store that stays after a restart."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if len(config.tiers) == 1 or algorithm.startswith("sha256"):
        return
    logger.warning(
        "--prefix-caching-hash-algo %s: it is not collision-resistant, and a store keeps "
        "what a collision put there: a prompt made for it reads another one's KV, also "
        "after a restart; use sha256 or sha256_cbor",
        algorithm,
    )
    if environment().python_hash_seed is None:
        logger.warning(
            "vLLM seeds %s block hashes at random, so nothing stored is found after a "
            "restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256",
            algorithm,
        )
