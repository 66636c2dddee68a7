"""A store's directory, and tiers that are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.os.block_io import BlockIo
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from tests.unit.slab_namespace.opening import SLOT, Opener, close, fingerprint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def own(root: Path) -> Path:
    return root / fingerprint("m").namespace()


@pytest.fixture
def open_tier(root: Path, pool: IoPool) -> Iterator[Opener]:
    opened: list[SlabTier] = []

    def open_tier(
        *,
        model: str = "m",
        ranks: int = 1,
        slots: int = 8,
        slot_nbytes: int = SLOT,
        io: BlockIo | None = None,
        path: Path = root,
        durability: Literal["process", "power"] = "process",
        on_mismatch: Literal["refuse", "remove"] = "remove",
        keep_for_s: float = 3600.0,
    ) -> SlabTier:
        options = NvmeTierConfig(
            path=path,
            capacity_bytes=slots * SLOT,
            direct_io="off",
            durability=durability,
            on_mismatch=on_mismatch,
            keep_for_s=keep_for_s,
        )
        context = TierContext(slot_nbytes, fingerprint(model, ranks), pool)
        opened.append(SlabTier.open(options, context, io=io))
        return opened[-1]

    yield open_tier
    for tier in opened:
        close(tier)
