"""Blocks in memory that vLLM laid out itself: what is part of a block, and of a slot."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvtier.config import load_config
from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import plan_copy
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.pages import SlotShape, find_pages, share_slots
from kvtier.vllm.refusals import refuse_layout
from tests.demo.scenario import store_yaml
from tests.integration.test_portable_slots import facts
from tests.unit.regions import open_regions

BLOCKS = 8
LAYOUTS = tuple(layout.name for layout in KVCacheLayout)
APART = "LHBNC"
INTERLEAVED = tuple(layout for layout in LAYOUTS if layout.startswith("B"))
COMMON: dict[str, Any] = {"block_size": 4, "head_size": 4, "dtype": torch.float32}


def attention(**changes: Any) -> KVCacheSpec:
    return FullAttentionSpec(**(COMMON | {"num_kv_heads": 2} | changes))


def window() -> KVCacheSpec:
    return SlidingWindowSpec(**COMMON, num_kv_heads=2, sliding_window=8)


def latent(**changes: Any) -> KVCacheSpec:
    return MLAAttentionSpec(**(COMMON | {"num_kv_heads": 1} | changes))


def state(**changes: Any) -> KVCacheSpec:
    shape: dict[str, Any] = {"shapes": ((16,),), "dtypes": (torch.float32,)}
    return MambaSpec(**({"block_size": 4, "mamba_cache_mode": "align"} | shape | changes))


def several(**specs: KVCacheSpec) -> KVCacheSpec:
    return UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)


MODELS: dict[str, list[KVCacheGroupSpec]] = {
    "one layer": [KVCacheGroupSpec(["a"], attention())],
    "several": [KVCacheGroupSpec(["a", "b", "c"], attention())],
    "windows": [
        KVCacheGroupSpec(["a", "b"], attention()),
        KVCacheGroupSpec(["c", "d"], window()),
    ],
    "a longer group": [
        KVCacheGroupSpec(["a"], attention()),
        KVCacheGroupSpec(["b", "c", "d"], window()),
    ],
    "latent": [KVCacheGroupSpec(["a", "b"], latent())],
    "padded": [KVCacheGroupSpec(["a", "b"], latent(block_stride_alignment=48))],
    "indexers": [
        KVCacheGroupSpec(
            ["a", "b", "c", "d"],
            several(a=latent(), b=latent(head_size=2), c=latent(), d=latent(head_size=2)),
        )
    ],
    "states": [KVCacheGroupSpec(["a", "b", "c"], state())],
    "hybrid": [
        KVCacheGroupSpec(["a"], attention()),
        KVCacheGroupSpec(["b", "c"], state(page_size_padded=256)),
    ],
}


def config_of(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> KVCacheConfig:
    """Let vLLM place the layers of ``groups`` in its KV memory."""
    vllm: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=0,
            num_gpu_blocks_override=None,
        ),
    )
    nbytes = kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)
    return kv_cache_utils.get_kv_cache_config_from_groups(vllm, groups, nbytes * BLOCKS)


def engine_of(config: KVCacheConfig, layout: str) -> EngineFacts:
    names = [tuple(group.layer_names) for group in config.kv_cache_groups]
    return dataclasses.replace(
        facts(1, 0, 1),
        groups=tuple((4, each) for each in names),
        group_ids=tuple(range(len(names))),
        kv_layout=layout,
        worker_kv_bytes_per_block=config.kv_cache_tensors[0].size // config.num_blocks,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_block_that_was_stored_is_loaded_whole_into_another_and_nowhere_else(
    tmp_path: Path, model: str, layout: str
) -> None:
    groups = MODELS[model]
    try:
        config = config_of(groups, KVCacheLayout[layout])
    except (AssertionError, ValueError) as refusal:
        pytest.skip(f"vLLM has no such memory: {refusal}")
    device, sizes = torch.device("cpu"), [4] * len(groups)
    caches = allocate_kv_cache(config, device, KVCacheLayout[layout], sizes)
    engine = engine_of(config, layout)
    file = store_yaml(
        tmp_path / "kvtier.yaml",
        store=tmp_path / "store",
        ram_nbytes=1 << 26,
        nvme_nbytes=1 << 26,
        blocks_per_chunk=2,
    )
    if layout == APART:  # even where heads are one or none
        with pytest.raises(UnsupportedError, match="KV_CACHE_LAYOUT=LBHNC"):
            refuse_layout(engine, load_config(file))
        return
    refuse_layout(engine, load_config(file))
    memory = find_pages(caches, config, engine.group_ids, layout)
    for group, pages in zip(groups, memory.groups, strict=True):
        views = [caches[name] for name in group.layer_names]
        for view in views:
            view.copy_(torch.randint(-100, 100, view.shape))
        before = [view.clone() for view in views]
        for tensor, nbytes in pages:
            rows = memory.tensors[tensor][:, :nbytes]
            rows[5] = rows[3]
        for view, was in zip(views, before, strict=True):
            was[5] = was[3]
            assert torch.equal(view, was)


HEADS, LAYERS = 4, ("a", "b", "c")


class Rank:
    """One rank's KV memory of a model with ``HEADS`` heads.

    Args:
        layout: The order of the dimensions.
        ranks: Number of ranks.
        rank: Number of this rank.
    """

    def __init__(self, layout: str, ranks: int, rank: int) -> None:
        heads = max(HEADS // ranks, 1)
        config = config_of(
            [KVCacheGroupSpec(list(LAYERS), attention(num_kv_heads=heads))],
            KVCacheLayout[layout],
        )
        views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], [4])
        first = rank * HEADS // ranks
        self.views = {
            layer: (view, slice(first, first + heads)) for layer, view in views.items()
        }
        self.kv: KVBlocks = find_pages(views, config, (0,), layout)
        vllm: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=ranks, world_size=ranks, rank=rank
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        )
        self.shape: SlotShape = share_slots(vllm, config, views, self.kv, (0,), layout)

    def copy(self, region: HostRegion, blocks: list[int], *, way: str) -> None:
        """Store ``blocks`` as the chunk in slot 1, or load them from it."""
        plan = plan_copy(blocks, [2], [0], [1], blocks_per_chunk=2)
        copier = BlockCopier(self.kv, region, share=self.shape.share, blocks_per_chunk=2)
        getattr(copier, way)(plan, after=None)
        copier.close()


def whole_model() -> dict[str, torch.Tensor]:
    """Return the KV of all heads, in vLLM's logical order: blocks, heads, tokens, content."""
    shape = (len(LAYERS), BLOCKS, HEADS, 4, 8)
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    return dict(zip(LAYERS, numbers, strict=True))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC"])
def test_chunks_that_one_number_of_ranks_stores_load_with_every_other_number(
    layout: str,
) -> None:
    whole, contents = whole_model(), set()
    with open_regions() as open_region:
        for ranks in (1, 2, 4, 8):
            members = [Rank(layout, ranks, rank) for rank in range(ranks)]
            nbytes = members[0].shape.block_nbytes
            region = open_region(RegionGeometry(4, 2 * nbytes, nbytes, ranks))
            for member in members:
                assert member.shape.is_portable
                for layer, (view, heads) in member.views.items():
                    view.copy_(whole[layer][:, heads])
                member.copy(region, [5, 3], way="store")
            contents.add(bytes(region.slot(1)))
            for member in members:
                for view, _ in member.views.values():
                    view.zero_()
                member.copy(region, [2, 7], way="load")
                for layer, (view, heads) in member.views.items():
                    assert torch.equal(view[[2, 7]], whole[layer][[5, 3], heads])
    assert len(contents) == 1


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_tokens_outside_heads_bind_a_slot_to_its_number_of_ranks(layout: str) -> None:
    assert not Rank(layout, 2, 0).shape.is_portable


ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""What vLLM considers, in this order, where no attention backend declares anything."""


@pytest.mark.parametrize(
    ("device", "model", "allowed", "layout", "warned"),
    [
        ("cuda", "windows", ANY, "BHLNC", False),
        ("cuda", "hybrid", ANY, "LBHNC", False),
        ("cpu", "windows", ["LBHNC"], "LBHNC", False),
        ("cpu", "hybrid", ["LBHNC"], "LBHNC", False),
        ("cuda", "windows", ["LBHNC", "BLHNC"], "LBHNC", True),  # FlashInfer on Blackwell
    ],
)
def test_vllm_takes_the_layout_that_kvtier_asks_for(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    model: str,
    allowed: list[str],
    layout: str,
    warned: bool,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(backend_utils.logger, "warning_once", warnings.append)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    config: Any = SimpleNamespace(
        cache_config=CacheConfig(),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_hybrid=model == "hybrid"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.vllm",
            kv_role="kv_both",
        ),
    )
    specs = [group.kv_cache_spec for group in MODELS[model]]
    assert backend_utils.resolve_kv_cache_layout(config, [allowed], specs).name == layout
    assert bool(warnings) is warned
