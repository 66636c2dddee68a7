"""Object stores against the contract of shared tiers: S3 over HTTP, and a directory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import obstore
import pytest
from obstore.store import LocalStore, ObjectStore
from typing_extensions import override

from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.tiers.shared import SharedTier
from kvtier.tiers.shared.object_store import ObjectTier
from tests.support.s3_server import BUCKET, S3Server

PREFIX = "some/prefix"


class ObjectTierTests(SharedTierContract):
    """The contract, where a client without kvtier reads and damages the objects."""

    tier_class: ClassVar[type[SharedTier]] = ObjectTier

    @abstractmethod
    def store(self) -> ObjectStore: ...

    @override
    async def stored_bytes(self, harness: SharedTierHarness, key: str) -> bytes:
        found = await obstore.get_async(self.store(), key)
        return bytes(await found.bytes_async())

    @override
    async def replace_stored(self, harness: SharedTierHarness, key: str, value: bytes) -> None:
        await obstore.put_async(self.store(), key, value)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """One server for all tests."""
    with S3Server() as server:
        yield server


class TestS3ObjectTier(ObjectTierTests):
    @pytest.fixture(autouse=True)
    def _use(self, server: S3Server) -> None:
        self.server = server

    @override
    def section(self, directory: Path) -> str:
        return (
            f"url: s3://{BUCKET}/{PREFIX}\nsettings: {self.server.settings}\n"
            "request_timeout: 60s"
        )

    @override
    def store(self) -> ObjectStore:
        return self.server.store(PREFIX)


class TestDirectoryObjectTier(ObjectTierTests):
    @pytest.fixture(autouse=True)
    def _use(self, directory: Path) -> None:
        self.root = directory

    @override
    def section(self, directory: Path) -> str:
        return f"url: file://{directory}"

    @override
    def store(self) -> ObjectStore:
        return LocalStore(self.root)
