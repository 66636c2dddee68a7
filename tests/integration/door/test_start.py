"""What a door refuses or warns of when it opens, and whose store it finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import (
    CapacityError,
    ConfigError,
    KvtierError,
    StoreLockedError,
    UnsupportedError,
)
from kvtier.memory import backing
from kvtier.memory.limits import HugePagePool
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm import manager as door_module
from kvtier.vllm import spec as spec_module
from kvtier.vllm.spec import KVTierConnectorSpec
from tests.integration.door.doors import (
    BLOCKS,
    PAGE_NBYTES,
    OpenDoor,
    Settings,
    fill_and_store,
    model,
    offloading_config,
)


def test_hashes_seeded_at_random_are_a_warning_at_the_first_request(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    door = open_door(settings())
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "drawn at random")
    warned: list[str] = []
    monkeypatch.setattr(door_module.logger, "warning", warned.append)
    door.request()
    door.request()
    assert len(warned) == 1
    assert "PYTHONHASHSEED" in warned[0]


@pytest.mark.parametrize("kind", [KVTierOffloadingSpec, KVTierConnectorSpec])
def test_the_specification_warns_once_that_a_forced_reset_ends_the_engine(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KVTierOffloadingSpec],
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(spec_module.logger, "warning", lambda text, *_: warned.append(text))
    door = open_door(settings(), kind)
    door.request()
    warnings = [text for text in warned if "reset_running_requests" in text]
    assert len(warnings) == (kind is KVTierOffloadingSpec)


def test_huge_pages_that_are_required_and_not_reserved_are_an_error_at_the_start(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings()
    path.write_text(path.read_text().replace("kind: ram", "kind: ram\n  huge_pages: require"))
    monkeypatch.setattr(backing, "huge_page_pool", lambda _: HugePagePool(2 << 20, 0, 0))
    with pytest.raises(CapacityError, match="huge_pages to auto"):
        open_door(path)


def test_metrics_can_be_switched_off(settings: Settings, open_door: OpenDoor) -> None:
    door = open_door(settings(extra="metrics:\n  enabled: false\n"))
    assert door.manager.get_stats() is None


def test_a_second_engine_on_the_store_is_refused_with_the_holders_pid(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings()
    open_door(path)
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        open_door(path)


def test_a_store_of_another_model_gets_its_own_namespace(
    settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    path = settings(ram=16, nvme=32, extra="  on_mismatch: remove\n")
    door = open_door(path)
    keys = fill_and_store(door, 50, 4)
    door.close()
    (first,) = tmp_path.glob("store/*/slots.bin")
    other = open_door(path, model=OffloadingModelConfig("other/model", "float32"))
    assert other.load(keys, list(range(4))) == []
    other.close()
    (second,) = tmp_path.glob("store/*/slots.bin")
    assert second != first, "there is room for one of them"


def test_only_layers_of_the_same_element_types_find_what_was_stored(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(extra="  own_process: false\n  on_mismatch: remove\n")
    door = open_door(path, held=("fp8", "auto"))
    keys = fill_and_store(door, 50, 1)
    door.close()
    again = open_door(path, held=("fp8", "auto"))
    assert again.load(keys, [0]) == [CacheHitSource.DISK]
    again.close()
    assert open_door(path, held=("auto", "fp8")).load(keys, [0]) == []


@pytest.mark.parametrize("kind", [KVTierOffloadingSpec, KVTierConnectorSpec])
def test_only_a_model_that_runs_with_the_same_settings_finds_what_was_stored(
    settings: Settings, open_door: OpenDoor, kind: type[KVTierOffloadingSpec]
) -> None:
    path = settings(extra="  own_process: false\n  on_mismatch: remove\n")
    long_rope = {"rope_parameters": {"rope_type": "longrope"}}
    door = open_door(path, kind, run_as={"hf_config": long_rope, "max_model_len": 512})
    keys = fill_and_store(door, 50, 1)
    door.close()
    again = open_door(path, kind, run_as={"hf_config": long_rope, "max_model_len": 512})
    assert again.load(keys, [0]) == [CacheHitSource.DISK]
    again.close()
    longer = open_door(path, kind, run_as={"hf_config": long_rope, "max_model_len": 1024})
    assert longer.load(keys, [0]) == []


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"pp_size": 2, "world_size": 2}, UnsupportedError, "tensor parallelism only"),
        ({"canonical_layout": True}, UnsupportedError, "canonical_layout"),
        ({"kv_cache_layout": "LHBNC"}, UnsupportedError, "KV_CACHE_LAYOUT=LBHNC"),
        ({"worker_kv_bytes_per_block": 0}, UnsupportedError, "no KV cache"),
        ({"cache": OffloadingCacheConfig(32, 2)}, ConfigError, "kvtier vllm-args"),
        ({"extra_config": {}}, ConfigError, "kvtier_config"),
        ({"worker_kv_bytes_per_block": 1 << 30}, ConfigError, "smaller than one chunk"),
    ],
)
def test_what_kvtier_cannot_serve_is_refused_at_start(
    settings: Settings, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        KVTierOffloadingSpec(offloading_config(settings(), **changes))


@pytest.mark.parametrize("kind", [KVTierOffloadingSpec, KVTierConnectorSpec])
@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel_size": 2, "data_parallel_index": 0},
        {"data_parallel_size": 2, "data_parallel_index": 1},
        {"engine_id": "some-name_dp0"},
        {"data_parallel_index": 1},
    ],
)
def test_no_rank_of_several_starts_with_a_path_that_all_would_share(
    settings: Settings,
    kind: type[KVTierOffloadingSpec],
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    path = settings()
    with pytest.raises(ConfigError) as caught:
        kind(offloading_config(path, **changes))
    assert str(caught.value).startswith(f"{path}:5: tiers[1].path = ")
    assert str(caught.value).endswith(f"; write {tmp_path}/store/{{data_parallel_rank}}")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_ranks_of_one_file_find_their_own_stores_again(
    settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    path = settings(extra="  own_process: false\n")
    path.write_text(path.read_text().replace("/store", "/store-{data_parallel_rank}"))
    names = [f"door-{os.getpid()}-ranks_dp{rank}" for rank in range(2)]
    doors = [
        open_door(path, engine_id=name, data_parallel_index=rank)
        for rank, name in enumerate(names)
    ]
    first, second = (fill_and_store(door, 50 + 10 * rank, 2) for rank, door in enumerate(doors))
    for door in doors:
        door.close()
    assert len(list(tmp_path.glob("store-[01]/*/slots.bin"))) == 2
    again = open_door(path, engine_id=names[1], data_parallel_index=1)
    assert again.load(second, [0, 1]) == [CacheHitSource.DISK] * 2
    assert again.holds(0, 60)
    assert again.load(first, [2, 3]) == []


def two_groups(
    interval: int | None, *, window_block: int, window_dtype: torch.dtype = torch.int8
) -> tuple[Any, CanonicalKVCaches]:
    """Return vLLM's configuration of a model with a sliding window, and its KV memory."""
    layout = {"num_kv_heads": 1, "head_size": 16}
    kinds: list[Any] = [
        FullAttentionSpec(block_size=64, dtype=torch.int8, **layout),
        SlidingWindowSpec(
            block_size=window_block, sliding_window=40, dtype=window_dtype, **layout
        ),
    ]
    config = model(("auto", "auto"))
    config.cache_config.prefix_cache_retention_interval = interval
    for layer, kind in zip(
        config.compilation_config.static_forward_context.values(), kinds, strict=True
    ):
        layer.get_kv_cache_spec = lambda _, kind=kind: kind
    tensors = [torch.zeros((BLOCKS, PAGE_NBYTES), dtype=torch.int8) for _ in kinds]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, PAGE_NBYTES) for tensor in tensors],
        group_data_refs=[[CanonicalKVCacheRef(at, PAGE_NBYTES)] for at in range(len(kinds))],
    )
    return config, caches


