"""Every shared tier kvtier has, and the fake, against one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.tiers.shared import SharedTier
from kvtier.tiers.shared.shared_dir import SharedDirTier
from tests.support.memory_shared_tier import MemorySharedTier

SHARED_MEMORY = Path("/dev/shm")


class TestMemorySharedTier(SharedTierContract):
    tier_class: ClassVar[type[SharedTier]] = MemorySharedTier


class SharedDirContract(SharedTierContract):
    tier_class: ClassVar[type[SharedTier]] = SharedDirTier
    direct_io: ClassVar[Literal["auto", "require", "off"]] = "require"

    @pytest.fixture(autouse=True)
    def _path(self, directory: Path) -> None:
        self.path = directory

    def section(self, directory: Path) -> str:
        return f"path: {directory}\ncapacity: 1GiB\ndirect_io: {self.direct_io}"

    def file_of(self, key: str) -> Path:
        [file] = self.path.rglob(f"{key.replace('/', '_')}.kv")
        return file

    async def stored_bytes(self, harness: SharedTierHarness, key: str) -> bytes:
        return await harness.run(lambda: self.file_of(key).read_bytes())

    async def replace_stored(self, harness: SharedTierHarness, key: str, value: bytes) -> None:
        await harness.run(lambda: self.file_of(key).write_bytes(value))


class TestDirectSharedDir(SharedDirContract):
    pass


class TestBufferedSharedDir(SharedDirContract):
    """On a file system in memory, which needs no disk."""

    direct_io: ClassVar[Literal["auto", "require", "off"]] = "off"

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        if not SHARED_MEMORY.is_dir():
            pytest.skip("no file system in memory")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            yield Path(directory) / "store"
