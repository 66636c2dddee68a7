"""Opening an engine's tiers when something fails on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier.config import KvtierConfig, TierConfig, parse_config
from kvtier.connector import storage
from kvtier.connector.service import CacheService
from kvtier.errors import CapacityError, ClosedError
from kvtier.manager import GroupReach
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.testing.tier_harness import make_keys
from kvtier.tiers.base import TierContext
from kvtier.types import Job, LayoutFingerprint, Outcome, Purpose
from tests.support.memory_tier import MemoryTier
from tests.unit.regions import open_regions

SLOT_NBYTES = 4096


def open_storage(config: KvtierConfig, region: HostRegion) -> storage.Storage:
    return storage.open_storage(
        config,
        region,
        LayoutFingerprint({}),
        tokens_per_chunk=16,
        groups=[GroupReach(16)],
        record_events=False,
    )


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with open_regions() as open_region:
        yield open_region(RegionGeometry(4, SLOT_NBYTES, SLOT_NBYTES, 1))


def test_when_the_engine_cannot_start_every_tier_is_closed_whatever_one_of_them_does(
    region: HostRegion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []
    disk_answers = threading.Event()

    async def aclose(tier: MemoryTier) -> None:
        if tier.name == "hangs":
            disk_answers.wait(10)
        closed.append(tier.name)
        if tier.name == "raises":
            raise OSError(5, "no")

    def fail(*_: object, **__: object) -> None:
        raise ClosedError("cannot start")

    monkeypatch.setattr(MemoryTier, "aclose", aclose)
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    monkeypatch.setattr(storage, "TransferEngine", fail)
    names = ("raises", "hangs", "last")
    tiers = [
        f"- {{kind: nvme, name: {name}, path: {tmp_path / name}, capacity: 1MiB}}\n"
        for name in names
    ]
    text = "tiers:\n- {kind: ram, capacity: 1MiB}\n" + "".join(tiers)
    config = parse_config(text + "transfer: {close_timeout: 500ms}\n", source="test")
    before = set(threading.enumerate())
    with pytest.raises(ClosedError, match="cannot start"):
        open_storage(config, region)
    assert sorted(closed) == ["last", "raises"]
    assert "tier raises: not closed" in caplog.text
    assert "tier hangs: not closed within 0.5 s" in caplog.text
    disk_answers.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert "hangs" in closed


def test_the_figures_have_recovered_chunks_and_the_place_of_each_store(
    region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(zip(make_keys(range(3)), range(3), strict=True))
    monkeypatch.setattr(MemoryTier, "recovered", lambda _: found)
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    tier = f"- {{kind: nvme, path: {tmp_path / 'nvme'}, capacity: 1MiB}}\n"
    config = parse_config("tiers:\n- {kind: ram, capacity: 1MiB}\n" + tier, source="test")
    fingerprint = LayoutFingerprint({"model": "m"})
    opened = storage.open_storage(
        config,
        region,
        fingerprint,
        tokens_per_chunk=16,
        groups=[GroupReach(16)],
        record_events=False,
    )
    service = CacheService(opened, tokens_per_chunk=16, close_timeout_s=10)
    figures = service.statistics()
    service.shutdown()
    assert [tier.recovered_chunks for tier in figures.tiers] == [0, 3]
    assert figures.stores == [
        ("ram", "ram", fingerprint.namespace(), ""),
        ("nvme", "nvme", fingerprint.namespace(), f"{tmp_path}/nvme"),
    ]


def test_an_io_call_that_does_not_end_is_logged_when_the_storage_closes(
    region: HostRegion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    tier = f"- {{kind: nvme, path: {tmp_path / 'nvme'}, capacity: 1MiB}}\n"
    config = parse_config("tiers:\n- {kind: ram, capacity: 1MiB}\n" + tier, source="test")
    opened = open_storage(config, region)
    (pool,) = opened.pools
    began, gate = threading.Event(), threading.Event()

    def stick() -> None:
        began.set()
        gate.wait(10)

    sticking = threading.Thread(target=lambda: asyncio.run(pool.run(stick, priority=0)))
    sticking.start()
    assert began.wait(10)
    assert opened.engine.close(timeout_s=10)
    opened.close(timeout_s=0.01)
    assert "threads kvtier-io-nvme: their I/O calls did not end in time" in caplog.text
    gate.set()
    sticking.join(10)
    assert pool.close(timeout_s=10)


def test_an_engine_that_is_allowed_no_thread_closes_its_tiers_and_says_why(
    region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def aclose(tier: MemoryTier) -> None:
        closed.append(tier.name)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def open_last(options: TierConfig, context: TierContext) -> MemoryTier:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        return MemoryTier.open(options, context)

    monkeypatch.setattr(MemoryTier, "aclose", aclose)
    monkeypatch.setattr(storage, "open_tier", open_last)
    tier = f"- {{kind: nvme, path: {tmp_path / 'nvme'}, capacity: 1MiB}}\n"
    config = parse_config("tiers:\n- {kind: ram, capacity: 1MiB}\n" + tier, source="test")
    with pytest.raises(CapacityError, match=r"kvtier-storage cannot be started.*pids\.max"):
        open_storage(config, region)
    assert closed == ["nvme"]


def test_a_tier_that_hangs_takes_no_thread_of_another_tier(
    region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: dict[str, MemoryTier] = {}

    def open_tier(options: TierConfig, context: TierContext) -> MemoryTier:
        tiers[options.name] = MemoryTier.open(options, context)
        return tiers[options.name]

    monkeypatch.setattr(storage, "open_tier", open_tier)
    names = ("hangs", "healthy")
    text = "".join(
        f"- {{kind: nvme, name: {name}, path: {tmp_path / name}, capacity: 1MiB}}\n"
        for name in names
    )
    config = parse_config(
        f"tiers:\n- {{kind: ram, capacity: 1MiB}}\n{text}transfer: {{io_threads: 1}}\n",
        source="test",
    )
    opened = open_storage(config, region)
    region.control.publish([0], [1])
    disk_answers = tiers["hangs"].medium.stall([0])
    keys = make_keys(range(1))
    for number, name in enumerate(names):
        job = Job(number, Purpose.DEMOTE, "ram", name, keys, [0], [0], 30.0, payload=[1])
        opened.engine.submit(job)
    try:
        assert opened.engine.wait([1], timeout_s=5)
        assert [result.outcomes for result in opened.engine.poll()] == [(Outcome.DONE,)]
    finally:
        disk_answers.set()
        opened.close(timeout_s=10)


def test_a_store_retains_no_more_than_the_quota_and_the_longest_first(
    region: HostRegion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = list(zip(make_keys(range(4)), range(4), strict=True))
    later = int(datetime.now(UTC).timestamp()) + 3600
    asked = {slot: later + slot for slot in range(4)}
    monkeypatch.setattr(MemoryTier, "recovered", lambda _: found)
    monkeypatch.setattr(MemoryTier, "retained", lambda _: asked)
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    config = parse_config(
        "tiers:\n- {kind: ram, capacity: 1MiB}\n"
        f"- {{kind: nvme, path: {tmp_path / 'store'}, capacity: 16KiB, retain_quota: 50%}}\n",
        source="test",
    )
    opened = open_storage(config, region)
    try:
        assert "2 of 4 chunks to retain exceed retain_quota" in caplog.text
        assert opened.manager.snapshot().tiers[1].held == 2
        opened.manager.end_step(now=time.monotonic() + 3599)
        assert opened.manager.snapshot().tiers[1].held == 2
        opened.manager.end_step(now=time.monotonic() + 3700)
        assert opened.manager.snapshot().tiers[1].held == 0
    finally:
        opened.close(timeout_s=10)
