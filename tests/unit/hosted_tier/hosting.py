"""How a hosted tier is opened, and its process killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from kvtier.config import NvmeTierConfig
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, connection
from kvtier.types import Outcome

if TYPE_CHECKING:
    import pytest

SLOT = 8192
CAPACITY = 16
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT


async def opened(options: NvmeTierConfig, context: TierContext) -> HostedTier:
    return await context.pool.run(lambda: HostedTier.open(options, context), priority=0)


def kill(tier: HostedTier, number: signal.Signals) -> None:
    assert tier.host_pid is not None
    os.kill(tier.host_pid, number)


def let_no_host_end(monkeypatch: pytest.MonkeyPatch, *, patience_s: float) -> None:
    """Have hosts seem to be stuck in the operating system, which is waited for so long."""

    async def never_ends(process: object) -> bool:
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(connection, "aend", never_ends)
    monkeypatch.setattr(connection, "_BURIAL_TIMEOUT_S", patience_s)
