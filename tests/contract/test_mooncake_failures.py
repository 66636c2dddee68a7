"""The Mooncake tier while the master or the other host is stopped, killed or started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvtier.config import parse_tier
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.shared import SharedContext
from kvtier.tiers.shared.mooncake import MooncakeTier
from kvtier.types import Outcome

pytest.importorskip("mooncake", reason="Mooncake has no wheel for this platform")

from tests.support.mooncake_service import MooncakeService, free_port, kill, running_service

DONE, MISSING, REFUSED = Outcome.DONE, Outcome.MISSING, Outcome.REFUSED
PAYLOAD_NBYTES = 1 << 20
LENT_NBYTES = 96 << 20
CALL_S = 40.0
"""Longest time of a call: some seconds on an idle machine."""
RECOVERY_S = 120.0

T = TypeVar("T")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MooncakeService]:
    with running_service(tmp_path, lent_nbytes=LENT_NBYTES) as service:
        yield service


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(4, name="kvtier-mooncake")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(512 << 20)
    yield arena
    arena.close()


class Clients(SharedTierHarness):
    """Clients of a service, by the address of its master."""

    def __init__(self, address: str, pool: IoPool, arena: Arena, more: str = "") -> None:
        text = f"kind: mooncake\nmaster: {address}\nrequest_timeout: 1s\n{more}"
        options = parse_tier(text, MooncakeTier.Options, source="test")

        def opener(payload_nbytes: int) -> MooncakeTier:
            return MooncakeTier.open(options, SharedContext(payload_nbytes, pool, arena.view))

        super().__init__(opener, pool, arena, payload_nbytes=PAYLOAD_NBYTES)


@pytest.fixture
async def clients(
    service: MooncakeService, pool: IoPool, arena: Arena
) -> AsyncIterator[Clients]:
    clients = Clients(service.address, pool, arena)
    await clients.open()
    yield clients
    await clients.aclose()


async def in_time(call: Awaitable[T]) -> T:
    """Return the result of ``call`` after checking that it ended within bounded time."""
    begun_s = time.monotonic()
    try:
        return await call
    finally:
        assert time.monotonic() - begun_s < CALL_S


async def until(call: Callable[[], Awaitable[object]], result: object) -> None:
    """Repeat ``call`` until it returns ``result``."""
    deadline_s = time.monotonic() + RECOVERY_S
    while True:
        found: object
        try:
            found = await in_time(call())
        except TierUnavailableError as error:
            found = error
        if found == result:
            return
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.05)


async def fails(call: Awaitable[object]) -> None:
    with pytest.raises(TierUnavailableError, match="master"):
        await in_time(call)


async def test_a_master_that_starts_later_is_found(
    tmp_path: Path, pool: IoPool, arena: Arena
) -> None:
    with (tmp_path / "log").open("ab") as log:
        service = MooncakeService(log, lent_nbytes=LENT_NBYTES)
        clients = Clients(service.address, pool, arena)
        await in_time(clients.open())
        keys = clients.keys(range(3))
        await fails(clients.put(keys))
        await fails(clients.get(keys))
        await fails(clients.tier.contains(keys))
        try:
            await clients.run(service.start)
            await until(lambda: clients.put(keys), [DONE] * 3)
            await until(lambda: clients.get(keys, client=clients.other), [0] * 3)
        finally:
            await clients.aclose()
            service.stop()


async def test_calls_end_while_the_master_is_stopped(
    clients: Clients, service: MooncakeService
) -> None:
    keys = clients.keys(range(40))
    assert await clients.put(keys) == [DONE] * 40
    with service.stalled(service.master):
        await fails(clients.get(keys))
        await fails(clients.put(keys))
        await fails(clients.tier.contains(keys))
    await until(lambda: clients.get(keys[:2]), [0] * 2)
    await until(lambda: clients.put(keys[:2], version=1), [DONE] * 2)


async def test_a_master_that_is_started_again_is_used(
    clients: Clients, service: MooncakeService
) -> None:
    keys = clients.keys(range(3))
    assert await clients.put(keys) == [DONE] * 3
    kill(service.master)
    await fails(clients.get(keys))
    await fails(clients.put(keys))
    await clients.run(service.start_master)
    await until(lambda: clients.put(keys), [DONE] * 3)
    await until(lambda: clients.get(keys, client=clients.other), [0] * 3)


async def test_calls_end_while_the_other_host_is_stopped(
    clients: Clients, service: MooncakeService
) -> None:
    keys = clients.keys(range(48))
    assert await clients.put(keys) == [DONE] * 48
    into = clients.buffers(48)
    with service.stalled(service.lender):
        outcomes = await in_time(_outcomes(clients.tier.get(keys, into)))
        assert DONE not in outcomes
        assert DONE not in await in_time(_outcomes(clients.put(keys)))
        for value in into:
            value.payload[:] = bytes(PAYLOAD_NBYTES)
    await until(lambda: clients.put(keys), [DONE] * 48)
    assert await clients.get(keys) == [0] * 48
    assert not any(any(value.payload) for value in into), "filled after the call was over"


@pytest.mark.slow
async def test_a_transfer_that_the_library_gives_up_has_ended_when_the_call_ends(
    service: MooncakeService, pool: IoPool, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gives up after 60 s; until then, each transfer waits for the one before."""
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "1")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "20")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "20")
    clients = Clients(service.address, pool, arena)
    await clients.open()
    keys, into = clients.keys(range(8)), clients.buffers(8)
    assert await clients.put(keys) == [DONE] * 8
    with service.stalled(service.lender):
        assert DONE not in await _outcomes(clients.tier.get(keys, into))
        for value in into:
            value.payload[:] = bytes(PAYLOAD_NBYTES)
    await until(lambda: clients.put(keys), [DONE] * 8)
    await until(lambda: clients.get(keys, client=clients.other), [0] * 8)
    assert not any(any(value.payload) for value in into), "filled after the call was over"
    await clients.aclose()


