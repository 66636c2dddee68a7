"""How a tier in a process of its own is closed, also when either process is dead or hangs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, client, process
from tests.unit.hosted_tier.hosting import CAPACITY, DONE, FAILED, kill, let_no_host_end, opened

pytestmark = pytest.mark.usefixtures("forked_hosts")


async def test_drops_and_uses_arrive_before_the_store_is_closed(
    harness: TierHarness[HostedTier],
) -> None:
    keys = make_keys(range(3))
    await harness.put(keys, range(3))
    harness.tier.touch([0])
    harness.tier.forget([1])
    assert await harness.reopen() == [(keys[2], 2), (keys[0], 0)]


async def test_closing_does_not_wait_until_a_host_that_hangs_took_what_it_was_sent(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
    kill(harness.tier, signal.SIGSTOP)
    for _ in range(200):
        harness.tier.touch([*range(CAPACITY)] * 64)
    await asyncio.wait_for(harness.tier.aclose(), 10)
    assert harness.tier.host_pid is not None
    with pytest.raises(ProcessLookupError):
        kill(harness.tier, signal.SIGKILL)


async def test_a_host_that_is_killed_while_it_closes_loses_nothing_that_was_committed(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(range(3))
    assert await harness.put(keys, range(3)) == [DONE] * 3
    with monkeypatch.context() as patch:
        patch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
        patch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
        kill(harness.tier, signal.SIGSTOP)
        await harness.tier.aclose()
    assert sorted(await harness.open()) == sorted(zip(keys, range(3), strict=True))
    assert await harness.get(keys, range(3)) == [DONE] * 3


async def test_a_host_has_time_to_end_also_when_the_engines_threads_are_gone(
    options: NvmeTierConfig, context: TierContext, hosts: list[process.HostProcess]
) -> None:
    pool = IoPool(1, name="kvtier-own")
    tier = await opened(options, replace(context, pool=pool))
    await tier.aopen()
    assert await context.pool.run(lambda: pool.close(timeout_s=10), priority=0)
    await tier.aclose()
    assert [host.process.returncode for host in hosts] == [0]


async def test_closing_does_not_wait_for_a_host_that_the_operating_system_holds_on_to(
    harness: TierHarness[HostedTier],
    hosts: list[process.HostProcess],
    pool: IoPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_no_host_end(monkeypatch, patience_s=0.01)
    await asyncio.wait_for(harness.tier.aclose(), 10)
    (held,) = hosts
    await pool.run(lambda: held.process.wait(10), priority=0)


async def test_a_close_that_is_cancelled_is_finished_by_the_next(
    options: NvmeTierConfig, context: TierContext, hosts: list[process.HostProcess]
) -> None:
    tier = await opened(options, context)
    closing = asyncio.ensure_future(tier.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await tier.aclose()
    assert [host.process.returncode for host in hosts] == [0]


def test_slots_can_be_forgotten_and_used_after_the_loop_was_closed(
    options: NvmeTierConfig, context: TierContext
) -> None:
    tier = HostedTier.open(options, context)

    async def use() -> None:
        await tier.aopen()
        await tier.aclose()

    asyncio.run(use())
    tier.forget([0])
    tier.touch([0])


async def test_a_host_that_starts_again_too_late_is_ended(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[process.HostProcess] = []
    start = process.HostProcess.start

    def close_meanwhile(
        options: TierConfig, context: TierContext
    ) -> tuple[process.HostProcess, process.Opened]:
        found = start(options, context)
        started.append(found[0])
        asyncio.run_coroutine_threadsafe(harness.tier.aclose(), loop).result(10)
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(process.HostProcess, "start", close_meanwhile)
    keys = make_keys([1])
    await harness.put(keys, [0])
    kill(harness.tier, signal.SIGKILL)
    while not started:
        assert await harness.get(keys, [0]) == [FAILED]
    assert "is closed" in harness.error
    assert started[0].process.returncode == 0


ENGINE = """
import os, sys, asyncio, signal
from pathlib import Path
from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import Arena, make_keys
from kvtier.testing.tier_harness import TierHarness
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, connection
from kvtier.tiers.hosted.frames import Batch, Frame
from kvtier.types import LayoutFingerprint

async def main():
    slot, capacity = 8192, 16
    arena, pool = Arena(), IoPool(2, name="engine")
    context = TierContext(
        slot, LayoutFingerprint({"model": "m"}), pool, piece_nbytes=slot, memory=arena.shared
    )
    options = NvmeTierConfig(
        path=Path(sys.argv[1]), capacity_bytes=capacity * slot, direct_io="off"
    )
    harness = TierHarness(lambda: HostedTier.open(options, context), pool, arena)
    await harness.open()
    await harness.put(make_keys(range(4)), range(4))
    asyncio.ensure_future(harness.put(make_keys(range(4, 12)), range(4, 12)))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_when_the_engine_is_killed_its_host_finishes_and_makes_way(
    options: NvmeTierConfig, context: TierContext
) -> None:
    command = [sys.executable, "-c", ENGINE, str(options.path)]
    engine = await context.pool.run(
        lambda: subprocess.run(command, check=False, timeout=60),
        priority=0,
    )
    assert engine.returncode == -signal.SIGKILL
    began_s = time.monotonic()
    tier = await opened(options, context)  # waits for the lock that the old host holds
    found = {key for key, _ in tier.recovered()}
    assert time.monotonic() - began_s < 9
    assert found >= set(make_keys(range(4)))
    await tier.aclose()
