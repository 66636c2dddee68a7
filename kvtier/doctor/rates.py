"""Measures the rates at which a tier can read and write in its directory.

Like the tier, the measurement uses a slot file, aligned buffers and the tier's number of
threads. It moves pieces in random order, and avoids three sources of error:

* *Unwritten extents.* A read of reserved but unwritten space does not reach the disk. So pieces
  are written first, and only written pieces are read.
* *Zeros.* Thin volumes and compressing file systems do not store zeros, so random bytes are
  written.
* *The page cache.* O_DIRECT bypasses it. Without O_DIRECT, the measured time includes a flush
  of the written bytes. The bytes are dropped from the cache before they are read. The result
  then has ``direct_io: false``.

A drive's own cache can still make the rates of short measurements too high. Checksums are not
computed.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from typing_extensions import override

from kvtier.config import KvtierConfig, LocalDirectory
from kvtier.doctor._findings import Finding, Status
from kvtier.errors import CapacityError, ConfigError, TierUnavailableError
from kvtier.os.block_io import PAGE_NBYTES, BlockIo, aligned_buffer
from kvtier.tiers.slab.slots import SlotFile, SlotFileSpec
from kvtier.units import approximate_rate, approximate_size

__all__ = [
    "MeasuredRates",
    "NamelessIo",
    "Timed",
    "check_direct_io",
    "check_rates",
    "direct_io_refusal",
    "measure_directory",
    "measure_tier_rates",
    "milliseconds",
    "time_pieces",
]

DirectIo = Literal["auto", "require", "off"]

_FILE_NBYTES: Final = 4 << 30
"""Largest file of a measurement: larger than most drives' caches, but written in seconds."""
_FEWEST_PIECES: Final = 8
_STALLED_S: Final = 30.0
_SLOW_READ_BYTES_PER_S: Final = 1e9
_SLOW_WRITE_BYTES_PER_S: Final = 0.5e9
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FASTER: Final = "name a directory on a local NVMe drive that nothing else keeps busy"


class NamelessIo(BlockIo):
    """I/O on one file without a name. The file's space is freed when the file is closed.

    The first call of ``open`` creates the file and unlinks it. A :class:`SlotFile` calls
    ``open`` again for O_DIRECT. This call opens the same file through the first descriptor.
    """

    def __init__(self) -> None:
        self._fd = -1

    @override
    def open(self, path: Path, flags: int) -> int:
        if self._fd < 0:
            self._fd = super().open(path, flags | os.O_CREAT | os.O_EXCL)
            self.unlink(path)
            return self._fd
        return os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC)

    @override
    def close(self, fd: int) -> None:
        if fd == self._fd:
            self._fd = -1  # the kernel may reuse the descriptor number
        super().close(fd)

    def drop_cached(self) -> None:
        """Drop the file's cached pages, so that reads go to the disk."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _scratch_spec(
    directory: Path, *, slots: int, slot_nbytes: int, direct_io: DirectIo
) -> SlotFileSpec:
    path = directory / f".kvtier-doctor-{os.getpid()}"
    return SlotFileSpec("doctor", path, slots, slot_nbytes, direct_io)


def _open_scratch(spec: SlotFileSpec, io: BlockIo) -> SlotFile:
    """Create the file of ``spec`` and reserve its disk space.

    For errors see :meth:`SlotFile.reserve`.
    """
    file = SlotFile.open(spec, io)
    try:
        file.reserve()
    except BaseException:
        file.close()
        raise
    return file


def direct_io_refusal(directory: Path, *, io: BlockIo | None = None) -> str:
    """Return the reason why O_DIRECT does not work in ``directory``; empty if it works.

    Raises:
        ConfigError: The disk has no space for one page.
        OSError: The file system failed for another reason.
    """
    spec = _scratch_spec(directory, slots=1, slot_nbytes=PAGE_NBYTES, direct_io="require")
    try:
        file = _open_scratch(spec, io or NamelessIo())
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno in _NO_ROOM:
            raise
        return cause.strerror or str(cause)
    file.close()
    return ""


def check_direct_io(tier: str, directory: Path, mode: DirectIo, key: str) -> Finding:
    """Try O_DIRECT on a nameless file in ``directory``.

    Args:
        tier: Name of the tier.
        directory: An existing directory.
        mode: The tier's ``direct_io``.
        key: The key of ``mode`` in the configuration.
    """
    check = f"{tier}: O_DIRECT"
    refusal = direct_io_refusal(directory)
    if not refusal:
        if mode == "off":
            reason = "works, but direct_io: off uses the page cache"
            return Finding(check, Status.NOTE, reason, "remove direct_io: off", key)
        return Finding(check, Status.OK, "works")
    if mode == "require":
        remedy = "use a local ext4 or xfs, or set direct_io: auto"
        return Finding(check, Status.PROBLEM, f"does not work ({refusal})", remedy, key)
    status = Status.WARNING if mode == "auto" else Status.NOTE
    reason = f"does not work ({refusal}): the page cache is slower and takes memory"
    return Finding(check, status, reason, "use a local ext4 or xfs", key)


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured rates of reading and writing random pieces of a file in a directory.

    Attributes:
        path: The directory.
        direct_io: Whether the page cache was bypassed.
        piece_bytes: Number of bytes of one I/O call.
        threads: Number of concurrent calls.
        file_bytes: Number of bytes of the measured file.
        seconds: Duration of the measurement in each direction.
        read_bytes_per_s: Rate of reading, in bytes per second.
        read_p50_s: Median time of a read call.
        read_p99_s: 99th percentile of the time of a read call.
        read_pieces: Number of read calls.
        write_bytes_per_s: Rate of writing, in bytes per second, including the final flush.
        write_p50_s: Median time of a write call.
        write_p99_s: 99th percentile of the time of a write call.
        write_pieces: Number of write calls.
    """

    path: str
    direct_io: bool
    piece_bytes: int
    threads: int
    file_bytes: int
    seconds: float
    read_bytes_per_s: float
    read_p50_s: float
    read_p99_s: float
    read_pieces: int
    write_bytes_per_s: float
    write_p50_s: float
    write_p99_s: float
    write_pieces: int


