"""Names and signs that came, went or changed between two releases."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any, Final

from kvtier.errors import UnsupportedError
from kvtier.vllm.compat.checks import BASE_MODULE, SUPPORTED, Load, missing_members

__all__ = [
    "chunk_level",
    "chunk_positions",
    "event_extras",
    "hashes_are_seeded_at_random",
    "hit_sources",
    "kv_cache_layout",
    "media",
    "names_tiers",
    "page_mapping",
    "transfer_results",
]

_POSITIONS: Final = "_offload_key_positions"
_RESULTS_MODULE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def chunk_level(policies: Any) -> Any:  # noqa: ANN401 - an enumeration of vLLM's
    """Return the policy that offers a request's chunks one by one, of vLLM's enumeration.

    Raises:
        UnsupportedError: It has neither of the names known.
    """
    for name in ("CHUNK_LEVEL", "BLOCK_LEVEL"):
        if hasattr(policies, name):
            return getattr(policies, name)
    raise UnsupportedError(f"this vLLM's OffloadPolicy has no CHUNK_LEVEL: {SUPPORTED}")


def media(load: Load = importlib.import_module) -> tuple[Any, Any]:
    """Return what vLLM's residency events call host memory and storage."""
    medium = getattr(load(BASE_MODULE), "Medium", None)
    return ("CPU", "STORAGE") if medium is None else (medium.CPU, medium.STORAGE)


def hit_sources(load: Load = importlib.import_module) -> tuple[Any, Any]:
    """Return what vLLM calls hits in host memory and on disk; None where it does not ask."""
    try:
        sources = load("vllm.v1.metrics.cache_hit_source").CacheHitSource
    except ImportError:
        return None, None
    return sources.HOST, sources.DISK


def hashes_are_seeded_at_random(load: Load = importlib.import_module) -> bool:
    """Return whether the next engine will hash blocks otherwise unless PYTHONHASHSEED is set.

    To be asked when the first request arrives: vLLM seeds its hashes after it built the
    connector.
    """
    hashing = load("vllm.v1.core.kv_cache_utils")
    constant = getattr(hashing, "DEFAULT_NONE_HASH_SEED", None)
    return constant is None or getattr(hashing, "_NONE_HASH_SEED", None) not in {None, constant}


def names_tiers(event: type[Any]) -> bool:
    """Return whether residency events, of this class of vLLM's, have room for a tier's name."""
    return not missing_members(event, "ownership")


def event_extras(event: type[Any]) -> dict[str, Any]:
    """Return what every residency event, of this class of vLLM's, says besides.

    A removal is announced for all that is stored; vLLM then keeps what describes the blocks.
    """
    return {} if missing_members(event, "removal_expected") else {"removal_expected": True}


def chunk_positions(context: type[Any]) -> Callable[[Any], Any] | None:
    """Return what tells the chunks of a request from its context, of this class of vLLM's.

    Returns:
        None where the context does not keep them.
    """
    return None if missing_members(context, _POSITIONS) else operator.attrgetter(_POSITIONS)


def page_mapping(reference: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return how a layer's page is split over the ranks; None where vLLM does not say."""
    return getattr(reference, "mapping", None)


def kv_cache_layout(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Return the layout of the KV cache that vLLM chose; ``unknown`` where it does not say."""
    return getattr(vllm_config.cache_config, "kv_cache_layout", None) or "unknown"


def transfer_results(load: Load = importlib.import_module) -> Any:  # noqa: ANN401 - vLLM's
    """Return the class in which a worker names requests whose load failed.

    Returns:
        None where vLLM takes only blocks.
    """
    return getattr(load(_RESULTS_MODULE), "KVConnectorTransferResults", None)
