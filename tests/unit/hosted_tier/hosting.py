"""How a hosted tier is opened, and its process killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import TYPE_CHECKING, ClassVar

from kvtier.config import TierConfig
from kvtier.testing.file_tier import FileTier, FileTierConfig
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, connection, process
from kvtier.types import Outcome

if TYPE_CHECKING:
    import pytest

SLOT = 8192
CAPACITY = 16
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT


class FarConfig(FileTierConfig):
    kind: str = "tests.unit.hosted_tier.hosting:FarTier"


class FarTier(FileTier):
    """Claims that its medium is on another machine."""

    Options: ClassVar[type[TierConfig]] = FarConfig
    is_local = False


async def opened(options: TierConfig, context: TierContext) -> HostedTier:
    return await context.pool.run(lambda: HostedTier.open(options, context), priority=0)


def kill(tier: HostedTier, number: signal.Signals) -> None:
    assert tier.host_pid is not None
    os.kill(tier.host_pid, number)


def let_no_host_end(
    monkeypatch: pytest.MonkeyPatch, *, patience_s: float, until: asyncio.Event | None = None
) -> None:
    """Have hosts seem to be stuck in the operating system, which is waited for so long.

    They are so until the event is set, if there is one.
    """
    stuck = until or asyncio.Event()

    async def ends_late(ending: subprocess.Popen[bytes]) -> bool:
        await stuck.wait()
        return await process.aend(ending)

    monkeypatch.setattr(connection, "aend", ends_late)
    monkeypatch.setattr(connection, "_END_TIMEOUT_S", patience_s)
