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

from kvtier.config import ObjectTierConfig, parse_tier
from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.tiers.shared import SharedContext, SharedTier
from kvtier.tiers.shared.object_store import ObjectTier
from tests.support.s3_server import BUCKET, CephServer, MotoServer, S3Server

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


class S3Tests(ObjectTierTests):
    """The contract over HTTP."""

    server: S3Server

    @override
    def section(self, directory: Path) -> str:
        return (
            f"url: s3://{BUCKET}/{PREFIX}\nsettings: {self.server.settings}\n"
            "request_timeout: 60s"
        )

    @override
    def store(self) -> ObjectStore:
        return self.server.store(PREFIX)


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """One server for all tests."""
    with MotoServer() as server:
        yield server


class TestMotoObjectTier(S3Tests):
    @pytest.fixture(autouse=True)
    def _use(self, moto: S3Server) -> None:
        self.server = moto


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One cluster for all tests."""
    if not CephServer.is_installed():
        pytest.skip("radosgw, ceph-mon and ceph-osd are not installed")
    with CephServer(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.mark.slow
class TestCephObjectTier(S3Tests):
    @pytest.fixture(autouse=True)
    def _use(self, ceph: S3Server) -> None:
        self.server = ceph

    def test_wrong_credentials_are_refused_at_the_start(self, text: str, pool: IoPool) -> None:
        wrong = text.replace("secret_access_key: 'secret'", "secret_access_key: 'other'")
        options = parse_tier(wrong, ObjectTierConfig, source="a test")
        with pytest.raises(ConfigError, match="SignatureDoesNotMatch; give the engine cred"):
            ObjectTier.open(options, SharedContext(self.payload_nbytes, pool))


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
