"""Plain values that stand for the KV cache of a vLLM: kinds of layers, groups, memory.

The class names are vLLM's, because kvtier knows kinds by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

BLOCKS = 8
FLOAT_NBYTES = 4


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What every kind has."""

    block_size: int = 16
    page_size_padded: int | None = None
    prefix_cacheable: bool = True

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.block_size * self.token_nbytes

    @property
    def token_nbytes(self) -> int:
        return 16


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    num_kv_heads: int = 8
    head_size: int = 2
    has_scales: bool = False

    @property
    def token_nbytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * FLOAT_NBYTES

    @property
    def kv_quant_mode(self) -> Any:
        return SimpleNamespace(is_per_token_head=self.has_scales)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 40


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    tokens_per_state: int = 1


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    mamba_cache_mode: str = "align"


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(KVCacheSpec):
    prefix_cacheable: bool = False


KINDS = SimpleNamespace(
    FullAttentionSpec=FullAttentionSpec,
    SlidingWindowSpec=SlidingWindowSpec,
    ChunkedLocalAttentionSpec=ChunkedLocalAttentionSpec,
    MLAAttentionSpec=MLAAttentionSpec,
    MambaSpec=MambaSpec,
    CircularBufferSpec=CircularBufferSpec,
)
"""vLLM's module of kinds; it lacks those that came later."""


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    """Several layers with specs of their own in one group."""

    block_size: int
    kv_cache_specs: dict[str, Any]


@dataclass
class Group:
    """A KV cache group."""

    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False


def groups_of(*specs: Any) -> list[Group]:
    """Return one group for each spec, with the layer ``layer.N``."""
    return [Group([f"layer.{number}"], spec) for number, spec in enumerate(specs)]


def kv_cache_config(
    groups: Sequence[Group], tensors: Sequence[Any] = (), **changes: Any
) -> SimpleNamespace:
    """Return vLLM's ``KVCacheConfig`` of ``groups``."""
    values = {
        "num_blocks": BLOCKS,
        "kv_cache_tensors": list(tensors),
        "kv_cache_groups": list(groups),
        "prefix_cacheable_group_ids": tuple(range(len(groups))),
        "hisparse_host_num_blocks": None,
        "kv_cache_layout": "LBHNC",
        "needs_kv_cache_zeroing": False,
    }
    return SimpleNamespace(**(values | changes))
