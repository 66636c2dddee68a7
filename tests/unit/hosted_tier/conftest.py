"""A tier in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import Arena, TierHarness
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, process
from kvtier.types import LayoutFingerprint
from tests.unit.hosted_tier.hosting import CAPACITY, SLOT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests run on uvloop by night, for a process takes most of a second to start.

    By day the tier's contract does; and kvtier's own threads run what asyncio gives them, which
    is uvloop only where an application has installed it.
    """
    for item in items:
        if item.path.parent == HERE and "uvloop" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 << 20)  # a host maps all of it at its start
    yield arena
    arena.close()


@pytest.fixture
def context(pool: IoPool, arena: Arena) -> TierContext:
    return TierContext(
        SLOT, LayoutFingerprint({"model": "m"}), pool, piece_nbytes=SLOT, memory=arena.shared
    )


@pytest.fixture
def options(tmp_path: Path) -> NvmeTierConfig:
    return NvmeTierConfig(
        path=tmp_path / "store", capacity_bytes=CAPACITY * SLOT, direct_io="off"
    )


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[process.HostProcess]:
    """The hosts that were started, oldest first."""
    started: list[process.HostProcess] = []
    start = process.HostProcess.start

    def start_and_note(
        options: TierConfig, context: TierContext
    ) -> tuple[process.HostProcess, process.Opened]:
        found = start(options, context)
        started.append(found[0])
        return found

    monkeypatch.setattr(process.HostProcess, "start", start_and_note)
    return started


@pytest.fixture
async def harness(
    options: NvmeTierConfig,
    context: TierContext,
    arena: Arena,
    hosts: list[process.HostProcess],
) -> AsyncIterator[TierHarness[HostedTier]]:
    harness = TierHarness(lambda: HostedTier.open(options, context), context.pool, arena)
    await harness.open()
    yield harness
    await harness.tier.aclose()
