"""Tiers in one directory, what is in them, and how their files are spoilt."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

SLOT = 4096
KEYS = make_keys(range(8))
Opener = Callable[..., SlabTier]


def fingerprint(model: str, ranks: int = 1) -> LayoutFingerprint:
    return LayoutFingerprint({"model": model, "ranks": ranks})


def close(tier: SlabTier) -> None:
    asyncio.run(tier.aclose())


def fill(tier: SlabTier, count: int = 8) -> None:
    sources = make_sources(KEYS[:count], tier.slot_nbytes)
    result = asyncio.run(tier.write(KEYS[:count], range(count), sources, purpose=Purpose.STORE))
    assert set(result.outcomes) == {Outcome.DONE}


def slots_of(tier: SlabTier) -> list[int]:
    return [slot for _, slot in tier.recovered()]


def edit_layout(own: Path, **changes: Any) -> None:
    path = own / "layout.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def damage(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return edit
