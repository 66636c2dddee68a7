"""Finds the KV cache groups that kvtier stores, and which of their chunks a hit needs.

The class of a layer's ``KVCacheSpec`` decides what the layer keeps and when vLLM frees the
layer's blocks. A platform or a model may derive a class with other rules. For example, a
subclass of full attention may evict tokens from the middle of a prompt. So classes are compared
exactly and not by ``isinstance``, and an unknown class is refused at the start.

Refused kinds of vLLM: ``RSWASpec`` and ``CrossAttentionSpec``, because their KV is useless for
other requests, and ``SinkFullAttentionSpec``, because vLLM 0.32 cannot build its manager.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvtier.connector.groups import CacheGroup
from kvtier.errors import UnsupportedError
from kvtier.manager import Reach

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = ["cache_groups", "layer_specs", "require_known_specs"]

_REACH: Final[Mapping[str, Reach]] = {
    "FullAttentionSpec": Reach.PREFIX,
    "HiddenStateCacheSpec": Reach.PREFIX,
    "MLAAttentionSpec": Reach.PREFIX,
    "SlidingWindowSpec": Reach.WINDOW,
    "SlidingWindowMLASpec": Reach.WINDOW,
    "ChunkedLocalAttentionSpec": Reach.LOCAL,
    "MambaSpec": Reach.STATE,
}
_NOT_STORED: Final = ("CircularBufferSpec", "KpoolTailSpec")
"""Kinds of buffers that serve one request; their groups have no prefix cache. vLLM 0.31 added
these kinds."""


def layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Return the specs of a group's layers by layer name."""
    spec: Any = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return dict(each) if each else dict.fromkeys(group.layer_names, spec)


def require_known_specs(specs: Mapping[str, KVCacheSpec]) -> None:
    """Refuse layers of an unknown kind.

    Args:
        specs: Specs by the layers' names.

    Raises:
        UnsupportedError: A layer is of an unknown kind; the message names layer and kind.
    """
    kinds = importlib.import_module("vllm.v1.kv_cache_interface")
    known = {getattr(kinds, name, None) for name in (*_REACH, *_NOT_STORED)}
    for layer, spec in specs.items():
        own = type(spec)
        if own not in known:
            raise UnsupportedError(
                f"layer {layer} keeps {own.__module__}.{own.__qualname__}, a kind of KV cache "
                "that kvtier does not store; start vLLM without kvtier"
            )


def cache_groups(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return the KV cache groups that kvtier stores: those in vLLM's prefix cache.

    Raises:
        UnsupportedError: A kind is unknown, or a hit could end inside a row of several tokens.
    """
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise UnsupportedError("kvtier does not store HiSparse caches; start vLLM without them")
    for group in kv_cache_config.kv_cache_groups:
        require_known_specs(layer_specs(group))
    stored = kv_cache_config.prefix_cacheable_group_ids
    groups = tuple(
        _cache_group(index, kv_cache_config.kv_cache_groups[index]) for index in stored
    )
    _require_whole_rows(kv_cache_config, groups)
    return groups


def _cache_group(index: int, group: KVCacheGroupSpec) -> CacheGroup:
    spec: Any = next(iter(layer_specs(group).values()))
    reach = _REACH[type(spec).__name__]
    window_tokens = 0
    if reach is Reach.WINDOW:
        window_tokens = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif reach is Reach.LOCAL:
        window_tokens = spec.attention_chunk_size
    return CacheGroup(
        tokens_per_block=group.kv_cache_spec.block_size,
        index=index,
        reach=reach,
        window_tokens=window_tokens,
        is_draft=bool(getattr(group, "is_eagle_group", False)),
        is_handed_over=getattr(spec, "mamba_cache_mode", None) == "align",
    )


def _require_whole_rows(kv_cache_config: KVCacheConfig, groups: tuple[CacheGroup, ...]) -> None:
    """Refuse a model if a hit could end inside a KV row that holds several tokens.

    vLLM keeps the tokens of an unfinished row in a buffer that kvtier does not store.
    """
    specs = [
        spec for each in kv_cache_config.kv_cache_groups for spec in layer_specs(each).values()
    ]
    if all(spec.prefix_cacheable for spec in specs):
        return
    rows = {getattr(spec, "tokens_per_state", 1) for spec in specs}
    for row in sorted(row for row in rows if isinstance(row, int) and row > 1):
        for group in groups:
            if group.tokens_per_block % row:
                raise UnsupportedError(
                    f"layers of this model keep one row for {row} tokens and others have "
                    f"blocks of {group.tokens_per_block}: a hit could end within a row; start "
                    "vLLM without kvtier"
                )
