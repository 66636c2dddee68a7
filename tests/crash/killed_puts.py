"""Puts into a shared directory that are killed before each of their system calls.

This process stays single-threaded, so that it may fork. Each run is a child that kills itself
before a call of a given number. Another child then uses the directory as an engine. Every line
of the output is the result of one kill, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.putenv("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded: no threads before the fork

from kvtier.config import SharedDirTierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import make_value_buffers, make_values, version_of
from kvtier.tiers.shared import SharedContext
from kvtier.tiers.shared.dir_io import DirIo
from kvtier.tiers.shared.shared_dir import SharedDirTier
from kvtier.types import Outcome
from tests.crash.killed_imports import KillingIo, in_child
from tests.support.faulty_dir import FaultyDirIo

PAYLOAD = 8192
CAPACITY = 6
KEYS = [f"kv1-space/0-{number:064x}" for number in range(10)]


class KillingDirIo(FaultyDirIo, KillingIo):
    """Kills this process before the call of a given number, also of a shared directory."""


def open_tier(path: Path, io: DirIo) -> SharedDirTier:
    options = SharedDirTierConfig(path=path, capacity_bytes=CAPACITY * (PAYLOAD + 4096))
    pool = IoPool(1, name="kvtier-victim")
    tier = SharedDirTier(options, SharedContext(PAYLOAD, pool), io)
    tier.prepare()
    return tier


async def put_all(tier: SharedDirTier) -> None:
    """Store values, replace some, and go on until some are evicted."""
    await tier.put(KEYS[:3], make_values(KEYS[:3], PAYLOAD, version=1))
    await tier.put(KEYS[:2], make_values(KEYS[:2], PAYLOAD, version=2))
    for key in KEYS[3:]:
        outcomes = [Outcome.REFUSED]
        while outcomes == [Outcome.REFUSED]:
            await asyncio.sleep(0)  # the eviction takes a turn of the loop
            outcomes = list(await tier.put([key], make_values([key], PAYLOAD, version=1)))


async def versions(tier: SharedDirTier) -> list[int]:
    """Return the version of each value, 0 if it is missing; all others must be whole."""
    into = make_value_buffers(len(KEYS), PAYLOAD)
    outcomes = await tier.get(KEYS, into)
    assert {*outcomes} <= {Outcome.DONE, Outcome.MISSING}, outcomes
    return [
        version_of(key, value) if outcome is Outcome.DONE else 0
        for key, value, outcome in zip(KEYS, into, outcomes, strict=True)
    ]


def killed_at(number: int, path: Path) -> bool:
    """Put values, killed before call ``number``; return whether the puts ended first."""

    def run() -> bool:
        asyncio.run(put_all(open_tier(path, KillingDirIo(number))))
        return True

    return in_child(run) is True


def use(path: Path) -> dict[str, Any]:
    """Use the directory as the next engine does."""

    async def look() -> dict[str, Any]:
        tier = open_tier(path, DirIo())
        found = await versions(tier)
        assert list(await tier.contains(KEYS)) == [version > 0 for version in found]
        await put_all(tier)
        later = await versions(tier)
        await tier.aclose()
        return {"found": found, "later": later}

    return asyncio.run(look()) | {"files": len(list(path.rglob("*.kv")))}


def main() -> None:
    work = Path(sys.argv[1])
    number, has_ended = 0, False
    while not has_ended:
        path = work / f"shared-{number}"
        has_ended = killed_at(number, path)
        print(json.dumps(in_child(lambda at=path: use(at))))  # type: ignore[misc] # noqa: T201
        number += 1


if __name__ == "__main__":
    main()
