"""What kvtier takes for a block is all that the block holds, or the memory is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.pages import find_pages
from kvtier.vllm.refusals import refuse_layout
from tests.demo.scenario import store_yaml
from tests.integration.test_portable_slots import facts

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
    memory = find_pages(caches, config, engine.group_ids)
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
