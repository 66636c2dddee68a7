"""A tier in a process of its own: what happens when the process dies, hangs or lies.

That it is a storage tier like any other is in tests/contract/test_tiers.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import numpy as np
import pytest
from typing_extensions import override

from kvtier.config import NvmeTierConfig
from kvtier.errors import CapacityError
from kvtier.testing.tier_harness import TierHarness, make_buffers, make_keys
from kvtier.tiers.base import SlotOutcomes, StorageTier
from kvtier.tiers.hosted import HostedTier, client, connection, host
from kvtier.tiers.hosted.frames import Batch, Frame, FrameParser, decode_outcomes
from kvtier.types import Outcome, Purpose
from tests.unit.hosted_tier.hosting import DONE, FAILED, SLOT, kill
from tests.unit.mappings import flags_of_mappings

pytestmark = pytest.mark.usefixtures("forked_hosts")


async def test_a_host_that_dies_costs_what_it_was_doing_and_is_replaced(
    harness: TierHarness[HostedTier], caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(range(4))
    assert await harness.put(keys, range(4)) == [DONE] * 4
    first = harness.tier.host_pid
    kill(harness.tier, signal.SIGSTOP)  # so that the next call is certainly under way
    reading = asyncio.ensure_future(harness.get(keys, range(4)))
    await asyncio.sleep(0)
    kill(harness.tier, signal.SIGKILL)
    assert await reading == [FAILED] * 4
    assert "exit code -9" in harness.error
    assert await harness.get(keys, range(4)) == [DONE] * 4
    assert harness.tier.host_pid != first
    assert "starting its I/O process again" in caplog.text


async def test_the_ram_tier_is_in_no_core_dump_of_a_host(
    harness: TierHarness[HostedTier],
) -> None:
    assert harness.tier.host_pid is not None
    flags = flags_of_mappings(harness.tier.host_pid, "/memfd:kvtier")
    assert flags
    assert all("dd" in each for each in flags)  # which stands for "do not dump"


async def test_a_store_that_is_gone_when_the_host_is_replaced_fails_chunks_not_the_engine(
    harness: TierHarness[HostedTier], options: NvmeTierConfig, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    kill(harness.tier, signal.SIGKILL)
    moved = options.path.rename(options.path.with_name("moved"))
    options.path.write_text("not a directory")
    while await harness.get(keys, [0]) == [FAILED]:
        if "could not be started again" in harness.error:
            break
    assert str(options.path) in harness.error
    assert await harness.get(keys, [0]) == [FAILED]
    assert caplog.text.count("starting its I/O process again") == 1
    options.path.unlink()
    moved.rename(options.path)
    assert await harness.get(keys, [0]) == [DONE]


async def test_memory_is_not_given_back_before_a_dying_host_is_gone(
    harness: TierHarness[HostedTier],
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    pid = harness.tier.host_pid
    kill(harness.tier, signal.SIGSTOP)
    reading = asyncio.ensure_future(harness.get(keys, [0]))
    await asyncio.sleep(0)
    kill(harness.tier, signal.SIGKILL)
    await reading
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_next_host_learns_which_slots_were_forgotten_meanwhile(
    harness: TierHarness[HostedTier],
) -> None:
    keys = make_keys(range(2))
    await harness.put(keys, range(2))
    kill(harness.tier, signal.SIGKILL)
    assert await harness.get(keys, range(2)) == [FAILED] * 2
    harness.tier.touch([0])
    harness.tier.forget([0])
    await asyncio.sleep(0)
    assert await harness.get(keys[1:], [1]) == [DONE]
    assert await harness.reopen() == [(keys[1], 1)]


async def test_a_new_host_learns_of_forgotten_slots_before_a_write(
    harness: TierHarness[HostedTier],
) -> None:
    old, new = make_keys(range(2))
    await harness.put([old], [0])
    kill(harness.tier, signal.SIGKILL)
    assert await harness.get([old], [0]) == [FAILED]
    harness.tier.forget([0])
    await asyncio.sleep(0)  # by then there is nobody to tell
    assert await harness.put([new], [0]) == [DONE]
    assert await harness.get([new], [0]) == [DONE]
    assert await harness.reopen() == [(new, 0)]


async def test_an_idle_host_soon_learns_of_a_use(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.put(make_keys(range(2)), range(2))
    ops: asyncio.Queue[object] = asyncio.Queue()
    send = connection.Connection.send

    def overheard(own: connection.Connection, frame: Frame) -> None:
        send(own, frame)
        ops.put_nowait(frame.header["op"])

    monkeypatch.setattr(connection.Connection, "send", overheard)
    monkeypatch.setattr(client, "_QUEUE_DELAY_S", 0.0)
    for _ in range(2):  # the second time as well
        harness.tier.touch([1])
        assert await asyncio.wait_for(ops.get(), 10) == "touch"


def send_nonsense(batch: Batch, header: dict[str, object]) -> Frame:
    return Frame({**header, "op": "no such thing"})


def understand_nothing(parser: FrameParser, data: bytes) -> None:
    raise TypeError(f"{parser} does not understand {data!r}")


@pytest.mark.parametrize(
    ("owner", "method", "misunderstand"),
    [(Batch, "frame", send_nonsense), (FrameParser, "feed", understand_nothing)],
    ids=["the host does not understand", "the engine does not understand"],
)
async def test_when_one_end_does_not_understand_the_other_the_host_is_replaced(
    harness: TierHarness[HostedTier],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    method: str,
    misunderstand: Callable[..., object],
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    first = harness.tier.host_pid
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, misunderstand)
        assert await harness.get(keys, [0]) == [FAILED]
    assert await harness.get(keys, [0]) == [DONE]
    assert harness.tier.host_pid != first


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.ENOSYS, "Function not implemented"), id="kernel"),
        pytest.param(AttributeError("module 'os' has no attribute 'pidfd_open'"), id="python"),
    ],
)
async def test_where_processes_cannot_be_watched_a_host_looks_whether_its_engine_lives(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(pid: int) -> int:
        raise error

    parents = [4711, 4711, 1]
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(host, "_PARENT_POLL_S", 0)
    there, here = socket.socketpair()
    with there:
        reader, writer = await asyncio.open_unix_connection(sock=here)
        host.end_with(4711, writer.transport)
        assert not writer.is_closing()
        assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not parents


async def test_an_engine_that_died_before_its_host_looked_is_one_that_died() -> None:
    died = await asyncio.create_subprocess_exec("true")
    await died.wait()
    there, here = socket.socketpair()
    with there:
        reader, writer = await asyncio.open_unix_connection(sock=here)
        host.end_with(died.pid, writer.transport)
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_the_last_bytes_of_a_dying_engine_are_no_error_of_its_host() -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: problems.append(context)
    )
    there, here = socket.socketpair()
    with there, subprocess.Popen(["sleep", "60"]) as engine:  # noqa: ASYNC220 - it waits below
        reader, writer = await asyncio.open_unix_connection(sock=here)
        host.end_with(engine.pid, writer.transport)
        await asyncio.sleep(0)
        engine.kill()
        engine.wait()  # both are there when the loop looks next, the death first
        there.sendall(b"late")
        await asyncio.wait_for(reader.read(), 10)
    assert not problems


async def test_a_signal_to_the_whole_group_leaves_the_host_to_the_engine(
    harness: TierHarness[HostedTier],
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        kill(harness.tier, number)
    keys = make_keys([1])
    assert await harness.put(keys, [0]) == [DONE]
    assert await harness.get(keys, [0]) == [DONE]


async def test_a_buffer_outside_the_shared_memory_is_refused(
    harness: TierHarness[HostedTier],
) -> None:
    with pytest.raises(CapacityError, match="not in the shared memory"):
        await harness.tier.write(
            make_keys([1]), [0], make_buffers(1, SLOT), purpose=Purpose.STORE
        )


async def test_a_slot_the_tier_does_not_have_is_refused_by_the_host(
    harness: TierHarness[HostedTier],
) -> None:
    with pytest.raises(CapacityError, match="slots 99 to 99"):
        await harness.tier.write(
            make_keys([1]), [99], harness.buffers(1), purpose=Purpose.STORE
        )


class Brief:
    """A tier of a plugin's that does not say of each chunk what became of it."""

    name = "nvme"
    slot_nbytes = SLOT

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    async def read(self, *_: object, purpose: Purpose) -> SlotOutcomes:
        return SlotOutcomes(self._outcomes)


