"""Carries out what the manager decided."""

from __future__ import annotations

from kvtier.transfer.breaker import Breaker
from kvtier.transfer.channel import ChannelStatistics, EngineLimits
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.relay import BetweenTiers, Relay, relay_slots
from kvtier.transfer.routes import FromTier, Route, SlotMemory, ToTier

__all__ = [
    "BetweenTiers",
    "Breaker",
    "ChannelStatistics",
    "EngineLimits",
    "FromTier",
    "Relay",
    "Route",
    "SlotMemory",
    "ToTier",
    "TransferEngine",
    "relay_slots",
]
