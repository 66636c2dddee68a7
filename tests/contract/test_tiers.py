"""Every storage tier kvtier has, and the fake, against one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.testing.file_tier import FileTier
from kvtier.testing.tier_contract import StorageTierContract
from kvtier.tiers import StorageTier, TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.tiers.slab import SlabTier
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.maintain import hold, retain_chunks
from tests.support.faulty_tier import FaultyTier
from tests.support.memory_tier import MemoryMedium, MemoryTier

SHARED_MEMORY = Path("/dev/shm")


DirectIo = Literal["auto", "require", "off"]
Durability = Literal["process", "power"]


class SlabContract(StorageTierContract):
    tier_class: ClassVar[type[StorageTier]] = SlabTier
    direct_io: ClassVar[DirectIo] = "off"
    durability: ClassVar[Durability] = "process"

    def section(self, directory: Path) -> str:
        return f"""\
path: {directory}
direct_io: {self.direct_io}
durability: {self.durability}
"""

    def retain(self, options: TierConfig, slots: Sequence[int], until: int) -> bool:
        assert isinstance(options, NvmeTierConfig)
        (space,) = find_namespaces(options.path)
        with hold(space, "close the tier"):
            with IndexReader(space, idle=True) as reader:
                entries = [
                    entry for entry in reader.entries("stored", -1) if entry.slot in slots
                ]
            retain_chunks(space, entries, until, quota_chunks=len(entries))
        return True


class TestDirectSlab(SlabContract):
    direct_io: ClassVar[DirectIo] = "require"


class TestSlabWithLargeSlots(SlabContract):
    slot_nbytes = 200 << 10


class InMemory(SlabContract):
    """On a file system in memory: no disk to wait for, and tmpfs is one users have."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Iterator[Path]:
        if not SHARED_MEMORY.is_dir():
            pytest.skip("no file system in memory")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            yield Path(directory) / "store"


class TestBufferedSlab(InMemory):
    pass


class TestFaultySlabWithoutFaults(InMemory):
    tier_class: ClassVar[type[StorageTier]] = FaultyTier

    def section(self, directory: Path) -> str:
        plan, ledger = directory.with_name("plan"), directory.with_name("ledger")
        return f"path: {directory}\nplan: {plan}\nledger: {ledger}"


class TestPowerSafeSlab(InMemory):
    durability: ClassVar[Durability] = "power"


@pytest.mark.usefixtures("forked_hosts")
class TestHostedSlab(InMemory):
    def open_tier(self, options: TierConfig, context: TierContext) -> StorageTier:
        return HostedTier.open(options, context)


class TestFileTier(StorageTierContract):
    tier_class: ClassVar[type[StorageTier]] = FileTier


class TestMemoryTier(StorageTierContract):
    tier_class: ClassVar[type[StorageTier]] = MemoryTier
    outlives_process = False

    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.medium = MemoryMedium()

    def open_tier(self, options: TierConfig, context: TierContext) -> StorageTier:
        return MemoryTier(options, context, self.medium)
