"""Every storage tier kvtier has, and the fake, against one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.testing.faulty_tier import FaultyTier, FaultyTierConfig
from kvtier.testing.memory_tier import MemoryMedium, MemoryTier, MemoryTierConfig
from kvtier.testing.tier_contract import StorageTierContract
from kvtier.tiers import StorageTier, TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.tiers.slab import SlabTier

SHARED_MEMORY = Path("/dev/shm")


DirectIo = Literal["auto", "require", "off"]
Checksum = Literal["xxh3", "off"]
Durability = Literal["process", "power"]


class SlabContract(StorageTierContract):
    direct_io: ClassVar[DirectIo] = "off"
    checksum: ClassVar[Checksum] = "xxh3"
    durability: ClassVar[Durability] = "process"

    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        options = NvmeTierConfig(
            path=directory,
            capacity_bytes=capacity_slots * context.slot_nbytes,
            direct_io=self.direct_io,
            checksum=self.checksum,
            durability=self.durability,
        )
        return SlabTier.open(options, context)


class TestDirectSlab(SlabContract):
    direct_io: ClassVar[DirectIo] = "require"


class TestSlabWithLargeSlots(SlabContract):
    slot_nbytes = 200 << 10


class InMemory(SlabContract):
    """On a file system in memory: no disk to wait for, and tmpfs is one users have."""

    @pytest.fixture(autouse=True)
    def _in_memory(self) -> Iterator[None]:
        if not SHARED_MEMORY.is_dir():
            pytest.skip("no file system in memory")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            self.directory = Path(directory)
            yield

    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        return super().open_tier(self.directory / "store", context, capacity_slots)


class TestBufferedSlab(InMemory):
    pass


class TestFaultySlabWithoutFaults(InMemory):
    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        options = FaultyTierConfig(
            path=self.directory / "store",
            capacity_bytes=capacity_slots * context.slot_nbytes,
            plan=self.directory / "plan",
            ledger=self.directory / "ledger",
        )
        return FaultyTier.open(options, context)


class TestUncheckedSlab(InMemory):
    checksum: ClassVar[Checksum] = "off"


class TestPowerSafeSlab(InMemory):
    durability: ClassVar[Durability] = "power"


class TestHostedSlab(InMemory):
    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        options = NvmeTierConfig(
            path=self.directory / "store",
            capacity_bytes=capacity_slots * context.slot_nbytes,
            direct_io="off",
        )
        return HostedTier.open(options, context)


class TestMemoryTier(StorageTierContract):
    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.medium = MemoryMedium()

    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        options = MemoryTierConfig(capacity_bytes=capacity_slots * context.slot_nbytes)
        return MemoryTier(options, context, self.medium)
