"""One process after another: who calls meanwhile waits, is cancelled, or closes the tier."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, connection, process
from tests.unit.hosted_tier.hosting import DONE, FAILED, kill, let_no_host_end, opened

pytestmark = pytest.mark.usefixtures("forked_hosts")

Started = tuple[process.HostProcess, process.Opened]
Lose = Callable[[], Awaitable[None]]


def call_at_start(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> list[process.HostProcess]:
    """Have ``call`` made on the loop whenever a host has started; returns those hosts."""
    hosts: list[process.HostProcess] = []
    loop = asyncio.get_running_loop()
    start = process.HostProcess.start

    def start_and_call(options: TierConfig, context: TierContext) -> Started:
        found = start(options, context)
        hosts.append(found[0])
        loop.call_soon_threadsafe(call)
        return found

    monkeypatch.setattr(process.HostProcess, "start", start_and_call)
    return hosts


@pytest.fixture
def lose(hosts: list[process.HostProcess], monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Return a function that cuts the connection to the last host, which lives on."""

    async def cut() -> None:
        """Return when the engine knows that the connection is lost."""
        is_known = asyncio.Event()
        end = connection.Connection.connection_lost

        def note(own: connection.Connection, exc: Exception | None) -> None:
            end(own, exc)
            is_known.set()

        monkeypatch.setattr(connection.Connection, "connection_lost", note)
        hosts[-1].connection.shutdown(socket.SHUT_RDWR)
        await asyncio.wait_for(is_known.wait(), 10)

    return cut


async def test_a_host_is_not_started_before_the_last_one_let_go_of_the_store(
    harness: TierHarness[HostedTier], lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
    keys = make_keys([1])
    await harness.put(keys, [0])
    first = harness.tier.host_pid
    kill(harness.tier, signal.SIGSTOP)  # it has the store open until it is killed
    await lose()
    assert await harness.get(keys, [0]) == [DONE]
    assert harness.tier.host_pid != first


async def test_a_host_that_does_not_end_is_waited_for_once_and_not_replaced(
    harness: TierHarness[HostedTier],
    hosts: list[process.HostProcess],
    lose: Lose,
    pool: IoPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_no_host_end(monkeypatch, patience_s=0.05)
    keys = make_keys([1])
    await harness.put(keys, [0])
    (held,) = hosts
    await lose()
    for _ in range(2):
        assert await asyncio.wait_for(harness.get(keys, [0]), 10) == [FAILED]
        assert f"process {held.process.pid} is stuck in the operating" in harness.error
        monkeypatch.setattr(connection, "_END_TIMEOUT_S", 600)  # the wait is over
    await asyncio.wait_for(harness.tier.aclose(), 10)
    await pool.run(lambda: held.process.wait(10), priority=0)


async def test_a_stuck_host_is_logged_once(
    harness: TierHarness[HostedTier],
    lose: Lose,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = 0

    async def ends_at_last(ending: subprocess.Popen[bytes]) -> bool:
        nonlocal tries
        tries += 1
        return tries >= 4 and await process.aend(ending)

    monkeypatch.setattr(connection, "aend", ends_at_last)
    keys = make_keys([1])
    await harness.put(keys, [0])
    await lose()
    assert await harness.get(keys, [0]) == [DONE]
    assert tries == 4
    assert caplog.text.count("is stuck in the operating system") == 1


async def test_a_host_that_ends_after_all_is_replaced(
    harness: TierHarness[HostedTier], lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_no_host_end(monkeypatch, patience_s=0.05, until=(answers := asyncio.Event()))
    keys = make_keys([1])
    await harness.put(keys, [0])
    await lose()
    assert await harness.get(keys, [0]) == [FAILED]
    assert "is stuck in the operating system" in harness.error
    answers.set()
    async with asyncio.timeout(10):
        while await harness.get(keys, [0]) != [DONE]:
            assert "is stuck in the operating system" in harness.error


async def test_a_host_for_which_nobody_waits_any_more_serves_the_next_call(
    harness: TierHarness[HostedTier], lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    await lose()
    cancelled = asyncio.ensure_future(harness.get(keys, [0]))
    hosts = call_at_start(monkeypatch, cancelled.cancel)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await harness.get(keys, [0]) == [DONE]
    assert len(hosts) == 1


async def test_a_tier_that_is_closed_when_its_host_has_just_started_leaves_none_running(
    harness: TierHarness[HostedTier], lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: list[asyncio.Future[None]] = []
    keys = make_keys([1])
    await harness.put(keys, [0])
    await lose()
    hosts = call_at_start(
        monkeypatch, lambda: closing.append(asyncio.ensure_future(harness.tier.aclose()))
    )
    await harness.get(keys, [0])
    await closing[0]
    assert [host.process.returncode for host in hosts] == [0]


async def test_a_cancelled_connection_attempt_fails_no_other_call(
    options: NvmeTierConfig, context: TierContext
) -> None:
    tier = await opened(options, context)
    first = tier.host_pid
    connecting = asyncio.ensure_future(tier.aopen())
    await asyncio.sleep(0)
    while not connecting.done():
        connecting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await tier.aopen()
    await tier.reset()  # which is answered
    assert tier.host_pid == first
    await tier.aclose()