@pytest.mark.parametrize("outcomes", [[], [DONE], [DONE] * 3], ids=len)
async def test_a_tier_that_does_not_answer_for_each_chunk_has_none_taken_for_whole(
    outcomes: Sequence[Outcome],
) -> None:
    sent: list[Frame] = []
    tier = cast("StorageTier", Brief(outcomes))
    server = host.Server(tier, memoryview(bytearray(2 * SLOT)), sent.append)
    batch = Batch(make_keys([1, 2]), np.array([0, 1]), np.array([0, SLOT]))
    server.take(batch.frame({"op": "read", "call": 7, "purpose": int(Purpose.LOAD)}))
    await server.drain()
    (answer,) = sent
    assert (
        f"tier nvme returned {len(outcomes)} outcomes for 2 chunks"
        in answer.header["error"]["text"]
    )


class Cancelled(Brief):
    """A tier that awaits something that is cancelled."""

    @override
    async def read(self, *_: object, purpose: Purpose) -> SlotOutcomes:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited
        return await super().read(purpose=purpose)


async def test_a_read_that_is_cancelled_inside_the_tier_is_answered_with_an_error() -> None:
    sent: list[Frame] = []
    tier = cast("StorageTier", Cancelled([DONE]))
    server = host.Server(tier, memoryview(bytearray(SLOT)), sent.append)
    batch = Batch(make_keys([1]), np.array([0]), np.array([0]))
    server.take(batch.frame({"op": "read", "call": 7, "purpose": int(Purpose.LOAD)}))
    await server.drain()
    (answer,) = sent
    assert answer.header["call"] == 7
    assert "CancelledError" in answer.header["error"]["text"]


class Held(Brief):
    """One that answers when it is let."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(outcomes)
        self.gate = asyncio.Event()

    @override
    async def read(self, *_: object, purpose: Purpose) -> SlotOutcomes:
        await self.gate.wait()
        return await super().read(purpose=purpose)


async def test_a_host_whose_engine_is_gone_ends_what_it_was_doing_before_it_closes() -> None:
    """Its threads use files that are closed then, and a store that is the next engine's."""
    sent: list[Frame] = []
    tier = Held([DONE])
    server = host.Server(cast("StorageTier", tier), memoryview(bytearray(SLOT)), sent.append)

    async def frames() -> AsyncIterator[Frame]:
        batch = Batch(make_keys([1]), np.array([0]), np.array([0]))
        yield batch.frame({"op": "read", "call": 7, "purpose": int(Purpose.LOAD)})

    ending = asyncio.create_task(host.until_closed(frames(), server))
    for _ in range(4):
        await asyncio.sleep(0)
    assert not ending.done()
    tier.gate.set()
    assert await ending is None
    assert [decode_outcomes(frame.arrays) for frame in sent] == [[DONE]]
