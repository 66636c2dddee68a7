"""``python -m tests.bench.shared_dir DIRECTORY``: a shared directory beside fio.

In each round both sides write new files of one chunk each and read them back, in alternating
order, on the same file system, with the same number of calls in flight and the same use of the
page cache. kvtier's side is :class:`~kvtier.tiers.shared.KeyedTier`: it asks first which chunks
are there, makes and verifies proofs, and renames each file. fio only moves bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvtier.config import SharedDirTierConfig
from kvtier.keys import ChunkKey, make_key
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.base import TierContext
from kvtier.tiers.shared import KeyedTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

BAR: Final = 0.9
CHUNK_NBYTES: Final = 2 << 20
BATCH_CHUNKS: Final = 16

Direction = Literal["put", "get"]


class Plan(NamedTuple):
    """What to measure.

    Attributes:
        root: A new directory on the file system.
        chunks: Chunks of one round.
        threads: Calls in flight on each side.
        direct: Whether both sides bypass the page cache.
    """

    root: Path
    chunks: int
    threads: int
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one round and direction."""
        return self.chunks * CHUNK_NBYTES


class Fio:
    """fio with one file for each chunk, as many threads as kvtier has.

    Args:
        plan: What to measure.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = plan.root / "fio"

    def measure(self, direction: Direction) -> float:
        """Write or read all chunks; return bytes per second."""
        if direction == "put":
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir()
        plan = self._plan
        command = [
            "fio",
            "--name=bench",
            f"--directory={self._directory}",
            f"--rw={'write' if direction == 'put' else 'read'}",
            f"--bs={CHUNK_NBYTES}",
            f"--filesize={CHUNK_NBYTES}",
            f"--nrfiles={plan.chunks // plan.threads}",
            "--openfiles=1",
            "--file_service_type=sequential",
            "--create_on_open=1",
            "--fallocate=none",
            f"--direct={plan.direct:d}",
            f"--numjobs={plan.threads}",
            "--ioengine=psync",
            "--thread",
            "--group_reporting",
            "--output-format=json",
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        report: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])
        moved = report["jobs"][0]["write" if direction == "put" else "read"]
        if moved["io_bytes"] != plan.nbytes:
            raise RuntimeError(f"fio moved {moved['io_bytes']} bytes")
        return float(moved["bw_bytes"])


class Kvtier:
    """The tier, as an engine uses it.

    Args:
        plan: What to measure.
        pool: The tier's threads.
    """

    def __init__(self, plan: Plan, pool: IoPool) -> None:
        self._plan = plan
        self._arena = Arena(plan.nbytes)
        self._payloads = [self._arena.take(CHUNK_NBYTES) for _ in range(plan.chunks)]
        for payload in self._payloads:
            payload[:] = secrets.token_bytes(CHUNK_NBYTES)
        options = SharedDirTierConfig(
            path=plan.root / "kvtier",
            capacity_bytes=32 * plan.nbytes,
            direct_io="require" if plan.direct else "off",
        )
        context = TierContext(
            CHUNK_NBYTES, LayoutFingerprint({"bench": "dir"}), pool, memory=self._arena.shared
        )
        self._tier = KeyedTier.open(options, context)
        self._keys: list[ChunkKey] = []

    async def measure(self, direction: Direction) -> float:
        """Put new chunks, or get the last ones; return bytes per second."""
        if direction == "put":
            self._keys = [make_key(secrets.token_bytes(32), 0) for _ in self._payloads]
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for first in range(0, self._plan.chunks, BATCH_CHUNKS):
                group.create_task(self._move(direction, first))
        return self._plan.nbytes / (time.perf_counter() - begun_s)

    async def aclose(self) -> None:
        """Close the tier."""
        await self._tier.aclose()

    async def _move(self, direction: Direction, first: int) -> None:
        part = slice(first, first + BATCH_CHUNKS)
        keys, payloads = self._keys[part], self._payloads[part]
        slots = range(len(keys))
        if direction == "put":
            moved = await self._tier.write(keys, slots, payloads, purpose=Purpose.STORE)
        else:
            moved = await self._tier.read(keys, slots, payloads, purpose=Purpose.LOAD)
        if {*moved.outcomes} != {Outcome.DONE}:
            raise RuntimeError(f"outcomes {moved}")


async def measure(plan: Plan, rounds: int) -> dict[Direction, list[tuple[float, float]]]:
    """Return the bytes per second of kvtier and of fio, round by round."""
    pool, other = (IoPool(threads, name="bench") for threads in (plan.threads, 1))
    fio = Fio(plan)
    kvtier = await other.run(lambda: Kvtier(plan, pool), priority=0)
    figures: dict[Direction, list[tuple[float, float]]] = {"put": [], "get": []}
    for number in range(rounds + 1):
        for direction, found in figures.items():

            async def run_fio(what: Direction = direction) -> float:
                return await other.run(lambda: fio.measure(what), priority=0)

            early = [] if number % 2 else [await run_fio()]
            ours = await kvtier.measure(direction)
            [theirs] = early or [await run_fio()]
            if number:  # the first round only warms up
                found.append((ours, theirs))
    await kvtier.aclose()
    return figures


def report(figures: dict[Direction, list[tuple[float, float]]]) -> bool:
    """Print the medians and spreads; return whether the bar holds."""
    held = True
    for direction, rounds in figures.items():
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        ratio = statistics.median(ratios)
        held &= ratio >= BAR
        print(  # noqa: T201
            f"{direction}: kvtier {_speeds([ours for ours, _ in rounds])}, "
            f"fio {_speeds([theirs for _, theirs in rounds])}, "
            f"ratio {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), bar >= {BAR}"
        )
    return held


def _speeds(values: list[float]) -> str:
    low, high = min(values) / 1e9, max(values) / 1e9
    return f"{statistics.median(values) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.shared_dir", description=__doc__
    )
    parser.add_argument(
        "directory", type=Path, help="a directory on the file system to measure"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--buffered", action="store_true", help="use the page cache")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=given.directory) as root:
        plan = Plan(Path(root), given.chunks, given.threads, not given.buffered)
        held = report(asyncio.run(measure(plan, given.rounds)))
    if not held:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
