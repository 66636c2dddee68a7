"""Which KV cache groups are stored, by what a plain value says of each."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvtier.connector.groups import CacheGroup
from kvtier.errors import UnsupportedError
from kvtier.manager import Reach
from kvtier.vllm.kinds import cache_groups
from tests.unit.vllm_kv import (
    KINDS,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    groups_of,
    kv_cache_config,
)

FULL = FullAttentionSpec()


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", KINDS)


def stored(*specs: Any, **changes: Any) -> tuple[CacheGroup, ...]:
    return cache_groups(kv_cache_config(groups_of(*specs), **changes))


@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (FULL, CacheGroup(16)),
        (MLAAttentionSpec(), CacheGroup(16)),
        (SlidingWindowSpec(), CacheGroup(16, reach=Reach.WINDOW, window_tokens=40)),
        (ChunkedLocalAttentionSpec(), CacheGroup(16, reach=Reach.LOCAL, window_tokens=64)),
        (MambaSpec(), CacheGroup(16, reach=Reach.STATE, is_handed_over=True)),
        (MambaSpec(mamba_cache_mode="all"), CacheGroup(16, reach=Reach.STATE)),
        (UniformTypeKVCacheSpecs(16, {"layer.0": FULL}), CacheGroup(16)),
    ],
    ids=["full", "latent", "window", "local", "states", "all states", "several layers"],
)
def test_each_kind_has_its_reach(spec: Any, group: CacheGroup) -> None:
    assert stored(spec) == (group,)


def test_draft_layers_are_marked() -> None:
    groups = [Group(["a"], FULL), Group(["b"], FULL, is_eagle_group=True)]
    config: Any = kv_cache_config(groups)
    assert [group.is_draft for group in cache_groups(config)] == [False, True]


def test_buffers_without_a_prefix_cache_are_left_out() -> None:
    assert stored(CircularBufferSpec(), FULL, prefix_cacheable_group_ids=(1,)) == (
        CacheGroup(16, index=1),
    )


def test_a_derived_kind_is_refused_by_name() -> None:
    class Evicting(FullAttentionSpec):
        pass

    with pytest.raises(UnsupportedError) as caught:
        stored(FULL, Evicting())
    assert str(caught.value).startswith("layer layer.1 keeps ")
    assert "Evicting, a kind of KV cache that kvtier does not store" in str(caught.value)


def test_a_kind_that_this_vllm_does_not_have_is_unknown() -> None:
    with pytest.raises(UnsupportedError, match=r"keeps builtins\.NoneType, a kind of KV cache"):
        stored(None)


def test_caches_in_host_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not store HiSparse caches"):
        stored(FULL, hisparse_host_num_blocks=4)


def test_a_hit_that_could_end_within_a_row_is_refused() -> None:
    rows, odd = MLAAttentionSpec(tokens_per_state=4), FullAttentionSpec(block_size=6)
    buffer = CircularBufferSpec()
    both = {"prefix_cacheable_group_ids": (0, 1)}
    assert stored(rows, odd), "nothing is in a buffer"
    assert stored(rows, FULL, buffer, **both)
    with pytest.raises(UnsupportedError, match="one row for 4 tokens and others have blocks"):
        stored(rows, odd, buffer, **both)
