"""How fast a tier's directory really is, measured the way the tier uses it.

The tier's own slot file, vectored calls, aligned buffers and number of threads, on pieces in
random order. Three things make such a measurement lie, and are dealt with:

* *Unwritten extents.* Reserved room that was never written reads as zeros without the disk.
  So pieces are written first, and only written ones are read.
* *Zeros.* Thin volumes and compressing file systems do not store them. The bytes are random.
* *The page cache.* With O_DIRECT it is not in play; without, written bytes are flushed within
  the measured time and dropped before they are read, and the result says ``direct_io: false``.

What it cannot see: a drive's own cache flatters short runs, and a drive that is full or hot
is slower. Checksums are not computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._scratch import NamelessIo, direct_io_refusal, scratch_spec
from kvtier.doctor._timing import time_pieces
from kvtier.errors import CapacityError
from kvtier.tiers.slab.direct_io import aligned_buffer
from kvtier.tiers.slab.slots import SlotFile
from kvtier.units import approximate_rate, approximate_size

__all__ = ["MeasuredRates", "check_rates", "measure_tier_rates"]

_FILE_NBYTES: Final = 4 << 30
"""Most room a measurement takes: more than a drive's cache, soon written."""
_FEWEST_PIECES: Final = 8
_SLOW_READ_BYTES_PER_S: Final = 1e9
_SLOW_WRITE_BYTES_PER_S: Final = 0.5e9
_FASTER: Final = "name a directory on a local NVMe drive that nothing else keeps busy"


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What a tier's directory does with random pieces.

    Attributes:
        path: The directory.
        direct_io: Whether the page cache was bypassed.
        piece_bytes: Bytes of one I/O call.
        threads: Calls at once.
        file_bytes: Bytes of the file that was used.
        seconds: How long each direction was measured.
        read_bytes_per_s: Rate of reading.
        read_p50_s: Median time of a read call.
        read_p99_s: 99th percentile of it.
        read_pieces: Calls that both come from.
        write_bytes_per_s: Rate of writing, with the flush at the end.
        write_p50_s: Median time of a write call.
        write_p99_s: 99th percentile of it.
        write_pieces: Calls that both come from.
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

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def measure_tier_rates(
    path: Path,
    *,
    piece_bytes: int,
    threads: int,
    seconds: float,
    direct_io: Literal["auto", "require", "off"] = "auto",
    io: NamelessIo | None = None,
) -> MeasuredRates:
    """Write, then read, random pieces of a nameless file in ``path``; blocks.

    Takes at most half of the free space, 4 GiB at most, and gives it back.

    Args:
        path: An existing directory.
        piece_bytes: Bytes of one call, a multiple of 4096.
        threads: Calls at once.
        seconds: How long to measure each direction.
        direct_io: As in the tier's section of the configuration.
        io: The system calls to use; tests pass failing ones.

    Raises:
        CapacityError: Too little free space to measure anything.
        ConfigError: ``direct_io`` is ``require`` and the file system has none.
        OSError: The medium failed.
        TierUnavailableError: The medium did not answer.
    """
    io = io or NamelessIo()
    slots = _pieces_that_fit(io.free_nbytes(path), piece_bytes)
    if direct_io == "auto":  # settled here, for the slot file would log what is known already
        direct_io = "off" if direct_io_refusal(path) else "require"
    spec = scratch_spec(path, slots=slots, slot_nbytes=piece_bytes, direct_io=direct_io)
    file = SlotFile.open(spec, io)
    buffers = _random_buffers(threads, piece_bytes)
    order = random.Random(0).sample(range(slots), slots)
    try:
        writes = time_pieces(
            lambda piece, buffer: file.write(piece, [buffer]),
            order,
            buffers,
            seconds,
            file.sync,
        )
        written = order[: len(writes.latencies_s)]
        if not file.direct:
            io.drop_cached()
        reads = time_pieces(
            lambda piece, buffer: _read(file, piece, buffer), written[::-1], buffers, seconds
        )
    except OSError:
        file.close()
        raise
    # Not in a finally: a thread that is stuck in a call would go on with a number that is
    # somebody else's descriptor by then.
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


def check_rates(tier: str, rates: MeasuredRates, chunk_nbytes: int | None) -> Iterator[Finding]:
    """Put the figures into words: one finding for reading, one for writing.

    Args:
        tier: Name of the tier.
        rates: What was measured.
        chunk_nbytes: Bytes of a chunk; None if nobody knows.
    """
    read = rates.read_bytes_per_s
    found = _figures(rates, read, rates.read_p50_s, rates.read_p99_s)
    if chunk_nbytes:
        took = chunk_nbytes / read
        found += f"; {_milliseconds(took)} for a chunk of {approximate_size(chunk_nbytes)}"
    slow = read < _SLOW_READ_BYTES_PER_S
    remedy = f"{_FASTER}; loading pays only if it is faster than recomputing"
    yield _judge(f"{tier}: read rate", found, rates, remedy if slow else "")
    write = rates.write_bytes_per_s
    found = _figures(rates, write, rates.write_p50_s, rates.write_p99_s)
    slow = write < _SLOW_WRITE_BYTES_PER_S
    remedy = f"{_FASTER}; what comes faster than it is written is dropped"
    yield _judge(f"{tier}: write rate", found, rates, remedy if slow else "")


def _judge(check: str, found: str, rates: MeasuredRates, remedy: str) -> Finding:
    """Make a finding of ``found``, a warning if there is a ``remedy``."""
    if not rates.direct_io:
        found = f"{found}; with the page cache's help"
    if remedy:
        return Finding(check, Verdict.WARNING, f"{found}: slower than an NVMe drive", remedy)
    if not rates.direct_io:
        return Finding(check, Verdict.NOTE, found, "expect less of the disk itself")
    return Finding(check, Verdict.OK, found)


def _figures(rates: MeasuredRates, bytes_per_s: float, p50_s: float, p99_s: float) -> str:
    piece = approximate_size(rates.piece_bytes)
    times = f"p50 {_milliseconds(p50_s)}, p99 {_milliseconds(p99_s)}"
    return (
        f"{approximate_rate(bytes_per_s)}; {times} a piece of {piece}, {rates.threads} at once"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _read(file: SlotFile, piece: int, buffer: memoryview) -> None:
    if file.read(piece, [buffer]) != 1:
        raise OSError(f"piece {piece} ends early")


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
    generator = np.random.default_rng(0)
    buffers = [aligned_buffer(nbytes) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = generator.bytes(nbytes)
    return buffers