def spec_of_two_groups(
    kind: type[KVTierOffloadingSpec], path: Path, *, window_block: int
) -> KVTierOffloadingSpec:
    """Return the specification of an engine with the model of :func:`two_groups`."""
    groups = (
        OffloadingGroupConfig(64, ("layer.0",), 0),
        OffloadingGroupConfig(window_block, ("layer.1",), 1),
    )
    return kind(offloading_config(path, groups=groups, cache=OffloadingCacheConfig(16, 1)))


def one_group(tensor: torch.Tensor) -> CanonicalKVCaches:
    """Return the KV memory of a worker whose model has one group, of one layer."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, PAGE_NBYTES)],
        group_data_refs=[[CanonicalKVCacheRef(0, PAGE_NBYTES)]],
    )


@pytest.fixture
def spec(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVTierOffloadingSpec]:
    """A specification in a worker's process, whose worker is ended after the test."""
    own = model(("auto",))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: own)
    groups = (OffloadingGroupConfig(32, ("layer.0",), 0),)
    opened = KVTierOffloadingSpec(offloading_config(settings(), groups=groups))
    yield opened
    if opened._worker is not None:
        opened._worker.shutdown()


def test_a_worker_is_never_given_the_kv_memory_of_another_engine(
    spec: KVTierOffloadingSpec,
) -> None:
    first, second = (torch.zeros((BLOCKS, PAGE_NBYTES), dtype=torch.int8) for _ in range(2))
    worker = spec.get_worker(one_group(first))
    assert spec.get_worker(one_group(first)) is worker
    with pytest.raises(UnsupportedError, match="start the engine in a new process"):
        spec.get_worker(one_group(second))


