"""Measuring a directory: what it leaves, what it counts, and how it fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from kvtier.doctor import Status, rates
from kvtier.doctor.rates import (
    DirectIo,
    MeasuredRates,
    NamelessIo,
    Timed,
    check_direct_io,
    check_rates,
    direct_io_refusal,
    measure_tier_rates,
    time_pieces,
)
from kvtier.errors import CapacityError, ConfigError, TierUnavailableError

MIB = 1 << 20
PIECE = 64 << 10


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(1)) for _ in range(count)]


class WatchedIo(NamelessIo):
    """Notes what a measurement does to its file, and what the directory shows meanwhile."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.names: list[str] = []
        self.written: dict[int, bytes] = {}
        self.unwritten_reads: list[int] = []

    @override
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.names += [path.name for path in self.directory.iterdir()]
        if len(buffers[0]) == PIECE:  # not the page that tries O_DIRECT
            self.written[offset] = bytes(buffers[0])
        return super().pwritev(fd, buffers, offset)

    @override
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, buffers, offset)
        if len(buffers[0]) == PIECE and self.written.get(offset) != bytes(buffers[0]):
            self.unwritten_reads.append(offset)
        return count

    @override
    def free_nbytes(self, directory: Path) -> int:
        return 4 * MIB


class FailingIo(NamelessIo):
    """Fails one call, every time."""

    def __init__(self, call: str, number: int) -> None:
        super().__init__()
        self._call = call
        self._number = number
        self.open_fds: set[int] = set()

    def _fail(self, call: str) -> None:
        if call == self._call:
            raise OSError(self._number, os.strerror(self._number))

    @override
    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            self._fail("direct")
        fd = super().open(path, flags)
        self.open_fds.add(fd)
        return fd

    @override
    def close(self, fd: int) -> None:
        self.open_fds.discard(fd)
        super().close(fd)

    @override
    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        super().allocate(fd, nbytes)

    @override
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("read")
        return super().preadv(fd, buffers, offset)

    @override
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("write")
        return super().pwritev(fd, buffers, offset)


def test_a_measurement_reads_what_it_wrote_and_leaves_nothing(tmp_path: Path) -> None:
    io = WatchedIo(tmp_path)
    measured = measure_tier_rates(tmp_path, piece_bytes=PIECE, threads=2, seconds=0.05, io=io)
    assert io.names == []
    assert io.unwritten_reads == []
    assert list(tmp_path.iterdir()) == []
    assert measured.file_bytes == 2 * MIB  # half of what is free
    assert max(io.written) < 2 * MIB
    assert len(set(io.written.values())) > 1
    assert bytes(PIECE) not in io.written.values()
    assert measured.read_pieces >= 2
    assert measured.write_pieces >= 2
    assert 0 < measured.read_p50_s <= measured.read_p99_s
    assert 0 < measured.write_p50_s <= measured.write_p99_s
    assert measured.read_bytes_per_s > 0


def test_a_measurement_through_the_page_cache_says_so(tmp_path: Path) -> None:
    dropped: list[bool] = []

    class Io(WatchedIo):
        @override
        def drop_cached(self) -> None:
            super().drop_cached()
            dropped.append(True)

    measured = measure_tier_rates(
        tmp_path, piece_bytes=PIECE, threads=1, seconds=0.01, direct_io="off", io=Io(tmp_path)
    )
    assert not measured.direct_io
    assert dropped == [True]


def test_a_file_system_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rates, "direct_io_refusal", lambda place: "Invalid argument")
    measured = measure_tier_rates(
        tmp_path, piece_bytes=PIECE, threads=1, seconds=0.01, io=WatchedIo(tmp_path)
    )
    assert not measured.direct_io
    assert not caplog.records  # the command prints findings, not log lines


def test_too_little_room_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    io = WatchedIo(tmp_path)
    with pytest.raises(CapacityError, match="too little to measure"):
        measure_tier_rates(tmp_path, piece_bytes=MIB, threads=1, seconds=0.01, io=io)


def test_room_that_goes_away_is_an_error_and_closes_the_file(tmp_path: Path) -> None:
    io = FailingIo("allocate", errno.EDQUOT)
    with pytest.raises(ConfigError, match="does not fit"):
        measure_tier_rates(tmp_path, piece_bytes=PIECE, threads=1, seconds=0.01, io=io)
    assert io.open_fds == set()


