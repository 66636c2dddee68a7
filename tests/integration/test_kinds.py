"""Which KV cache groups of vLLM kvtier stores, and what a hit needs of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.connector.groups import CacheGroup
from kvtier.errors import UnsupportedError
from kvtier.manager import Reach
from kvtier.vllm.kinds import cache_groups, require_known_specs

COMMON: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float16,
}
FULL = FullAttentionSpec(**COMMON)


class Evicting(FullAttentionSpec):
    """A plugin's, whose manager gives blocks away amid a prompt."""


def config_of(*specs: KVCacheSpec, **changes: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **changes)


def state(mode: str = "align") -> KVCacheSpec:
    return MambaSpec(
        block_size=32, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def ring() -> KVCacheSpec:
    fields = {field.name for field in dataclasses.fields(CircularBufferSpec)}
    return CircularBufferSpec(**{name: COMMON[name] for name in fields & COMMON.keys()})


@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (FULL, CacheGroup(16)),
        (MLAAttentionSpec(**COMMON), CacheGroup(16)),
        (
            SlidingWindowSpec(**COMMON, sliding_window=40),
            CacheGroup(16, reach=Reach.WINDOW, window_tokens=40),
        ),
        (
            ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=64),
            CacheGroup(16, reach=Reach.LOCAL, window_tokens=64),
        ),
        (state(), CacheGroup(32, reach=Reach.STATE, is_handed_over=True)),
        (state("all"), CacheGroup(32, reach=Reach.STATE)),
        (
            UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": FULL}),
            CacheGroup(16),
        ),
    ],
    ids=["full", "latent", "window", "local", "states", "all states", "several layers"],
)
def test_each_kind_says_what_a_hit_needs(spec: KVCacheSpec, group: CacheGroup) -> None:
    assert cache_groups(config_of(spec)) == (group,)


def test_groups_that_cannot_be_found_by_hash_are_left_out() -> None:
    groups = cache_groups(config_of(ring(), FULL))
    assert groups == (CacheGroup(16, index=1),)


def test_layers_of_a_draft_model_are_recognized() -> None:
    config = config_of(FULL, FULL)
    config.kv_cache_groups[1].is_eagle_group = True
    assert [group.is_draft for group in cache_groups(config)] == [False, True]


@pytest.mark.parametrize(
    "odd",
    [
        Evicting(**COMMON),
        UniformTypeKVCacheSpecs(
            block_size=16, kv_cache_specs={"layer.1": FULL, "layer.2": Evicting(**COMMON)}
        ),
    ],
    ids=["one", "among several"],
)
def test_a_kind_derived_from_a_known_one_is_refused(odd: KVCacheSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"layer\.[12] keeps .*\.Evicting, a kind of"):
        cache_groups(config_of(FULL, odd))


def test_rows_of_several_tokens_are_refused_where_a_hit_could_end_within_one() -> None:
    rows = MLAAttentionSpec(**COMMON, tokens_per_state=4)
    odd = FullAttentionSpec(**(COMMON | {"block_size": 6}))
    assert cache_groups(config_of(rows, odd)), "what is not finished is stored as well"
    assert cache_groups(config_of(rows, FULL, ring()))
    with pytest.raises(
        UnsupportedError, match="one row for 4 tokens and others have blocks of 6"
    ):
        cache_groups(config_of(rows, odd, ring()))


def test_caches_that_vllm_keeps_in_host_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="HiSparse"):
        cache_groups(config_of(FULL, hisparse_host_num_blocks=4))


def test_every_kind_of_vllm_is_stored_or_refused_on_purpose() -> None:
    found = {
        name: each
        for name, each in vars(kv_cache_interface).items()
        if isinstance(each, type) and issubclass(each, KVCacheSpec)
    }
    refused = set()
    for name, kind in found.items():
        try:
            require_known_specs({"layer.0": object.__new__(kind)})
        except UnsupportedError:
            refused.add(name)
    assert refused == {
        "AttentionSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",  # kept by no layer, but in the worker's own books
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
        "KVCacheSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
        "UniformTypeKVCacheSpecs",
    }
