"""How a process is started and the store opened in it, and what is said if it cannot be."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import kvtier
from kvtier.config import NvmeTierConfig
from kvtier.errors import (
    CacheDamagedError,
    CacheLockedError,
    CapacityError,
    ConfigError,
    TierUnavailableError,
)
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, host, process
from kvtier.tiers.hosted.frames import Frame, FrameParser
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint
from tests.unit.hosted_tier.hosting import CAPACITY, SLOT, FarConfig, opened


async def test_the_host_logs_through_the_engine(
    options: NvmeTierConfig, context: TierContext, caplog: pytest.LogCaptureFixture
) -> None:
    began_at = time.time()  # noqa: TID251 - as a log has it
    with caplog.at_level(logging.INFO):
        tier = await opened(options, context)
    assert "is open, through the page cache" in caplog.text
    assert "recovered" not in caplog.text, "which the engine says of all tiers"
    (line,) = [record for record in caplog.records if "is open" in record.getMessage()]
    assert (line.levelname, line.filename) == ("INFO", "kvtier/tiers/slab/tier.py")
    assert line.process == tier.host_pid
    assert line.created > began_at
    await tier.aclose()


async def test_a_custom_tier_says_whether_its_medium_is_on_this_machine(
    options: NvmeTierConfig, context: TierContext, tmp_path: Path
) -> None:
    far = FarConfig(path=tmp_path / "far", capacity_bytes=CAPACITY * SLOT)
    for section, is_local in ((options, True), (far, False)):
        tier = await opened(section, context)
        assert tier.is_local is is_local
        await tier.aclose()


async def test_packages_in_the_working_directory_are_not_imported(
    options: NvmeTierConfig,
    context: TierContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("kvtier", "numpy"):
        (checkout / name).mkdir(parents=True)
        (checkout / name / "__init__.py").write_text("raise SystemExit('not this one')")
    here = str(Path(kvtier.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [here, *filter(None, sys.path)])
    monkeypatch.chdir(checkout)
    tier = await opened(options, context)
    await tier.aclose()


def test_without_shared_memory_there_is_no_process(
    options: NvmeTierConfig, pool: IoPool
) -> None:
    with pytest.raises(ConfigError, match="own_process needs shared memory"):
        HostedTier.open(options, TierContext(SLOT, LayoutFingerprint({}), pool))


async def test_errors_of_opening_keep_their_type_and_text(
    options: NvmeTierConfig, context: TierContext, pool: IoPool
) -> None:
    holder = await pool.run(lambda: SlabTier.open(options, context), priority=0)
    with pytest.raises(CacheLockedError, match=f"in use by pid {os.getpid()}") as locked:
        await opened(options, context)
    assert locked.value.holder.startswith(f"pid {os.getpid()}")
    assert locked.value.tier == "nvme"
    await holder.aclose()
    [layout] = options.path.glob("*/layout.json")
    layout.write_text("{")
    with pytest.raises(CacheDamagedError, match=r"layout\.json"):
        await opened(options, context)


NO_MORE_THREADS = """
import sys
import threading

def start(thread, allowed=iter(range({}))):
    if next(allowed, None) is None:
        raise RuntimeError("can't start new thread")
    begin(thread)

if "kvtier.tiers.hosted.host" in sys.orig_argv:
    begin, threading.Thread.start = threading.Thread.start, start
"""
"""What a Python process does first that finds it as ``sitecustomize``."""


@pytest.mark.parametrize(("allowed", "lacking"), [(1, "kvtier-io-0"), (2, "kvtier-index-nvme")])
async def test_a_host_that_is_allowed_too_few_threads_says_so(
    options: NvmeTierConfig,
    context: TierContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: int,
    lacking: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_MORE_THREADS.format(allowed))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CapacityError, match=rf"{lacking} cannot be started: .*pids\.max"):
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
    await host.send_recovered(cast("Any", Survivors(chunks)), cast("Any", engine))
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
        record = {"levelno": logging.DEBUG, "msg": "wait"}
        return Frame({"op": "log", "module": "kvtier", "record": record}).encode()


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
    late = r"tier nvme: .* not opened the cache after 0\.01 s and was ended; .* start the eng"
    with pytest.raises(TierUnavailableError, match=late):
        HostedTier.open(options, context)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOMEM, "Cannot allocate memory; free memory"),
        (errno.EMFILE, "Too many open files; allow the engine more open files"),
        (errno.ENOENT, f"No such file or directory; check that {sys.executable} exists"),
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


async def test_a_message_that_cannot_be_formatted_is_shown_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[Frame] = []
    handler = host.LogToEngine(asyncio.get_running_loop(), sent.append)
    wrong = logging.LogRecord("a", logging.INFO, "here.py", 1, "%d", ("no number",), None)
    right = logging.LogRecord("a", logging.INFO, "here.py", 1, "%d", (7,), None)
    handler.handle(wrong)
    handler.handle(right)
    await asyncio.sleep(0)
    assert [frame.header["record"]["msg"] for frame in sent] == ["7"]
    assert "no number" in capsys.readouterr().err