async def test_the_values_of_a_killed_host_are_missing(
    clients: Clients, service: MooncakeService
) -> None:
    keys = clients.keys(range(3))
    assert await clients.put(keys) == [DONE] * 3
    kill(service.lender)
    assert DONE not in await in_time(_outcomes(clients.tier.get(keys, clients.buffers(3))))
    await until(lambda: clients.get(keys), [MISSING] * 3)
    assert await in_time(clients.put(keys)) == [REFUSED] * 3
    await clients.run(service.start_lender)
    await until(lambda: clients.put(keys), [DONE] * 3)


async def test_a_full_service_refuses_what_has_no_room(clients: Clients) -> None:
    keys = clients.keys(range(128))
    outcomes = await clients.put(keys)
    assert {*outcomes} == {DONE, REFUSED}
    assert outcomes.count(DONE) * PAYLOAD_NBYTES <= LENT_NBYTES


async def test_an_engine_can_lend_memory(
    clients: Clients, service: MooncakeService, pool: IoPool, arena: Arena
) -> None:
    await clients.run(lambda: kill(service.lender))
    await until(lambda: clients.put(clients.keys([0])), [REFUSED])
    lender = Clients(service.address, pool, arena, "segment: 32MiB\n")
    await lender.open()
    keys = clients.keys(range(3))
    await until(lambda: clients.put(keys), [DONE] * 3)
    assert await lender.get(keys) == [0] * 3
    assert await clients.get(keys, client=clients.other) == [0] * 3
    await lender.aclose()


async def test_closing_ends_while_the_master_is_stopped(
    clients: Clients, service: MooncakeService
) -> None:
    assert await clients.put(clients.keys(range(3))) == [DONE] * 3
    with service.stalled(service.master):
        await in_time(clients.aclose())


async def test_a_port_without_a_mooncake_master_delays_a_start_little(
    pool: IoPool, arena: Arena
) -> None:
    clients = Clients(f"127.0.0.1:{free_port()}", pool, arena)
    await in_time(clients.open())
    await in_time(clients.aclose())


def test_rdma_needs_shared_memory(pool: IoPool) -> None:
    text = "kind: mooncake\nmaster: 10.0.0.1:50051\nprotocol: rdma"
    options = parse_tier(text, MooncakeTier.Options, source="test")
    with pytest.raises(ConfigError, match="RDMA needs shared memory"):
        MooncakeTier.open(options, SharedContext(PAYLOAD_NBYTES, pool))


async def _outcomes(call: Awaitable[Sequence[T]]) -> Sequence[T]:
    """Return the outcomes of ``call``, or none if the service did not answer."""
    try:
        return await call
    except TierUnavailableError:
        return []
