"""kvtier's doors against the vLLM that is installed, and against one that differs a little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.errors import UnsupportedError
from kvtier.manager.events import ResidencyEvent
from kvtier.vllm import connector
from kvtier.vllm.compat import FULL_GROUPS
from kvtier.vllm.compat.layers import settle_layers
from kvtier.vllm.connector import KVTierConnector
from kvtier.vllm.manager import KVTierManager

NOTHING: Any = None
"""In place of configurations that nobody looks at before the check."""


def test_a_call_with_one_more_argument_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(
        self: object, request: object, num_computed_tokens: int, hint: object
    ) -> None: ...

    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", asked)
    with pytest.raises(UnsupportedError, match=r"KVTierConnector\.get_num_new_matched_tokens"):
        KVTierConnector(NOTHING, NOTHING, NOTHING)


def test_state_under_another_name_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "TransferJob", OffloadingConnectorMetadata)
    with pytest.raises(UnsupportedError, match="has no req_id, src_spec, dst_spec"):
        KVTierConnector(NOTHING, NOTHING, NOTHING)


def test_the_groups_of_a_hybrid_model_are_told_apart() -> None:
    common: Any = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**common)
    kinds = [SlidingWindowSpec(**common, sliding_window=32), full]
    kinds.append(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": full}))
    groups = [KVCacheGroupSpec(["layer.0"], kind) for kind in kinds]
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    transfer = SimpleNamespace(kv_connector_extra_config={"kvtier_config": "a.yaml"})
    told: Any = SimpleNamespace(kv_transfer_config=transfer)
    extra = connector._with_spec(told, config).kv_transfer_config.kv_connector_extra_config
    assert extra[FULL_GROUPS] == [1, 2]
    assert FULL_GROUPS not in transfer.kv_connector_extra_config


def test_events_say_which_of_several_slower_tiers() -> None:
    tiers = [SimpleNamespace(name=name) for name in ("ram", "fast", "large")]
    events = [ResidencyEvent(tier, [b"k" * 36], removed=False) for tier in range(3)]
    service: Any = SimpleNamespace(
        lookup=None,
        computing=None,
        computed=None,
        statistics=lambda: SimpleNamespace(tiers=tiers),
        take_events=lambda: events,
    )
    manager = KVTierManager(service, persistent=False, report_metrics=False)
    told = [(event.medium.name, event.ownership) for event in manager.take_events()]
    assert told == [("CPU", None), ("STORAGE", "fast"), ("STORAGE", "large")]


def test_scales_that_were_loaded_are_not_overwritten_by_the_first_pass() -> None:
    impl = object.__new__(TritonAttentionImpl)
    cache = torch.zeros((4, 2, 16, 2 * (64 + 4)), dtype=torch.int8)
    layer = SimpleNamespace(impl=impl, kv_cache=cache, kv_cache_dtype="int8_per_token_head")
    layers = SimpleNamespace(static_forward_context={"layer.0": layer})
    settle_layers(SimpleNamespace(compilation_config=layers))
    cache.fill_(7)  # as a load does
    impl._ensure_scale_caches(cache)  # as the first pass that computes attention does
    assert bool((cache == 7).all())
