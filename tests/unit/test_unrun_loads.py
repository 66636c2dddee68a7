"""Loads that the transfer engine cannot run: no worker waits for their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import parse_config
from kvtier.connector import storage
from kvtier.connector.service import CacheService
from kvtier.errors import ClosedError
from kvtier.keys import ChunkKey
from kvtier.manager import GroupReach, Prompt
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.types import Job, LayoutFingerprint
from tests.support.memory_tier import MemoryTier
from tests.support.threads import join_threads, loop_of
from tests.support.workbench import prefix
from tests.unit.regions import open_regions

SLOTS = 8
SLOT_NBYTES = 4096
CONFIG = """
tiers:
- {{kind: ram, capacity: 32KiB}}
- {{kind: nvme, path: {path}, capacity: 128KiB}}
placement: {{pin_budget: 100%}}
transfer: {{load_path: direct}}
"""


@dataclass(frozen=True)
class Context:
    req_id: str
    kv_transfer_params: None = None


class World:
    """A cache over real tiers, of which the slower is in memory."""

    def __init__(self, region: HostRegion, tiers: storage.Storage) -> None:
        self.engine = tiers.engine
        self.control = region.control
        self.service = CacheService(tiers, tokens_per_chunk=16, close_timeout_s=1.0)

    def store(self, name: str, keys: list[ChunkKey]) -> None:
        """Store chunks as one worker would, until they are in both tiers."""
        service = self.service
        service.begin_request(Context(name))
        plan = service.prepare_store(keys, name)
        assert plan is not None
        assert len(plan.keys) == len(keys)
        self.control.set_generation(0, plan.slots, plan.generation)
        self.control.acknowledge(0, plan.slots)
        service.complete_store(keys, Context(name))
        service.end_request(Context(name))
        for _ in range(4):
            service.end_step(started=(), preempted=())
            assert self.engine.wait_any(timeout_s=10)
        assert not service.statistics().tiers[0].dropped_chunks

    def lookup(self, name: str, keys: list[ChunkKey]) -> int | None:
        self.service.begin_request(Context(name))
        return self.service.lookup(name, Prompt([keys], 0, 16 * len(keys)))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    config = parse_config(CONFIG.format(path=tmp_path / "store"), source="test")
    with open_regions() as open_region:
        region = open_region(RegionGeometry(SLOTS, SLOT_NBYTES, SLOT_NBYTES, 1))
        tiers = storage.open_storage(
            config,
            region,
            LayoutFingerprint({}),
            tokens_per_chunk=16,
            groups=[GroupReach(16)],
            record_events=False,
        )
        world = World(region, tiers)
        yield world
        world.service.shutdown()


def fill(world: World) -> tuple[list[ChunkKey], list[ChunkKey]]:
    """Store twice as much as RAM holds; return the oldest chunks and the newest."""
    for number in range(4):
        world.store(f"w{number}", prefix(SLOTS // 2, of=number))
    return prefix(SLOTS // 2), prefix(SLOTS // 2, of=3)


def test_a_load_whose_job_cannot_be_submitted_fails_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = fill(world)

    def fail(*jobs: Job) -> None:
        raise ClosedError("its thread died")

    monkeypatch.setattr(world.engine, "submit", fail)
    assert world.lookup("c", old) == 16 * len(old)
    plan = world.service.prepare_load(old, "c")
    whole, lost = world.control.arrivals(0, plan.slots, plan.generations)
    assert not any(whole)
    assert all(lost), "workers wait for chunks that nobody brings"
    world.control.record_failed_loads(0, plan.slots, plan.generations)
    world.control.acknowledge(0, plan.slots)
    world.service.complete_load(old, Context("c"))
    assert world.service.statistics().internal_errors == 1


def test_after_the_engines_thread_died_what_only_slower_tiers_have_is_a_miss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = fill(world)

    def die() -> Any:
        raise SystemExit("a test")

    loop_of(world.engine).call_soon_threadsafe(die)
    join_threads("kvtier-storage")
    assert world.lookup("c", old) == 0
    assert world.lookup("d", new) == 16 * len(new)
    nvme = world.service.statistics().tiers[1]
    assert nvme.out_of_service
    assert "its thread died" in caplog.text