def test_a_failing_disk_is_an_error_and_closes_the_file(tmp_path: Path) -> None:
    io = FailingIo("write", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        measure_tier_rates(
            tmp_path, piece_bytes=PIECE, threads=2, seconds=0.01, direct_io="off", io=io
        )
    assert io.open_fds == set()


@pytest.mark.parametrize("call", ["direct", "read", "write"])
def test_direct_io_that_is_refused_anywhere_is_no_direct_io(tmp_path: Path, call: str) -> None:
    io = FailingIo(call, errno.EINVAL)
    assert direct_io_refusal(tmp_path, io=io) == "Invalid argument"
    assert io.open_fds == set()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_nothing_about_direct_io(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        direct_io_refusal(tmp_path, io=FailingIo("allocate", errno.ENOSPC))


def test_a_foreign_file_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / f".kvtier-doctor-{os.getpid()}"
    foreign.write_text("mine")
    with pytest.raises(FileExistsError):
        direct_io_refusal(tmp_path)
    assert foreign.read_text() == "mine"


def test_every_thread_moves_a_piece_and_the_first_pieces_are_the_moved_ones() -> None:
    moved: list[int] = []
    barrier = threading.Barrier(3)

    def move(piece: int, buffer: memoryview) -> None:
        moved.append(piece)
        barrier.wait(timeout=10)

    timed = time_pieces(move, [7, 8, 9], buffers(3), seconds=0.0)
    assert sorted(moved) == [7, 8, 9]
    assert len(timed.latencies_s) == 3


def test_the_pieces_begin_again_when_all_were_moved() -> None:
    moved: list[int] = []
    finished: list[int] = []
    time_pieces(
        lambda piece, buffer: moved.append(piece),
        [4, 5],
        buffers(1),
        0.2,
        lambda: finished.append(len(moved)),
    )
    assert moved[:4] == [4, 5, 4, 5]
    assert finished == [len(moved)]


def test_a_failure_waits_for_the_other_threads() -> None:
    both = threading.Barrier(2)
    failing = threading.Event()
    ended: list[int] = []

    def move(piece: int, buffer: memoryview) -> None:
        both.wait(timeout=10)
        if piece == 0:
            failing.set()
            raise OSError(errno.EIO, "broken")
        failing.wait(timeout=10)
        ended.append(piece)

    with pytest.raises(OSError, match="broken"):
        time_pieces(move, [0, 1], buffers(2), seconds=10.0)
    assert ended == [1]


def test_a_disk_that_does_not_answer_is_given_up(
    release: Callable[[], threading.Event],
) -> None:
    answer = release()

    def move(piece: int, buffer: memoryview) -> None:
        answer.wait()

    with pytest.raises(TierUnavailableError, match="no answer"):
        time_pieces(move, [0], buffers(1), seconds=0.0, stalled_s=0.01)


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Callable[[], threading.Event]:
    """Make events that are set when the test is over, so that stuck threads end."""

    def make() -> threading.Event:
        event = threading.Event()
        request.addfinalizer(event.set)
        return event

    return make


def test_quantiles_are_times_that_were_measured() -> None:
    timed = Timed([3.0, 1.0, 2.0, 4.0], elapsed_s=2.0)
    assert (timed.quantile_s(0.5), timed.quantile_s(0.99), timed.per_s) == (3.0, 4.0, 2.0)


RATES = MeasuredRates(
    path="/data",
    direct_io=True,
    piece_bytes=8 << 20,
    threads=4,
    file_bytes=4 << 30,
    seconds=2.0,
    read_bytes_per_s=6.5e9,
    read_p50_s=0.005,
    read_p99_s=0.009,
    read_pieces=1500,
    write_bytes_per_s=2.5e9,
    write_p50_s=0.012,
    write_p99_s=1.5,
    write_pieces=600,
)


@pytest.mark.parametrize(
    ("refusal", "mode", "status"),
    [
        ("", "auto", "ok"),
        ("", "require", "ok"),
        ("", "off", "note"),
        ("Invalid argument", "auto", "warning"),
        ("Invalid argument", "require", "problem"),
        ("Invalid argument", "off", "note"),
    ],
)
def test_direct_io_is_judged_by_the_mode_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, mode: DirectIo, status: str
) -> None:
    monkeypatch.setattr(rates, "direct_io_refusal", lambda place: refusal)
    finding = check_direct_io("nvme", tmp_path, mode, "tiers[1].direct_io")
    assert finding.status == status
    assert refusal in finding.reason


def test_rates_are_put_into_words() -> None:
    read, write = check_rates("nvme", RATES)
    assert (read.status, write.status) == (Status.OK, Status.OK)
    assert read.reason == "6.50 GB/s; p50 5 ms, p99 9 ms per 8.00 MiB, 4 at once"
    assert write.reason == "2.50 GB/s; p50 12 ms, p99 1.5 s per 8.00 MiB, 4 at once"


def test_a_disk_slower_than_nvme_is_a_warning_in_each_direction() -> None:
    slow = replace(RATES, read_bytes_per_s=0.99e9, write_bytes_per_s=0.49e9)
    read, write = check_rates("nvme", slow)
    assert (read.status, write.status) == (Status.WARNING, Status.WARNING)


def test_rates_through_the_page_cache_are_marked() -> None:
    findings = check_rates("nvme", replace(RATES, direct_io=False))
    assert [each.status for each in findings] == [Status.NOTE, Status.NOTE]
