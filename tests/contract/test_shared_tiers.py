"""Every shared tier kvtier has, and the fake, against one contract."""

from __future__ import annotations

from typing import ClassVar

from kvtier.testing.memory_shared_tier import MemorySharedTier
from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.tiers.shared import SharedTier


class TestMemorySharedTier(SharedTierContract):
    tier_class: ClassVar[type[SharedTier]] = MemorySharedTier
