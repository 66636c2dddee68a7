"""Recordings: what is written, and when it ends."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.config import TraceConfig, parse_config
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, make_key
from kvtier.recording import Recorder, RequestLog, RequestRecord
from kvtier.recording import _recorder as recorder_module
from kvtier.recording._files import NumberedFiles
from kvtier.sim.traces import read_trace
from tests.support.threads import join_threads

# -- writing


def keys(*numbers: int) -> list[ChunkKey]:
    return [make_key(number.to_bytes(32, "little"), 0) for number in numbers]


def lengths(directory: Path, stem: str) -> list[tuple[str, int]]:
    files = sorted(directory.glob(f"{stem}-*.jsonl"))
    return [(path.name, len(path.read_text().splitlines())) for path in files]


def recorder(directory: Path, **options: Any) -> Recorder:
    settings = TraceConfig(record=directory, **options)
    return Recorder(directory, options=settings)


def test_requests_go_on_in_new_files_and_the_oldest_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    record = RequestRecord(1.5, keys(1, 2), 1, 16)
    line = len(record.line())
    for _ in range(2):
        writer = recorder(directory, file_size_bytes=2 * line, files=2)
        for _ in range(5):
            writer.request(record)
        writer.close(timeout_s=10)
        assert writer.statistics() == recorder_module.RecorderStatistics(5, 0)
    assert lengths(directory, "requests") == [
        ("requests-000005.jsonl", 2),
        ("requests-000006.jsonl", 1),
    ]
    assert directory.stat().st_mode & 0o777 == 0o700
    (first, *_) = directory.iterdir()
    assert first.stat().st_mode & 0o777 == 0o600
    trace = read_trace(directory / "requests-000005.jsonl")
    assert (trace.requests, trace.distinct, trace.chunk_tokens) == (2, 2, 16)
    assert trace.output_tokens.tolist() == [16, 16]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A writing thread that waits before its first record until the event is set."""
    event = threading.Event()
    real = NumberedFiles.write

    def write(files: NumberedFiles, line: bytes) -> None:
        assert event.wait(timeout=10)
        real(files, line)

    monkeypatch.setattr(NumberedFiles, "write", write)
    yield event
    event.set()


