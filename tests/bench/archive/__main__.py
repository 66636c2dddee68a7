"""``python -m tests.bench.archive DIR``: export and import of a store, against the disk.

In each round ``kvtier doctor`` measures how fast the disk reads and writes, and threads copy a
file with direct I/O: that is what a disk does that reads and writes at once. Then the store is
exported, and the archive is imported into a new store, each in a process of its own whose
largest memory is reported. Rates are those that the commands print, without the start of
Python. ``--archive`` puts the archive on another medium: then the disk only reads or only
writes, and the bar is a share of the slower of its two rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.archive.buffers import views_of
from kvtier.config import NvmeTierConfig
from kvtier.os.block_io import aligned_buffer
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from kvtier.units import approximate_rate, approximate_size

BAR_SHARE: Final = 0.8
_BATCH: Final = 64 << 20
_PIECE: Final = 16 << 20
_THREADS: Final = 4


_COMMAND: Final = """
import sys
from kvtier.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        (peak,) = (line for line in status if line.startswith("VmHWM"))
    sys.stderr.write(peak.split()[1])
"""
"""Runs kvtier, and reports the largest memory of the process in KiB."""


class Ran(NamedTuple):
    """What one command took."""

    bytes_per_s: float
    memory_nbytes: int


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a new directory on the disk to measure")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--slot-kib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--zstd", action="store_true")
    parser.add_argument("--archive", type=Path, help="a new directory for the archive")
    options = parser.parse_args()
    options.directory.mkdir(mode=0o700)
    try:
        measure(options)
    finally:
        for directory in (options.directory, options.archive or options.directory):
            shutil.rmtree(directory, ignore_errors=True)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print one line for each, then the medians."""
    slot_nbytes = options.slot_kib << 10
    nbytes = int(options.gib * (1 << 30)) // slot_nbytes * slot_nbytes
    root: Path = options.directory
    asyncio.run(fill(root / "store", slot_nbytes, nbytes // slot_nbytes))
    form = ["--zstd"] if options.zstd else []
    shares: dict[str, list[float]] = {}
    archive: Path = options.archive or root / "archive"
    for number in range(options.rounds):
        read, write = disk_rates(root)
        copy = copy_rate(next((root / "store").glob("*/slots.bin")), root / "copy")
        line = f"round {number}: disk {approximate_rate(read)} / {approximate_rate(write)}"
        line += f", copy {approximate_rate(copy)}"
        commands = {
            "export": run("export", str(root / "store"), str(archive), *form),
            "import": run("import", str(archive), str(root / "target")),
        }
        for name, ran in commands.items():
            line += f"; {name} {approximate_rate(ran.bytes_per_s)}"
            line += f", {approximate_size(ran.memory_nbytes)}"
            for peer, rate in (("the slower", min(read, write)), ("the copy", copy)):
                shares.setdefault(f"{name}, of {peer}", []).append(ran.bytes_per_s / rate)
        print(line, flush=True)  # noqa: T201
        shutil.rmtree(archive)
        shutil.rmtree(root / "target")
    for name, found in shares.items():
        least, most = min(found), max(found)
        median = statistics.median(found)
        print(f"{name}: {median:.2f} ({least:.2f}..{most:.2f}), bar {BAR_SHARE}")  # noqa: T201


async def fill(path: Path, slot_nbytes: int, slots: int) -> None:
    """Fill a store as an engine does, with random bytes."""
    pool = IoPool(4, name="kvtier-bench")
    context = TierContext(slot_nbytes, LayoutFingerprint({"model": "bench"}), pool)
    options = NvmeTierConfig(path=path, capacity_bytes=slots * slot_nbytes)
    tier = SlabTier.open(options, context)
    keys = make_keys(range(slots))
    batch = _BATCH // slot_nbytes
    buffer = aligned_buffer(batch * slot_nbytes)
    for first in range(0, slots, batch):
        buffer[:] = random.Random(first).randbytes(len(buffer))
        chosen = range(first, min(first + batch, slots))
        views = views_of(buffer, slot_nbytes, len(chosen))
        some = keys[first : chosen.stop]
        written = await tier.write(some, chosen, views, purpose=Purpose.STORE)
        assert set(written.outcomes) == {Outcome.DONE}
    await tier.aclose()
    pool.close(timeout_s=30)


def disk_rates(root: Path) -> tuple[float, float]:
    """Return how fast ``kvtier doctor`` reads and writes the disk, in bytes per second."""
    file = root / "doctor.yaml"
    file.write_text(
        "tiers:\n  - {kind: ram, capacity: 64MiB}\n"
        f"  - {{kind: nvme, path: {root}/doctor, capacity: 2GiB}}\n"
    )
    command = [sys.executable, "-m", "kvtier", "doctor", str(file), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    (rates,) = json.loads(done.stdout)["measured"].values()
    return rates["read_bytes_per_s"], rates["write_bytes_per_s"]


def copy_rate(source: Path, target: Path) -> float:
    """Return how fast threads copy a file with direct I/O, in bytes per second."""
    reading = os.open(source, os.O_RDONLY | os.O_DIRECT)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    nbytes = source.stat().st_size // _PIECE * _PIECE
    buffers = [aligned_buffer(_PIECE) for _ in range(_THREADS)]

    def copy(number: int) -> None:
        for at in range(number * _PIECE, nbytes, _THREADS * _PIECE):
            os.preadv(reading, [buffers[number]], at)
            os.pwritev(writing, [buffers[number]], at)

    began_s = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(copy, range(_THREADS)))
    os.fdatasync(writing)
    seconds = time.monotonic() - began_s
    os.close(reading)
    os.close(writing)
    target.unlink()
    return nbytes / seconds


def run(command: str, *arguments: str) -> Ran:
    """Run one command of ``kvtier cache`` and return its rate and its largest memory."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "cache", command, *arguments, "--json"],
        capture_output=True,
        check=True,
    )
    document = json.loads(done.stdout)
    return Ran(document["nbytes"] / document["seconds"], int(done.stderr) << 10)


if __name__ == "__main__":
    main()