def test_a_scheduler_finds_the_memory_however_long_the_workers_warmed_up(
    spec: KVTierOffloadingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spec_module, "_MEET_TIMEOUT_S", 0.0)
        spec.get_worker(one_group(torch.zeros((BLOCKS, PAGE_NBYTES), dtype=torch.int8)))
    monkeypatch.setattr(spec_module, "_MEET_TIMEOUT_S", 10.0)
    spec.get_manager().shutdown()


def start_worker(
    spec: KVTierOffloadingSpec, caches: CanonicalKVCaches, *, refusal: str | None
) -> None:
    """Start a worker and end it; or, where there is a ``refusal``, see that it is refused."""
    if refusal is None:
        spec.get_worker(caches).shutdown()
        return
    with pytest.raises(UnsupportedError, match=refusal):
        spec.get_worker(caches)


@pytest.mark.parametrize(
    ("kind", "interval", "window_block", "refused"),
    [
        (KVTierOffloadingSpec, None, 16, True),
        (KVTierOffloadingSpec, 0, 16, False),
        (KVTierOffloadingSpec, None, 64, False),
        (KVTierConnectorSpec, None, 16, False),  # it is corrected there
    ],
)
def test_windows_of_which_chunks_would_be_stored_late_are_refused_at_start(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KVTierOffloadingSpec],
    interval: int | None,
    window_block: int,
    refused: bool,
) -> None:
    config, caches = two_groups(interval, window_block=window_block)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    spec = spec_of_two_groups(kind, settings(), window_block=window_block)
    start_worker(spec, caches, refusal=r"interval 0.*use KVTierConnector" if refused else None)


@pytest.mark.parametrize(
    ("kind", "is_second", "dtype", "refused"),
    [
        (KVTierOffloadingSpec, True, torch.float16, True),
        (KVTierOffloadingSpec, True, torch.int8, False),
        (KVTierOffloadingSpec, False, torch.float16, False),
        (KVTierConnectorSpec, True, torch.float16, False),  # it lets such stores fail
    ],
)
def test_a_runner_that_clears_blocks_before_it_asks_for_their_stores_is_refused(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KVTierOffloadingSpec],
    is_second: bool,
    dtype: torch.dtype,
    refused: bool,
) -> None:
    config, caches = two_groups(0, window_block=16, window_dtype=dtype)
    config.use_v2_model_runner = is_second
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    spec = spec_of_two_groups(kind, settings(), window_block=16)
    start_worker(
        spec, caches, refusal=r"use KVTierConnector.*MODEL_RUNNER=0" if refused else None
    )


