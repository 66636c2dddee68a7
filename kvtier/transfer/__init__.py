"""The transfer engine carries out the manager's jobs: it moves chunks between tiers."""

from __future__ import annotations

from kvtier.transfer.bounce_buffer import BetweenTiers, BounceBuffer, bounce_slots_for
from kvtier.transfer.channel import Breaker, ChannelStatistics, EngineLimits
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.routes import AskTier, FromTier, Route, SlotMemory, ToTier

__all__ = [
    "AskTier",
    "BetweenTiers",
    "BounceBuffer",
    "Breaker",
    "ChannelStatistics",
    "EngineLimits",
    "FromTier",
    "Route",
    "SlotMemory",
    "ToTier",
    "TransferEngine",
    "bounce_slots_for",
]
