"""A tier in a process of its own: what happens when either process dies, hangs or lies.

That it is a storage tier like any other is in tests/contract/test_tiers.py.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    StoreDamagedError,
    StoreLockedError,
    TierUnavailableError,
)
from kvtier.iopool import IoPool
from kvtier.keys import ChunkKey
from kvtier.testing.chunks import Arena, make_buffers, make_keys
from kvtier.testing.shelf import Shelf
from kvtier.tiers.base import TierContext, TierStatistics
from kvtier.tiers.hosted import HostedTier, client, connection, host, process
from kvtier.tiers.hosted.frames import Batch, Frame, FrameParser
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Why

SLOT = 8192
CAPACITY = 16
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(2, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture
def context(pool: IoPool) -> Iterator[TierContext]:
    arena = Arena()
    yield TierContext(
        SLOT, LayoutFingerprint({"model": "m"}), pool, piece_nbytes=SLOT, memory=arena.shared
    )
    arena.close()


@pytest.fixture
def options(tmp_path: Path) -> NvmeTierConfig:
    return NvmeTierConfig(
        path=tmp_path / "store", capacity_bytes=CAPACITY * SLOT, direct_io="off"
    )


@pytest.fixture
async def shelf(options: NvmeTierConfig, pool: IoPool) -> AsyncIterator[Shelf[HostedTier]]:
    arena = Arena()
    context = TierContext(
        SLOT, LayoutFingerprint({"model": "m"}), pool, piece_nbytes=SLOT, memory=arena.shared
    )
    shelf = Shelf(lambda: HostedTier.open(options, context), pool, arena)
    await shelf.open()
    yield shelf
    await shelf.tier.aclose()
    arena.close()


async def opened(options: NvmeTierConfig, context: TierContext) -> HostedTier:
    return await context.pool.run(lambda: HostedTier.open(options, context), priority=0)


def kill(tier: HostedTier, number: signal.Signals) -> None:
    assert tier.host_pid is not None
    os.kill(tier.host_pid, number)


async def test_the_work_is_done_in_another_process(shelf: Shelf[HostedTier]) -> None:
    assert shelf.tier.host_pid not in {None, os.getpid()}
    assert await shelf.put(make_keys([1]), [0]) == [DONE]


async def test_a_host_that_dies_costs_what_it_was_doing_and_is_replaced(
    shelf: Shelf[HostedTier], caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(range(4))
    assert await shelf.put(keys, range(4)) == [DONE] * 4
    first = shelf.tier.host_pid
    kill(shelf.tier, signal.SIGSTOP)  # so that the next call is certainly under way
    reading = asyncio.ensure_future(shelf.get(keys, range(4)))
    await asyncio.sleep(0)
    kill(shelf.tier, signal.SIGKILL)
    assert await reading == [FAILED] * 4
    assert "exit code -9" in shelf.error
    assert await shelf.get(keys, range(4)) == [DONE] * 4
    assert shelf.tier.host_pid != first
    assert "starting its I/O process again" in caplog.text
    counted = shelf.tier.statistics()
    assert counted.written_bytes == counted.read_bytes == 4 * SLOT


async def test_a_store_that_is_gone_when_the_host_is_replaced_fails_chunks_not_the_engine(
    shelf: Shelf[HostedTier], options: NvmeTierConfig
) -> None:
    keys = make_keys([1])
    await shelf.put(keys, [0])
    kill(shelf.tier, signal.SIGKILL)
    options.path.rename(options.path.with_name("moved"))
    options.path.write_text("not a directory")
    while await shelf.get(keys, [0]) == [FAILED]:
        if "could not be started again" in shelf.error:
            break
    assert str(options.path) in shelf.error


async def test_memory_is_not_given_back_before_a_dying_host_is_gone(
    shelf: Shelf[HostedTier],
) -> None:
    keys = make_keys([1])
    await shelf.put(keys, [0])
    pid = shelf.tier.host_pid
    kill(shelf.tier, signal.SIGSTOP)
    reading = asyncio.ensure_future(shelf.get(keys, [0]))
    await asyncio.sleep(0)
    kill(shelf.tier, signal.SIGKILL)
    await reading
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_was_forgotten_or_touched_arrives_before_the_store_is_closed(
    shelf: Shelf[HostedTier],
) -> None:
    keys = make_keys(range(3))
    await shelf.put(keys, range(3))
    shelf.tier.touch([0])
    shelf.tier.forget([1])
    assert await shelf.reopen() == [(keys[2], 2), (keys[0], 0)]


async def test_a_reset_reaches_a_store_whose_host_has_died(shelf: Shelf[HostedTier]) -> None:
    keys = make_keys([1])
    await shelf.put(keys, [0])
    kill(shelf.tier, signal.SIGKILL)
    await shelf.tier.reset()
    assert await shelf.reopen() == []


async def test_what_is_forgotten_while_the_host_is_gone_is_told_to_the_next(
    shelf: Shelf[HostedTier],
) -> None:
    keys = make_keys(range(2))
    await shelf.put(keys, range(2))
    kill(shelf.tier, signal.SIGKILL)
    assert await shelf.get(keys, range(2)) == [FAILED] * 2
    shelf.tier.touch([0])
    shelf.tier.forget([0])
    await asyncio.sleep(0)
    assert await shelf.get(keys[1:], [1]) == [DONE]
    assert await shelf.reopen() == [(keys[1], 1)]


async def test_closing_does_not_wait_until_a_host_that_hangs_took_what_it_was_sent(
    shelf: Shelf[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
    kill(shelf.tier, signal.SIGSTOP)
    for _ in range(200):
        shelf.tier.touch([*range(CAPACITY)] * 64)
    await asyncio.wait_for(shelf.tier.aclose(), 10)
    assert shelf.tier.host_pid is not None
    with pytest.raises(ProcessLookupError):
        kill(shelf.tier, signal.SIGKILL)


async def test_a_host_that_is_killed_while_it_closes_loses_nothing_that_was_committed(
    shelf: Shelf[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(range(3))
    assert await shelf.put(keys, range(3)) == [DONE] * 3
    with monkeypatch.context() as patch:
        patch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
        patch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
        kill(shelf.tier, signal.SIGSTOP)
        await shelf.tier.aclose()
    assert sorted(await shelf.open()) == sorted(zip(keys, range(3), strict=True))
    assert await shelf.get(keys, range(3)) == [DONE] * 3


async def test_a_host_has_time_to_end_also_when_the_engines_threads_are_gone(
    options: NvmeTierConfig, context: TierContext
) -> None:
    pool = IoPool(1, name="kvtier-own")
    tier = await opened(options, replace(context, pool=pool))
    await tier.aopen()
    assert await context.pool.run(lambda: pool.close(timeout_s=10), priority=0)
    await tier.aclose()
    assert tier._host is not None
    assert tier._host.process.returncode == 0


async def test_closing_does_not_wait_for_a_host_that_the_operating_system_holds_on_to(
    shelf: Shelf[HostedTier], pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_ends(process: object) -> bool:
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(connection, "aend", never_ends)
    monkeypatch.setattr(connection, "_BURIAL_TIMEOUT_S", 0.01)
    await asyncio.wait_for(shelf.tier.aclose(), 10)
    held = shelf.tier._host
    assert held is not None
    await pool.run(lambda: held.process.wait(10), priority=0)


async def test_a_reset_that_a_hung_host_keeps_from_ending_starts_none_for_a_closed_tier(
    shelf: Shelf[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
    await shelf.tier.aopen()
    first = shelf.tier.host_pid
    kill(shelf.tier, signal.SIGSTOP)
    resetting = asyncio.ensure_future(shelf.tier.reset())
    await asyncio.sleep(0)
    await shelf.tier.aclose()
    with pytest.raises(ClosedError):
        await resetting
    assert shelf.tier.host_pid == first


async def test_a_host_that_starts_again_too_late_is_ended(
    shelf: Shelf[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[process.HostProcess] = []
    start = client._start

    def close_meanwhile(
        options: TierConfig, context: TierContext
    ) -> tuple[process.HostProcess, process.Opened]:
        found = start(options, context)
        started.append(found[0])
        asyncio.run_coroutine_threadsafe(shelf.tier.aclose(), loop).result(10)
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(client, "_start", close_meanwhile)
    keys = make_keys([1])
    await shelf.put(keys, [0])
    kill(shelf.tier, signal.SIGKILL)
    while not started:
        assert await shelf.get(keys, [0]) == [FAILED]
    assert "is closed" in shelf.error
    assert started[0].process.returncode == 0


def send_nonsense(batch: Batch, header: dict[str, object]) -> Frame:
    return Frame({**header, "op": "no such thing"})


def understand_nothing(*counters: int) -> TierStatistics:
    raise TypeError(f"{len(counters)} counters")


@pytest.mark.parametrize(
    ("owner", "method", "misunderstand"),
    [(Batch, "frame", send_nonsense), (connection, "TierStatistics", understand_nothing)],
    ids=["the host does not understand", "the engine does not understand"],
)
async def test_when_one_end_does_not_understand_the_other_the_host_is_replaced(
    shelf: Shelf[HostedTier],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    method: str,
    misunderstand: Callable[..., object],
) -> None:
    keys = make_keys([1])
    await shelf.put(keys, [0])
    first = shelf.tier.host_pid
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, misunderstand)
        assert await shelf.get(keys, [0]) == [FAILED]
    assert await shelf.get(keys, [0]) == [DONE]
    assert shelf.tier.host_pid != first


async def test_a_signal_to_the_whole_group_leaves_the_host_to_the_engine(
    shelf: Shelf[HostedTier],
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        kill(shelf.tier, number)
    keys = make_keys([1])
    assert await shelf.put(keys, [0]) == [DONE]
    assert await shelf.get(keys, [0]) == [DONE]


async def test_a_buffer_outside_the_shared_memory_is_refused(
    shelf: Shelf[HostedTier],
) -> None:
    with pytest.raises(CapacityError, match="not in the shared memory"):
        await shelf.tier.write(make_keys([1]), [0], make_buffers(1, SLOT), why=Why.STORE)


async def test_a_slot_the_tier_does_not_have_is_refused_by_the_host(
    shelf: Shelf[HostedTier],
) -> None:
    with pytest.raises(CapacityError, match="slots 99 to 99"):
        await shelf.tier.write(make_keys([1]), [99], shelf.buffers(1), why=Why.STORE)


async def test_the_host_logs_through_the_engine(
    options: NvmeTierConfig, context: TierContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tier = await opened(options, context)
    assert "slots of 8.00 KiB recovered" in caplog.text
    await tier.aclose()


def test_without_shared_memory_there_is_no_process(
    options: NvmeTierConfig, pool: IoPool
) -> None:
    with pytest.raises(ConfigError, match="needs shared memory"):
        HostedTier.open(options, TierContext(SLOT, LayoutFingerprint({}), pool))


async def test_errors_of_opening_cross_over_as_they_are(
    options: NvmeTierConfig, context: TierContext, pool: IoPool
) -> None:
    holder = await pool.run(lambda: SlabTier.open(options, context), priority=0)
    with pytest.raises(StoreLockedError, match=f"in use by pid {os.getpid()}") as locked:
        await opened(options, context)
    assert locked.value.holder.startswith(f"pid {os.getpid()}")
    assert locked.value.tier == "nvme"
    await holder.aclose()
    [layout] = options.path.glob("*/layout.json")
    layout.write_text("{")
    with pytest.raises(StoreDamagedError, match=r"layout\.json"):
        await opened(options, context)


@dataclass
class Survivors:
    """A tier in which so many chunks survived."""

    chunks: int

    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        return ((number.to_bytes(36), number) for number in range(self.chunks))


class CountingWriter:
    """An engine that takes what it is sent."""

    def __init__(self) -> None:
        self.frames = 0

    def write(self, data: bytes) -> None:
        self.frames += 1

    async def drain(self) -> None:
        return


@pytest.mark.parametrize(
    ("chunks", "frames", "cleanings"), [(0, 0, 0), (8, 1, 0), (9, 2, 1)], ids=str
)
async def test_the_host_cleans_its_heap_only_of_what_many_chunks_left_there(
    monkeypatch: pytest.MonkeyPatch, chunks: int, frames: int, cleanings: int
) -> None:
    monkeypatch.setattr(host, "_RECOVERED_AT_ONCE", 8)
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    engine = CountingWriter()
    await host._tell_recovered(cast("Any", Survivors(chunks)), cast("Any", engine))
    assert (engine.frames, len(collected)) == (frames, cleanings)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Chatterbox:
    """A host that always has something to say, of which nothing is that the store is open.

    Each word takes a second on a clock of the test's own.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timeouts_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def settimeout(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)

    def sendall(self, data: bytes) -> None:
        self.now_s += 1

    def recv(self, nbytes: int) -> bytes:
        self.now_s += 1
        header = {"op": "log", "level": logging.DEBUG, "logger": "kvtier", "text": "wait"}
        return Frame(header).encode()


