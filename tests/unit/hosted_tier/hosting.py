"""How a hosted tier is opened, and its process killed."""

from __future__ import annotations

import os
import signal

from kvtier.config import NvmeTierConfig
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.types import Outcome

SLOT = 8192
CAPACITY = 16
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT


async def opened(options: NvmeTierConfig, context: TierContext) -> HostedTier:
    return await context.pool.run(lambda: HostedTier.open(options, context), priority=0)


def kill(tier: HostedTier, number: signal.Signals) -> None:
    assert tier.host_pid is not None
    os.kill(tier.host_pid, number)
