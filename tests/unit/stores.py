"""A store with an engine that a test starts, uses and stops, one call after the other."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.config import NvmeTierConfig
from kvtier.connector.groups import describe_groups
from kvtier.keys import ChunkKey
from kvtier.manager import GroupReach
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

SLOT = 8192
SLOTS = 16
KEYS = make_keys(range(3 * SLOTS))
FIELDS: dict[str, str | int] = {"model": "some/model", "tp_size": 2}
BLOCK_TOKENS = 16
GROUPS = describe_groups([0], [GroupReach(BLOCK_TOKENS)], tokens_per_hash=BLOCK_TOKENS)


class Store:
    """A store below ``root``, and the engine that has it open now."""

    def __init__(self, root: Path, pool: IoPool) -> None:
        self.root = root
        self.pool = pool
        self._tier: SlabTier | None = None
        self.directory = root / LayoutFingerprint(FIELDS).namespace()

    @property
    def index(self) -> Path:
        return self.directory / "index.sqlite"

    @property
    def tier(self) -> SlabTier:
        assert self._tier is not None
        return self._tier

    def start(self, *, slots: int = SLOTS, model: str = "", **options: Any) -> list[ChunkKey]:
        """Start an engine; returns what it finds, least recently used first."""
        fields = {**FIELDS, **({"model": model} if model else {})}
        config = NvmeTierConfig(path=self.root, capacity_bytes=slots * SLOT, **options)
        context = TierContext(SLOT, LayoutFingerprint(fields, groups=GROUPS), self.pool)
        self._tier = SlabTier.open(config, context)
        return [key for key, _ in self._tier.recovered()]

    def stop(self) -> None:
        if self._tier is not None:
            asyncio.run(self._tier.aclose())
            self._tier = None

    def put(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        sources = make_sources(keys, SLOT)
        result = asyncio.run(self.tier.write(keys, slots, sources, purpose=Purpose.STORE))
        assert set(result.outcomes) == {Outcome.DONE}

    def reset(self) -> None:
        asyncio.run(self.tier.reset())

    def fill(self, count: int = SLOTS) -> None:
        """Store ``KEYS[i]`` in slot ``i``."""
        self.put(KEYS[:count], range(count))

    def filled(self, count: int = SLOTS, **options: Any) -> Store:
        """Let an engine run, fill the store and stop."""
        self.start(**options)
        self.fill(count)
        self.stop()
        return self

    def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Read or change the index behind everybody's back."""
        connection = sqlite3.connect(self.index)
        try:
            with connection:
                return connection.execute(statement, parameters).fetchall()
        finally:
            connection.close()

    def flip(self, slot: int) -> None:
        """Change a bit of a payload behind everybody's back."""
        with (self.directory / "slots.bin").open("r+b") as file:
            file.seek(slot * SLOT + 100)
            (byte,) = file.read(1)
            file.seek(slot * SLOT + 100)
            file.write(bytes([byte ^ 1]))

    def seen(self) -> dict[str, tuple[int, ...]]:
        """Return everything about the files that a reader must not change."""
        return {
            str(path.relative_to(self.root)): (
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_mode,
            )
            for path in [self.root, *self.root.rglob("*")]
            for status in [path.lstat()]
        }
