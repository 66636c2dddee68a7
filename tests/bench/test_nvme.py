"""Promotion and demotion through a real store on this machine's disk; ``nox -s bench``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.iopool import IoPool
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.transfer import FromTier, ToTier
from kvtier.types import Job, LayoutFingerprint, Outcome, Why

WORKING_SET_NBYTES = 512 << 20


@pytest.fixture(params=[128 << 10, 512 << 10, 2 << 20], ids=["128KiB", "512KiB", "2MiB"])
def chunk_nbytes(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def region(chunk_nbytes: int) -> Iterator[HostRegion]:
    slots = WORKING_SET_NBYTES // chunk_nbytes
    geometry = RegionGeometry(slots, chunk_nbytes, chunk_nbytes, 1)
    region = HostRegion.create(f"bench-{os.getpid()}", geometry, attachers=0, timeout_s=1)
    for slot in range(slots):
        region.slot(slot)[:] = os.urandom(chunk_nbytes)
    yield region
    region.close()


@pytest.mark.parametrize("why", [Why.DEMOTE, Why.PROMOTE], ids=["store", "promote"])
def test_nvme(
    benchmark: Callable[..., object],
    tmp_path: Path,
    region: HostRegion,
    chunk_nbytes: int,
    why: Why,
) -> None:
    """Move the working set in jobs of 64 MB; the report divides its bytes by the time."""
    slots = list(range(region.geometry.slots))
    step = max(64_000_000 // chunk_nbytes, 1)
    batches = [slots[at : at + step] for at in range(0, len(slots), step)]
    pool = IoPool(4, name="kvtier-bench")
    tier = SlabTier.open(
        NvmeTierConfig(path=tmp_path, capacity_bytes=WORKING_SET_NBYTES),
        TierContext(chunk_nbytes, LayoutFingerprint({"bench": 1}), pool),
    )
    routes = {Why.DEMOTE: ToTier(region, tier), Why.PROMOTE: FromTier(region, tier)}

    def job(number: int, batch: list[int], why: Why) -> Job:
        keys = [slot.to_bytes(36, "big") for slot in batch]
        return Job(number, why, "ram", "nvme", keys, batch, batch, 60.0)

    async def move(why: Why) -> None:
        for number, batch in enumerate(batches):
            moved = await routes[why].run(job(number, batch, why))
            assert set(moved.outcomes) == {Outcome.DONE}

    with asyncio.Runner() as runner:
        runner.run(move(Why.DEMOTE))
        benchmark.pedantic(  # type: ignore[attr-defined]
            lambda: runner.run(move(why)), rounds=5
        )
        runner.run(tier.aclose())
    assert pool.close(timeout_s=10)
    seconds: float = benchmark.stats.stats.median  # type: ignore[attr-defined]
    benchmark.extra_info["MB/s"] = round(WORKING_SET_NBYTES / seconds / 1e6)  # type: ignore[attr-defined]