def measure_directory(
    config: KvtierConfig, store: LocalDirectory, *, seconds: float
) -> MeasuredRates:
    """Measure the disk of ``store`` as a tier of ``config`` uses it.

    The measured file is in the cache directory if the directory exists, else in its parent.
    For ``seconds`` and the errors see :func:`measure_tier_rates`.
    """
    transfer = config.transfer
    queued = max(1, transfer.queue_limit_bytes // transfer.piece_bytes)
    return measure_tier_rates(
        store.path if store.path.is_dir() else store.path.parent,
        piece_bytes=transfer.piece_bytes,
        threads=min(transfer.io_threads, queued),
        seconds=seconds,
        direct_io="off" if store.direct_io == "off" else "auto",
    )


def measure_tier_rates(
    path: Path,
    *,
    piece_bytes: int,
    threads: int,
    seconds: float,
    direct_io: Literal["auto", "off"] = "auto",
    io: NamelessIo | None = None,
) -> MeasuredRates:
    """Write and then read random pieces of a nameless file in ``path``. This function blocks.

    The file takes at most half of the free space, and at most 4 GiB. The space is freed
    afterwards.

    Args:
        path: An existing directory.
        piece_bytes: Number of bytes of one call, a multiple of 4096.
        threads: Number of concurrent calls.
        seconds: Duration of the measurement in each direction.
        direct_io: ``auto`` to bypass the page cache if the file system can, or ``off``.
        io: System calls to use; tests pass calls that fail.

    Raises:
        CapacityError: Too little free space to measure.
        ConfigError: The disk became full before the file was reserved.
        OSError: The medium failed.
        TierUnavailableError: The medium did not answer.
    """
    io = io or NamelessIo()
    slots = _pieces_that_fit(io.free_nbytes(path), piece_bytes)
    # O_DIRECT is tried here, because the slot file would log the fallback.
    bypass = direct_io == "auto" and not direct_io_refusal(path)
    mode: DirectIo = "require" if bypass else "off"
    spec = _scratch_spec(path, slots=slots, slot_nbytes=piece_bytes, direct_io=mode)
    file = _open_scratch(spec, io)
    buffers = _random_buffers(threads, piece_bytes)
    try:
        writes, reads = _time_both(file, io, slots, buffers, seconds)
    except OSError:
        file.close()
        raise
    # Not in a finally: after TierUnavailableError a stuck thread still uses the descriptor.
    file.close()
    return MeasuredRates(
        path=str(path),
        direct_io=file.direct,
        piece_bytes=piece_bytes,
        threads=threads,
        file_bytes=spec.nbytes,
        seconds=seconds,
        read_bytes_per_s=reads.per_s * piece_bytes,
        read_p50_s=reads.quantile_s(0.5),
        read_p99_s=reads.quantile_s(0.99),
        read_pieces=len(reads.latencies_s),
        write_bytes_per_s=writes.per_s * piece_bytes,
        write_p50_s=writes.quantile_s(0.5),
        write_p99_s=writes.quantile_s(0.99),
        write_pieces=len(writes.latencies_s),
    )


def _time_both(
    file: SlotFile, io: NamelessIo, slots: int, buffers: Sequence[memoryview], seconds: float
) -> tuple[Timed, Timed]:
    order = random.Random(0).sample(range(slots), slots)

    def write(piece: int, buffer: memoryview) -> None:
        file.write(piece, [buffer])

    def read(piece: int, buffer: memoryview) -> None:
        if file.read(piece, [buffer]) != 1:
            raise OSError(f"piece {piece} ends early")

    writes = time_pieces(write, order, buffers, seconds, file.sync)
    if not file.direct:
        io.drop_cached()
    written = order[: len(writes.latencies_s)]
    return writes, time_pieces(read, written[::-1], buffers, seconds)


def check_rates(tier: str, rates: MeasuredRates) -> Iterator[Finding]:
    """Yield a finding about the rate of reading and one about the rate of writing.

    Args:
        tier: Name of the tier.
        rates: The measurement.
    """
    read = rates.read_bytes_per_s
    reason = _figures(rates, read, rates.read_p50_s, rates.read_p99_s)
    slow = read < _SLOW_READ_BYTES_PER_S
    remedy = f"{_FASTER}; loading pays only if it is faster than recomputing"
    yield _judge(f"{tier}: read rate", reason, rates, remedy if slow else "")
    write = rates.write_bytes_per_s
    reason = _figures(rates, write, rates.write_p50_s, rates.write_p99_s)
    slow = write < _SLOW_WRITE_BYTES_PER_S
    remedy = f"{_FASTER}; chunks that arrive faster are dropped"
    yield _judge(f"{tier}: write rate", reason, rates, remedy if slow else "")


def _judge(check: str, reason: str, rates: MeasuredRates, remedy: str) -> Finding:
    if not rates.direct_io:
        reason = f"{reason}, through the page cache"
    if remedy:
        reason = f"{reason}: slower than an NVMe drive"
        return Finding(check, Status.WARNING, reason, remedy)
    if not rates.direct_io:
        return Finding(check, Status.NOTE, reason, "expect less of the disk itself")
    return Finding(check, Status.OK, reason)


def _figures(rates: MeasuredRates, bytes_per_s: float, p50_s: float, p99_s: float) -> str:
    piece = approximate_size(rates.piece_bytes)
    times = f"p50 {milliseconds(p50_s)}, p99 {milliseconds(p99_s)}"
    return f"{approximate_rate(bytes_per_s)}; {times} per {piece}, {rates.threads} at once"


def milliseconds(seconds: float) -> str:
    """Return a duration as text, in milliseconds if it is below 1 s, else in seconds."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _pieces_that_fit(free_nbytes: int | None, piece_bytes: int) -> int:
    room = _FILE_NBYTES if free_nbytes is None else min(_FILE_NBYTES, free_nbytes // 2)
    pieces = room // piece_bytes
    if pieces < _FEWEST_PIECES:
        raise CapacityError(
            f"half of the free space is less than {_FEWEST_PIECES} pieces of "
            f"{approximate_size(piece_bytes)}, too little to measure"
        )
    return pieces


def _random_buffers(count: int, nbytes: int) -> list[memoryview]:
    generator = random.Random(0)
    buffers = [aligned_buffer(nbytes) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = generator.randbytes(nbytes)
    return buffers


@dataclass(frozen=True, slots=True)
class Timed:
    """The durations of calls in one direction: all reads or all writes.

    Attributes:
        latencies_s: Duration of each call, in any order.
        elapsed_s: Time from the start of the first call to the end of the measurement.
    """

    latencies_s: Sequence[float]
    elapsed_s: float

    @property
    def per_s(self) -> float:
        """Return the number of calls per second."""
        return len(self.latencies_s) / self.elapsed_s

    def quantile_s(self, share: float) -> float:
        """Return the ``share`` quantile of the call latencies in seconds.

        ``share`` is between 0 and 1.
        """
        ordered = sorted(self.latencies_s)
        return ordered[math.ceil(share * (len(ordered) - 1))]


def time_pieces(
    move: Callable[[int, memoryview], None],
    order: Sequence[int],
    buffers: Sequence[memoryview],
    seconds: float,
    finish: Callable[[], None] = lambda: None,
    *,
    stalled_s: float = _STALLED_S,
) -> Timed:
    """Read or write the pieces of ``order`` with one thread per buffer; time each call.

    The threads share ``order``: each call takes the next piece. The first piece follows the
    last. Every thread moves at least one piece, unless another thread failed.

    Args:
        move: Reads or writes one piece.
        order: Numbers of the pieces.
        buffers: One buffer per thread.
        seconds: Time after which no further call starts.
        finish: Called once at the end, within the measured time.
        stalled_s: Longest time that a call may take after ``seconds`` have passed.

    Raises:
        OSError: A call failed. The first such error is raised after all threads ended.
        TierUnavailableError: A call did not return.
    """
    lock = threading.Lock()
    pieces = itertools.cycle(order)
    latencies_s: list[float] = []
    errors: list[OSError] = []
    start_s = time.monotonic()

    def work(buffer: memoryview) -> None:
        while not errors:
            with lock:
                piece = next(pieces)
            begin_s = time.monotonic()
            try:
                move(piece, buffer)
            except OSError as error:
                errors.append(error)
                return
            end_s = time.monotonic()
            latencies_s.append(end_s - begin_s)
            if end_s >= start_s + seconds:
                return

    if not _run_on_threads(work, buffers, end_by_s=start_s + seconds + stalled_s):
        raise TierUnavailableError("doctor", f"no answer for {stalled_s:.0f} s")
    if errors:
        raise errors[0]
    finish()
    return Timed(latencies_s, time.monotonic() - start_s)


def _run_on_threads(
    work: Callable[[memoryview], None], buffers: Sequence[memoryview], *, end_by_s: float
) -> bool:
    """Run ``work`` in one thread per buffer; return whether all threads ended in time."""
    threads = [
        threading.Thread(target=work, args=(buffer,), name="kvtier-doctor", daemon=True)
        for buffer in buffers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_by_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
