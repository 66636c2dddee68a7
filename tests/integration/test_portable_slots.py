"""vLLM's own description of its pages makes slots that do not depend on the number of ranks."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvtier.vllm.slots import lay_out_slots, require_same_file
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvtier.config import KvtierConfig, load_config
from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import STRIPES, RankShare, shard_of
from kvtier.types import LayoutFingerprint
from kvtier.vllm.compat import EngineFacts
from kvtier.vllm.demo.scenario import store_yaml
from kvtier.vllm.layout import fingerprint
from tests.unit.kv_pages import BLOCK_TOKENS, BLOCKS, HEAD_SIZE, Model

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


def register(
    spec: KVCacheSpec, tensor: torch.Tensor, *, ranks: int, rank: int
) -> CanonicalKVCaches:
    """Do what vLLM's worker does with the KV memory of a model of equal layers."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=ranks,
            rank=rank,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
    )
    cache_config: Any = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS)],
    )
    caches: Any = dict.fromkeys(LAYERS, tensor)
    mappings = derive_canonical_mappings(config, cache_config, caches)
    page = spec.page_size_bytes
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((BLOCKS, page), dtype=torch.int8), page)],
        [[CanonicalKVCacheRef(0, page, mappings.get(layer)) for layer in LAYERS]],
    )


def heads_outermost(heads: int) -> torch.Tensor:
    return torch.zeros((BLOCKS, heads, BLOCK_TOKENS, 2 * HEAD_SIZE))


def tokens_outermost(heads: int) -> torch.Tensor:
    return torch.zeros((BLOCKS, BLOCK_TOKENS, heads, 2 * HEAD_SIZE)).transpose(1, 2)


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


def laid_out(
    config: KvtierConfig,
    spec: KVCacheSpec,
    tensor: torch.Tensor,
    *,
    ranks: int,
    rank: int,
    content: str = "layers",
) -> tuple[RankShare, LayoutFingerprint]:
    engine = facts(ranks, rank, spec.page_size_bytes)
    geometry, share = lay_out_slots(
        engine, config, register(spec, tensor, ranks=ranks, rank=rank), content=content
    )
    require_same_file(geometry, engine, config)
    return share, fingerprint(engine, config, geometry)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_outermost_give_every_number_of_ranks_the_same_store(
    config: KvtierConfig, ranks: int
) -> None:
    one = laid_out(config, attention(HEADS), heads_outermost(HEADS), ranks=1, rank=0)
    each = STRIPES // ranks
    for rank in range(ranks):
        heads = HEADS // ranks
        share, stored_as = laid_out(
            config, attention(heads), heads_outermost(heads), ranks=ranks, rank=rank
        )
        assert share.stripes == tuple(range(rank * each, (rank + 1) * each))
        assert stored_as == one[1]


def test_layers_of_another_content_are_another_store(config: KvtierConfig) -> None:
    tensor = heads_outermost(HEADS)
    stores = {
        laid_out(config, attention(HEADS), tensor, ranks=1, rank=0, content=content)[
            1
        ].namespace()
        for content in ("fp8 and bf16", "bf16 and fp8")
    }
    assert len(stores) == 2


def test_our_own_description_of_such_pages_is_vllms() -> None:
    for ranks in (1, 2, 4, 8, 16):
        for rank in range(ranks):
            heads = max(HEADS // ranks, 1)
            caches = register(attention(heads), heads_outermost(heads), ranks=ranks, rank=rank)
            theirs = caches.group_data_refs[0][0].mapping
            assert theirs is not None
            ours = Model(heads=HEADS).mapping(rank, ranks)
            assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


def test_latent_attention_is_stored_once_for_all_ranks(config: KvtierConfig) -> None:
    tensor = torch.zeros((BLOCKS, BLOCK_TOKENS, 576), dtype=torch.bfloat16)
    one = laid_out(config, latent(), tensor, ranks=1, rank=0)
    share, stored_as = laid_out(config, latent(), tensor, ranks=4, rank=3)
    assert share == RankShare(tuple(range(STRIPES)), writers=4, writer=3)
    assert stored_as == one[1]


def test_tokens_outermost_bind_a_store_to_its_number_of_ranks_and_the_log_says_why(
    config: KvtierConfig, caplog: pytest.LogCaptureFixture
) -> None:
    one = laid_out(config, attention(HEADS), tokens_outermost(HEADS), ranks=1, rank=0)
    with caplog.at_level(logging.INFO, logger="vllm.kvtier.vllm.slots"):
        share, stored_as = laid_out(config, attention(4), tokens_outermost(4), ranks=2, rank=1)
    assert share == shard_of(1)
    assert stored_as != one[1]
    assert "--tensor-parallel-size 2 only: a rank's part of a page is not whole 8ths" in (
        caplog.text
    )


def test_memory_made_from_another_file_is_refused(config: KvtierConfig, tmp_path: Path) -> None:
    spec = attention(HEADS)
    engine = facts(1, 0, spec.page_size_bytes)
    caches = register(spec, heads_outermost(HEADS), ranks=1, rank=0)
    geometry, _ = lay_out_slots(engine, config, caches, content="layers")
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
        require_same_file(geometry, engine, other)