@pytest.mark.parametrize(
    ("kind", "policy", "dtype", "refused"),
    [
        (KVTierOffloadingSpec, "priority", torch.float16, True),
        (KVTierOffloadingSpec, "priority", torch.int8, False),
        (KVTierOffloadingSpec, "fcfs", torch.float16, False),
        (KVTierConnectorSpec, "priority", torch.float16, False),  # it is told
    ],
)
def test_blocks_that_may_be_cleared_for_nobody_are_refused(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KVTierOffloadingSpec],
    policy: str,
    dtype: torch.dtype,
    refused: bool,
) -> None:
    config, caches = two_groups(0, window_block=16, window_dtype=dtype)
    config.scheduler_config = SimpleNamespace(policy=policy)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    spec = spec_of_two_groups(kind, settings(), window_block=16)
    start_worker(
        spec, caches, refusal=r"policy priority.*use KVTierConnector" if refused else None
    )


@pytest.mark.parametrize(
    ("kind", "guesses", "refused"),
    [
        (KVTierOffloadingSpec, 2, True),
        (KVTierOffloadingSpec, 1, False),
        (KVTierConnectorSpec, 2, False),  # it leaves such states out
    ],
)
def test_states_that_are_handed_over_too_late_are_refused(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KVTierOffloadingSpec],
    guesses: int,
    refused: bool,
) -> None:
    config, caches = two_groups(0, window_block=16)
    config.cache_config.mamba_cache_mode = "align"
    config.scheduler_config = SimpleNamespace(async_scheduling=True)
    config.num_speculative_tokens = guesses
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    spec = spec_of_two_groups(kind, settings(), window_block=16)
    start_worker(
        spec, caches, refusal=r"use KVTierConnector.*no-async-scheduling" if refused else None
    )


class Evicting(FullAttentionSpec):
    """A plugin's kind of full attention, whose manager gives blocks away amid a prompt."""


@pytest.mark.parametrize("kind", [KVTierOffloadingSpec, KVTierConnectorSpec])
def test_layers_that_keep_what_nobody_has_read_are_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: type[KVTierOffloadingSpec]
) -> None:
    config, caches = two_groups(0, window_block=16)
    odd = Evicting(block_size=64, num_kv_heads=1, head_size=16, dtype=torch.int8)
    layers = config.compilation_config.static_forward_context
    layers["layer.0"].get_kv_cache_spec = lambda _: odd
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    spec = spec_of_two_groups(kind, settings(), window_block=16)
    start_worker(spec, caches, refusal=r"layer\.0 keeps .*Evicting, which is no kind")


@pytest.mark.parametrize(("blocks_per_chunk", "warned"), [(1, False), (2, True)])
def test_states_in_chunks_of_several_blocks_are_warned_of(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    blocks_per_chunk: int,
    warned: bool,
) -> None:
    config, caches = two_groups(0, window_block=64)
    state = MambaSpec(
        block_size=64, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    layers = config.compilation_config.static_forward_context
    layers["layer.1"].get_kv_cache_spec = lambda _: state
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    told: list[str] = []
    monkeypatch.setattr(spec_module.logger, "warning", lambda text, *_: told.append(text))
    groups = tuple(OffloadingGroupConfig(64, (f"layer.{at}",), at) for at in range(2))
    path = settings(ram=64, extra=f"engine:\n  blocks_per_chunk: {blocks_per_chunk}\n")
    cache = OffloadingCacheConfig(64, blocks_per_chunk)
    spec = KVTierConnectorSpec(offloading_config(path, groups=groups, cache=cache))
    start_worker(spec, caches, refusal=None)
    assert any("write engine.blocks_per_chunk: 1" in text for text in told) is warned


def test_a_broken_file_is_refused_with_its_place(settings: Settings) -> None:
    path = settings(extra="placment:\n  write: through\n")
    with pytest.raises(KvtierError, match=r"kvtier\.yaml:\d+.*did you mean"):
        KVTierOffloadingSpec(offloading_config(path))
