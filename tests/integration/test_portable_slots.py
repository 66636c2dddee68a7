"""Slots do not depend on the number of ranks where vLLM splits pages by heads."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)

from kvtier.config import KvtierConfig, load_config
from kvtier.errors import UnsupportedError
from kvtier.memory import RegionGeometry
from kvtier.memory.slot_layout import RankShare
from kvtier.types import LayoutFingerprint
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.identity import fingerprint
from kvtier.vllm.opening import offer_region, require_same_file
from kvtier.vllm.pages import SlotShape, find_pages, share_slots
from tests.demo.scenario import store_yaml
from tests.unit.kv_pages import BLOCK_TOKENS, BLOCKS, HEAD_SIZE

LAYERS = ("layer.0", "layer.1")
HEADS = 8


def attention(heads: int) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
    )


def latent() -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def share(
    spec: KVCacheSpec, views: dict[str, torch.Tensor], *, ranks: int, rank: int
) -> SlotShape:
    """Do what a worker does with the KV memory of a model of equal layers."""
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, world_size=ranks, rank=rank
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
    )
    page = spec.page_size_bytes
    placed = KVCacheTensor(
        size=len(LAYERS) * BLOCKS * page,
        layers=list(LAYERS),
        layer_stride=BLOCKS * page,
        block_stride=page,
    )
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
    )
    kv = find_pages(views, config, (0,), "LBHNC")
    return share_slots(vllm_config, config, views, kv, (0,), "LBHNC")


def heads_outermost(heads: int) -> dict[str, torch.Tensor]:
    both = torch.zeros((len(LAYERS), BLOCKS, heads, BLOCK_TOKENS, 2 * HEAD_SIZE))
    return dict(zip(LAYERS, both, strict=True))


def tokens_outermost(heads: int) -> dict[str, torch.Tensor]:
    both = torch.zeros((len(LAYERS), BLOCKS, BLOCK_TOKENS, heads, 2 * HEAD_SIZE))
    return dict(zip(LAYERS, both.transpose(2, 3), strict=True))


def facts(ranks: int, rank: int, page_nbytes: int) -> EngineFacts:
    return EngineFacts(
        engine_id="engine",
        extra_config={},
        records_events=False,
        model_name="some/model",
        kv_dtype="float32",
        kv_layout="LBHNC",
        canonical_layout=False,
        groups=((BLOCK_TOKENS, LAYERS),),
        group_ids=(0,),
        counting_group=0,
        tokens_per_hash=BLOCK_TOKENS,
        blocks_per_chunk=2,
        worker_kv_bytes_per_block=page_nbytes * len(LAYERS),
        rank=rank,
        world_size=ranks,
        tp_size=ranks,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_rank=None,
    )


@pytest.fixture
def config(tmp_path: Path) -> KvtierConfig:
    file = store_yaml(
        tmp_path / "kvtier.yaml",
        store=tmp_path / "store",
        ram_nbytes=1 << 26,
        nvme_nbytes=1 << 26,
        blocks_per_chunk=2,
    )
    return load_config(file)


def stored_as(
    config: KvtierConfig, shape: SlotShape, *, ranks: int, content: str = "layers"
) -> LayoutFingerprint:
    """Return what a store of such slots is known by."""
    geometry = RegionGeometry(
        slots=4,
        slot_nbytes=2 * shape.block_nbytes,
        block_nbytes=shape.block_nbytes,
        ranks=ranks,
        is_portable=shape.is_portable,
        content=content,
    )
    return fingerprint(facts(ranks, 0, 1), config, geometry)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_heads_outermost_give_every_number_of_ranks_the_same_store(
    config: KvtierConfig, ranks: int
) -> None:
    one = share(attention(HEADS), heads_outermost(HEADS), ranks=1, rank=0)
    heads = max(HEADS // ranks, 1)
    parts, writers = min(ranks, HEADS), max(ranks // HEADS, 1)
    for rank in range(ranks):
        shape = share(attention(heads), heads_outermost(heads), ranks=ranks, rank=rank)
        assert shape.share == RankShare(rank // writers, parts, writers, rank % writers)
        assert stored_as(config, shape, ranks=ranks) == stored_as(config, one, ranks=1)


def test_layers_of_another_content_are_another_store(config: KvtierConfig) -> None:
    shape = share(attention(HEADS), heads_outermost(HEADS), ranks=1, rank=0)
    stores = {
        stored_as(config, shape, ranks=1, content=content).namespace()
        for content in ("fp8 and bf16", "bf16 and fp8")
    }
    assert len(stores) == 2


def test_latent_attention_is_stored_once_for_all_ranks(config: KvtierConfig) -> None:
    both = torch.zeros((len(LAYERS), BLOCKS, BLOCK_TOKENS, 576), dtype=torch.bfloat16)
    views = dict(zip(LAYERS, both, strict=True))
    one = share(latent(), views, ranks=1, rank=0)
    shape = share(latent(), views, ranks=4, rank=3)
    assert shape.share == RankShare(writers=4, writer=3)
    assert stored_as(config, shape, ranks=4) == stored_as(config, one, ranks=1)


def test_tokens_outermost_bind_a_store_to_its_number_of_ranks_and_the_log_says_why(
    config: KvtierConfig, caplog: pytest.LogCaptureFixture
) -> None:
    one = share(attention(HEADS), tokens_outermost(HEADS), ranks=1, rank=0)
    with caplog.at_level(logging.INFO, logger="vllm.kvtier.vllm.pages"):
        shape = share(attention(4), tokens_outermost(4), ranks=2, rank=1)
    assert shape.share == RankShare(1, 2)
    assert stored_as(config, shape, ranks=2) != stored_as(config, one, ranks=1)
    assert "--tensor-parallel-size 2 only: the heads of layer layer.0 are not outermost" in (
        caplog.text
    )


def test_memory_made_from_another_file_is_refused(config: KvtierConfig, tmp_path: Path) -> None:
    shape = share(attention(HEADS), heads_outermost(HEADS), ranks=1, rank=0)
    engine = facts(1, 0, attention(HEADS).page_size_bytes)
    region = offer_region(engine, config, shape, content="layers")
    try:
        require_same_file(region.geometry, engine, config)
        other = load_config(
            store_yaml(
                tmp_path / "other.yaml",
                store=tmp_path / "store",
                ram_nbytes=1 << 25,
                nvme_nbytes=1 << 26,
                blocks_per_chunk=2,
            )
        )
        with pytest.raises(UnsupportedError, match="must read the same configuration file"):
            require_same_file(region.geometry, engine, other)
    finally:
        region.close()