def test_the_deadline_is_that_of_the_whole_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_OPEN_TIMEOUT_S", 4)
    talk = Chatterbox()
    hosting = process.HostProcess(cast("Any", None), cast("Any", talk), FrameParser())
    with pytest.raises(TimeoutError):
        hosting.open({}, clock=talk.clock)
    assert talk.timeouts_s == [4, 3, 2, 1]


def test_a_store_that_is_not_open_in_time_is_an_error_that_says_so(
    options: NvmeTierConfig, context: TierContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_OPEN_TIMEOUT_S", 0.01)
    late = r"tier nvme: .* not opened the store after 0\.01 s and was ended; .* start the eng"
    with pytest.raises(TierUnavailableError, match=late):
        HostedTier.open(options, context)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOMEM, "Cannot allocate memory; free memory"),
        (errno.EMFILE, "Too many open files; allow the engine more open files"),
        (errno.ENOENT, f"No such file or directory; check that {sys.executable} is there"),
    ],
)
def test_a_process_that_cannot_be_started_is_an_error_with_a_remedy(
    options: NvmeTierConfig,
    context: TierContext,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", fail)
    error = f"tier nvme: .*{re.escape(words)}.*own_process: false"
    before = open_descriptors()
    with pytest.raises(TierUnavailableError, match=error):
        HostedTier.open(options, context)
    assert open_descriptors() == before, "a socket was left open"


ENGINE = """
import os, sys, asyncio, signal
from pathlib import Path
from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.iopool import IoPool
from kvtier.testing.chunks import Arena, make_keys
from kvtier.testing.shelf import Shelf
from kvtier.tiers.base import TierContext, TierStatistics
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
    shelf = Shelf(lambda: HostedTier.open(options, context), pool, arena)
    await shelf.open()
    await shelf.put(make_keys(range(4)), range(4))
    asyncio.ensure_future(shelf.put(make_keys(range(4, 12)), range(4, 12)))
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


async def test_a_message_that_cannot_be_formatted_is_shown_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[Frame] = []
    handler = host._LogToEngine(asyncio.get_running_loop(), sent.append)
    wrong = logging.LogRecord("a", logging.INFO, "here.py", 1, "%d", ("no number",), None)
    right = logging.LogRecord("a", logging.INFO, "here.py", 1, "%d", (7,), None)
    handler.handle(wrong)
    handler.handle(right)
    await asyncio.sleep(0)
    assert [frame.header["text"] for frame in sent] == ["7"]
    assert "no number" in capsys.readouterr().err