def test_a_full_queue_drops_requests_and_counts_them(
    tmp_path: Path, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_WAITING", 4)
    writer = recorder(tmp_path / "trace")
    for number in range(20):
        writer.request(RequestRecord(float(number), keys(number), 0, 16))
    assert writer.statistics().dropped >= 20 - 5
    stopped.set()
    writer.close(timeout_s=10)
    counts = writer.statistics()
    assert counts.written + counts.dropped == 20
    assert lengths(tmp_path / "trace", "requests") == [
        ("requests-000001.jsonl", counts.written)
    ]
    writer.request(RequestRecord(0.0, keys(1), 0, 16))
    assert writer.statistics().dropped == counts.dropped + 1


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "trace"
    writer = recorder(directory)
    directory.rmdir()
    for _ in range(3):
        writer.request(RequestRecord(0.0, keys(1), 0, 16))
    writer.close(timeout_s=10)
    assert writer.statistics() == recorder_module.RecorderStatistics(0, 3)
    (record,) = [each for each in caplog.records if "cannot write the rec" in each.getMessage()]
    assert record.exc_info is None, "a disk that fails is no bug"
    assert f"recording to {directory}: No such file" in record.getMessage()


def test_a_file_that_another_engine_writes_is_not_removed(tmp_path: Path) -> None:
    mine, other = (NumberedFiles(tmp_path, "requests", keep=1) for _ in range(2))
    other.write(b"other\n")
    for _ in range(3):
        mine.begin()
        mine.write(b"mine\n")
    other.flush()
    mine.flush()
    assert lengths(tmp_path, "requests") == [
        ("requests-000001.jsonl", 1),
        ("requests-000004.jsonl", 1),
    ]
    other.close()
    mine.begin()
    assert [path.name for path in tmp_path.iterdir()] == ["requests-000005.jsonl"]
    mine.close()


def test_two_engines_that_begin_a_file_at_once_get_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (NumberedFiles(tmp_path, "requests", keep=2) for _ in range(2))
    make = os.open

    def make_after_the_other(path: Path, flags: int, mode: int) -> int:
        monkeypatch.undo()
        other.begin()
        return make(path, flags, mode)

    monkeypatch.setattr(os, "open", make_after_the_other)
    mine.begin()
    assert len(lengths(tmp_path, "requests")) == 2
    mine.close()
    other.close()


def test_closing_waits_for_a_disk_that_hangs_no_longer_than_it_may_and_says_so(
    tmp_path: Path,
    stopped: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = recorder(tmp_path / "trace")
    writer.request(RequestRecord(0.0, keys(1), 0, 16))
    now_s = 0.0
    waited_s: list[float] = []
    put_at_once = queue.Queue.put

    def put(own: queue.Queue[Any], record: Any, timeout: float) -> None:
        nonlocal now_s
        now_s += 6.0
        put_at_once(own, record, timeout=timeout)

    def join(_: threading.Thread, timeout: float) -> None:
        waited_s.append(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(recorder_module, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(queue.Queue, "put", put)
        patch.setattr(threading.Thread, "join", join)
        writer.close(timeout_s=8.0)
    assert waited_s == [2.0]
    assert caplog.text.count("the recording is incomplete") == 1
    stopped.set()
    join_threads("kvtier-recorder")
    assert writer.statistics().written == 1


# -- requests


def test_requests_are_written_in_order_of_arrival_not_of_end() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    for number, name in enumerate("abcd"):
        log.arrived(name, 100.0 + number)
        log.started(name, keys(number))
    log.ended("b", keys(1, 11, 12))
    log.ended("c", keys(2))
    assert written == []
    log.ended("a", keys(0))
    log.ended("a", keys(0))
    assert written == [
        RequestRecord(0.0, tuple(keys(0)), 0, 16),
        RequestRecord(1.0, tuple(keys(1)), 2, 16),
        RequestRecord(2.0, tuple(keys(2)), 0, 16),
    ]
    log.close()
    assert len(written) == 3


def test_a_request_that_never_ends_holds_up_a_bounded_number() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16, max_held=10)
    log.arrived("endless", 0.0)
    for number in range(50):
        log.arrived(str(number), float(number))
        log.started(str(number), keys(number))
        log.ended(str(number), keys(number))
        arrived = number + 2  # with the endless one
        assert arrived - len(written) <= 10
    log.close()
    assert [record.prompt for record in written] == [tuple(keys(at)) for at in range(50)]


def test_one_end_among_many_open_requests_is_one_record() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16, max_held=10)
    for number in range(100):
        log.arrived(str(number), float(number))
    for number in (40, 20, 30):
        log.ended(str(number), keys(number))
    assert [record.arrival_s for record in written] == [40.0, 20.0, 30.0]


def test_every_request_of_an_id_that_is_used_again_is_written() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    log.arrived("first", 0.0)
    for number in (1, 2):
        log.arrived("a", float(number))
        log.started("a", keys(number))
        log.ended("a", keys(number))
    log.ended("first", keys(0))
    assert [(record.arrival_s, record.prompt) for record in written] == [
        (float(number), tuple(keys(number))) for number in range(3)
    ]


def test_a_request_without_a_whole_chunk_is_not_written_and_one_aborted_early_is() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    log.arrived("short", 0.0)
    log.ended("short", [])
    log.arrived("aborted", 1.0)
    log.ended("aborted", keys(5, 6))
    log.ended("unknown", keys(7))
    assert written == [RequestRecord(1.0, tuple(keys(5, 6)), 0, 16)]


# -- configuration


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trace: {record: trace}", "f:2: trace.record = trace: not an absolute path"),
        ("trace: {files: 0}", "trace.files = 0: less than 1"),
        ("shadow: arc", "f:2: shadow = arc: not a list of policies; write shadow: [arc"),
        ("shadow: [acr]", "no such eviction policy is installed"),
        ("shadow: [belady]", "shadow[0] = belady: "),
        ("shadow: [3]", "shadow[0] = 3: not text"),
        ("shadow: [arc, arc]", "a policy is named twice; name each once"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"tiers: [{{kind: ram, capacity: 1GiB}}]\n{text}\n", source="f")
    assert problem in str(error.value)
