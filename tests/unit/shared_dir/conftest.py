"""A shared directory, and engines that use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import SharedDirTierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.shared import SharedContext
from kvtier.tiers.shared.shared_dir import SharedDirTier
from tests.support.faulty_dir import FaultyDirIo
from tests.unit.ram_directory import ram_directory

PAYLOAD = 4096
FILE = 8192
"""Bytes of a value's file."""


@dataclass
class Directory:
    """A shared directory, with room for twenty values unless a test asks for another one.

    Attributes:
        path: The directory; it does not exist yet.
        now_s: Time on the engines' clock.
    """

    path: Path
    pool: IoPool
    arena: Arena
    harnesses: list[SharedTierHarness] = field(default_factory=list)
    now_s: float = 0.0

    def tier(self, io: FaultyDirIo | None = None, **options: Any) -> SharedDirTier:
        """Return one engine's access to the directory, not yet prepared."""
        options = {"direct_io": "off", "capacity_bytes": 20 * FILE, **options}
        config = SharedDirTierConfig(path=self.path, **options)
        context = SharedContext(PAYLOAD, self.pool)
        return SharedDirTier(config, context, io, clock=lambda: self.now_s)

    async def prepare(self, tier: SharedDirTier, *, timeout_s: float = 5.0) -> None:
        """Prepare one engine's access."""
        await self.pool.run(lambda: tier.prepare(timeout_s=timeout_s), priority=0)

    async def harness(self, io: FaultyDirIo | None = None, **options: Any) -> SharedTierHarness:
        """Open two engines with the same options."""

        def opened(_: int) -> SharedDirTier:
            tier = self.tier(io, **options)
            tier.prepare()
            return tier

        harness = SharedTierHarness(opened, self.pool, self.arena, payload_nbytes=PAYLOAD)
        self.harnesses.append(harness)
        await harness.open()
        return harness

    def values(self) -> list[Path]:
        """Return the files of all values, in any order."""
        return list(self.path.rglob("*.kv"))

    def temporaries(self) -> list[Path]:
        """Return the files that are being written."""
        return list(self.path.rglob("*.tmp"))


@pytest.fixture
def root() -> Iterator[Path]:
    with ram_directory() as root:
        yield root


@pytest.fixture
async def directory(root: Path, pool: IoPool) -> AsyncIterator[Directory]:
    arena = Arena(64 << 20)
    directory = Directory(root / "shared", pool, arena)
    yield directory
    for harness in directory.harnesses:
        await harness.aclose()
    arena.close()


@pytest.fixture
def io() -> FaultyDirIo:
    return FaultyDirIo()
