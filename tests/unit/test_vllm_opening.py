"""The memory and the tiers of one engine, opened as its workers and its scheduler do."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kvtier.config import KvtierConfig, NvmeTierConfig, VllmEntryPoint, load_config
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.manager import GroupReach
from kvtier.memory import HostRegion
from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import RankShare
from kvtier.vllm import opening
from kvtier.vllm.opening import (
    offer_region,
    open_cache,
    open_device,
    read_settings,
    report_fragments,
    require_same_file,
)
from kvtier.vllm.pages import SlotShape
from tests.unit.test_vllm_content import FACTS

SHAPE = SlotShape(block_nbytes=1 << 14, share=RankShare(), is_portable=False)


def config(tmp_path: Path, ram: str = "1MiB") -> KvtierConfig:
    file = tmp_path / f"{ram}.yaml"
    file.write_text(
        f"tiers:\n- {{kind: ram, capacity: {ram}, huge_pages: 'off'}}\n"
        f"- {{kind: nvme, path: {tmp_path / 'store'}, capacity: 2MiB, own_process: false}}\n"
        "engine: {blocks_per_chunk: 4}\ntransfer: {load_path: direct}\n"
    )
    return load_config(file)


def test_the_scheduler_attaches_to_the_memory_of_its_workers(tmp_path: Path) -> None:
    settings = config(tmp_path)
    first = replace(FACTS, engine_id=f"opening-{tmp_path.name}", rank=0)
    created = offer_region(first, settings, SHAPE, content="layers")
    attached = offer_region(replace(first, rank=1), settings, SHAPE, content="layers")
    try:
        assert attached.geometry == created.geometry
        assert created.geometry.slots == 16
        cache = open_cache(first, settings, [GroupReach(first.chunk_tokens)])
        assert [tier.name for tier in cache.statistics().tiers] == ["ram", "nvme"]
        cache.shutdown()
    finally:
        attached.close()
        created.close()


def kv_of(page_nbytes: int) -> KVBlocks:
    return KVBlocks([torch.zeros((8, page_nbytes), dtype=torch.int8)], [[(0, page_nbytes)]])


def test_a_worker_copies_between_its_blocks_and_the_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = replace(FACTS, engine_id=f"device-{tmp_path.name}", rank=0, world_size=1)
    kv = kv_of(SHAPE.block_nbytes)
    with caplog.at_level(logging.INFO):
        device = open_device(engine, config(tmp_path), kv, SHAPE, content="layers")
    assert caplog.text.count("a copy moves ranges of 16.0 KiB (KV cache layout LBHNC)\n") == 1
    worker = ConnectorWorker(device, ram_name="ram")
    try:
        kv.tensors[0][0:4] = 7
        for purpose, blocks in (("store", range(4)), ("load", range(4, 8))):
            plan = device.plan(list(blocks), [4], [0], [2])
            start = device.store if purpose == "store" else device.load
            start(blocks.start, plan, [1])
            device.wait({blocks.start})
            (result,) = device.poll()
            assert result.is_whole, result.error
        assert bool((kv.tensors[0] == 7).all())
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("nbytes", "device", "layout", "advice"),
    [
        (8 << 10, "cpu", "LBHNC", ""),
        (64 << 10, "cuda", "LBHNC", ""),
        (8 << 10, "cuda", "LBHNC", "VLLM_KV_CACHE_LAYOUT=BHLNC, or BLHNC where"),
        (8 << 10, "cuda", "BHLNC", "start vLLM with a larger --block-size"),
    ],
)
def test_the_log_says_how_a_gpu_gets_longer_ranges(
    nbytes: int, device: str, layout: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        report_fragments(nbytes, device=device, layout=layout)
    assert ("are slower" in caplog.text) is bool(advice)
    assert advice in caplog.text


def test_memory_that_does_not_fit_the_slots_leaves_no_tier_behind(tmp_path: Path) -> None:
    engine = replace(FACTS, engine_id=f"misfit-{tmp_path.name}", rank=0, world_size=1)
    settings = config(tmp_path)
    for _ in range(2):  # the name of the memory is free again
        with pytest.raises(UnsupportedError):
            open_device(engine, settings, kv_of(1 << 20), SHAPE, content="layers")


def _fail(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("a bug")


def test_a_worker_that_cannot_measure_its_ranges_leaves_no_tier_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = replace(FACTS, engine_id=f"ranges-{tmp_path.name}", rank=0, world_size=1)
    monkeypatch.setattr(opening, "fragment_nbytes", _fail)
    for _ in range(2):  # the name of the memory is free again
        with pytest.raises(ZeroDivisionError):
            open_device(engine, config(tmp_path), kv_of(8), SHAPE, content="layers")


def test_a_cache_that_cannot_start_unlocks_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two ranks, because this scheduler attaches twice.
    engine = replace(FACTS, engine_id=f"cache-{tmp_path.name}", rank=0, world_size=2)
    settings = config(tmp_path)
    groups = [GroupReach(engine.chunk_tokens)]
    region = offer_region(engine, settings, SHAPE, content="layers")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(opening, "CacheService", _fail)
            with pytest.raises(ZeroDivisionError):
                open_cache(engine, settings, groups)
        open_cache(engine, settings, groups).shutdown()
    finally:
        region.close()


def test_required_gds_reads_without_a_gpu_leave_no_tier_behind(tmp_path: Path) -> None:
    engine = replace(FACTS, engine_id=f"gds-{tmp_path.name}", rank=0, world_size=1)
    settings = config(tmp_path)
    nvme = NvmeTierConfig(path=tmp_path / "store", capacity_bytes=1 << 20, gds="require")
    settings = settings.model_copy(update={"tiers": (settings.ram, nvme)})
    for _ in range(2):  # the name of the memory is free again
        with pytest.raises(UnsupportedError, match=r"gds: require, .* not on a GPU"):
            open_device(engine, settings, kv_of(SHAPE.block_nbytes), SHAPE, content="layers")


def test_memory_from_another_file_is_refused(tmp_path: Path) -> None:
    engine = replace(FACTS, engine_id=f"other-{tmp_path.name}", rank=0, world_size=1)
    region: HostRegion = offer_region(engine, config(tmp_path), SHAPE, content="layers")
    try:
        require_same_file(region.geometry, engine, config(tmp_path))
        with pytest.raises(UnsupportedError, match="must read the same configuration file"):
            open_cache(engine, config(tmp_path, "2MiB"), [GroupReach(engine.chunk_tokens)])
    finally:
        region.close()


def test_a_tier_that_is_smaller_than_all_ranks_chunk_is_refused(tmp_path: Path) -> None:
    engine = replace(FACTS, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="smaller than one chunk"):
        offer_region(engine, config(tmp_path, "8KiB"), SHAPE, content="layers")


@pytest.mark.parametrize(("entry_point", "path"), [("connector", "direct"), ("spec", "staged")])
def test_an_engine_reads_the_file_that_vllm_names(
    tmp_path: Path, entry_point: str, path: str
) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: [{kind: ram, capacity: 1MiB}]\n")
    engine = replace(FACTS, extra_config={"kvtier_config": str(file)})
    settings = read_settings(engine, VllmEntryPoint(entry_point))
    assert settings.transfer.load_path == path
    with pytest.raises(ConfigError, match=f"vllm-args FILE --entry-point {entry_point}`"):
        read_settings(FACTS, VllmEntryPoint(entry_point))
