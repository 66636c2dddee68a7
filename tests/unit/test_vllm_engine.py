"""What kvtier needs to know of an engine, read from a configuration of plain values."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.groups import CacheGroup
from kvtier.manager import Reach
from kvtier.vllm.engine import EngineFacts, read_vllm_config
from tests.unit.vllm_kv import BLOCKS, FullAttentionSpec, groups_of, kv_cache_config

TOKENS_PER_HASH = 8


@pytest.fixture(autouse=True)
def _block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities: Any = SimpleNamespace(
        resolve_kv_cache_block_sizes=lambda kv, vllm: (16, TOKENS_PER_HASH)
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", utilities)


def facts(
    *groups: CacheGroup,
    extra: dict[str, Any] | None = None,
    cache_dtype: str = "auto",
    events: Any = None,
    **kv: Any,
) -> EngineFacts:
    """Return the facts of an engine with two KV cache groups."""
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=1,
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(
            engine_id="e1", kv_connector_extra_config=extra or {}
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, kv_cache_layout="LBNHC"),
        kv_events_config=events,
        model_config=SimpleNamespace(model="some/model", dtype="torch.bfloat16"),
    )
    specs = [FullAttentionSpec(), FullAttentionSpec(block_size=32)]
    tensors = [SimpleNamespace(size=BLOCKS * 4096)]
    config = kv_cache_config(groups_of(*specs), tensors, **kv)
    return read_vllm_config(vllm_config, config, groups or [CacheGroup(16)])


def test_groups_have_their_blocks_and_their_layers() -> None:
    window = CacheGroup(32, index=1, reach=Reach.WINDOW, window_tokens=40)
    engine = facts(CacheGroup(16), window, extra={"blocks_per_chunk": 4})
    assert engine.groups == ((16, ("layer.0",)), (32, ("layer.1",)))
    assert (engine.group_ids, engine.counting_group) == ((0, 1), 0)
    assert engine.chunk_tokens == 64
    assert engine.tokens_per_hash == TOKENS_PER_HASH


def test_only_groups_that_are_stored_are_listed() -> None:
    engine = facts(CacheGroup(32, index=1))
    assert engine.groups == ((32, ("layer.1",)),)
    assert (engine.group_ids, engine.counting_group, engine.chunk_tokens) == ((1,), 1, 32)


def test_sizes_and_ranks_are_the_engines() -> None:
    engine = facts()
    assert (engine.rank, engine.world_size, engine.tp_size) == (1, 2, 2)
    assert engine.worker_kv_bytes_per_block == 4096
    assert facts(num_blocks=0).worker_kv_bytes_per_block == 0
    assert facts(kv_cache_tensors=[]).worker_kv_bytes_per_block == 0
    assert engine.data_parallel_rank is None


@pytest.mark.parametrize(("given", "dtype"), [("auto", "bfloat16"), ("fp8", "fp8")])
def test_the_element_type_is_the_models_unless_the_cache_has_its_own(
    given: str, dtype: str
) -> None:
    assert facts(cache_dtype=given).kv_dtype == dtype


@pytest.mark.parametrize(("found", "layout"), [("LBHNC", "LBHNC"), (None, "LBNHC")])
def test_the_layout_is_the_caches_unless_the_configuration_of_groups_has_it(
    found: str | None, layout: str
) -> None:
    assert facts(kv_cache_layout=found).kv_layout == layout


def test_events_are_recorded_for_a_listener_only() -> None:
    assert not facts().records_events
    assert not facts(events=SimpleNamespace(enable_kv_cache_events=False)).records_events
    assert facts(events=SimpleNamespace(enable_kv_cache_events=True)).records_events
