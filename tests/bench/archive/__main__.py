"""``python -m tests.bench.archive DIR``: export and import of a store, against the disk.

In each round the disk's read and write rates are measured as ``kvtier doctor`` measures them,
then the store is exported and the archive is imported into a new store, each in a process of
its own whose largest memory is reported. The bar is a share of the slower of the two rates:
whoever reads a byte and writes it moves it twice.
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
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.archive.buffers import views_of
from kvtier.config import NvmeTierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.tiers.slab.direct_io import aligned_buffer
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from kvtier.units import approximate_rate, approximate_size

BAR_SHARE: Final = 0.8
BAR_NBYTES: Final = 256 << 20
_BATCH: Final = 64 << 20


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
    options = parser.parse_args()
    options.directory.mkdir(mode=0o700)
    try:
        measure(options)
    finally:
        shutil.rmtree(options.directory)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print one line for each, then the medians."""
    slot_nbytes = options.slot_kib << 10
    nbytes = int(options.gib * (1 << 30)) // slot_nbytes * slot_nbytes
    root: Path = options.directory
    asyncio.run(fill(root / "store", slot_nbytes, nbytes // slot_nbytes))
    form = ["--zstd"] if options.zstd else []
    shares: dict[str, list[float]] = {"export": [], "import": []}
    for number in range(options.rounds):
        read, write = disk_rates(root)
        slower = min(read, write)
        archive, target = root / "archive", root / "target"
        line = f"round {number}: disk {approximate_rate(read)} / {approximate_rate(write)}"
        exported = run("export", str(root / "store"), str(archive), *form)
        imported = run("import", str(archive), str(target))
        for name, ran in (("export", exported), ("import", imported)):
            shares[name].append(ran.bytes_per_s / slower)
            line += f"; {name} {approximate_rate(ran.bytes_per_s)}"
            line += f" ({ran.bytes_per_s / slower:.2f}), {approximate_size(ran.memory_nbytes)}"
        print(line, flush=True)  # noqa: T201
        shutil.rmtree(archive)
        shutil.rmtree(target)
    for name, found in shares.items():
        print(f"{name}: median {statistics.median(found):.2f}, bar {BAR_SHARE}")  # noqa: T201


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


def run(command: str, *arguments: str) -> Ran:
    """Run one command of ``kvtier cache`` and return its rate and its largest memory."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "cache", command, *arguments, "--json"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    seconds = time.monotonic() - began_s
    return Ran(document["nbytes"] / seconds, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    main()
