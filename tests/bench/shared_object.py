"""``python -m tests.bench.shared_object --tier KIND``: an object tier beside obstore alone.

The kinds are ``object`` (Ceph's gateway, which must be installed), ``object-moto`` (moto)
and ``object-file`` (a directory). obstore's calls run in as many threads as the tier has
connections. It leaves what it gets in its own memory; the tier delivers it in the caller's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, Self

import obstore
from obstore.store import LocalStore, ObjectStore, S3Store
from typing_extensions import override

from kvtier.tiers.shared import SharedTier
from kvtier.tiers.shared.object_store import ObjectTier
from tests.bench.shared import CHUNK_NBYTES, SERVICES, Service, main
from tests.support.s3_server import BUCKET, CephServer, MotoServer, S3Server

CONNECTIONS: Final = 16


class Objects(Service):
    """An object store.

    Args:
        url: URL of the prefix that both sides use.
        settings: Settings of the tier.
        store: obstore's client of the same prefix.
        threads: Threads for obstore's calls.
    """

    tier_class: ClassVar[type[SharedTier]] = ObjectTier

    def __init__(
        self, url: str, settings: str, store: ObjectStore, threads: ThreadPoolExecutor
    ) -> None:
        self._url = url
        self._settings = settings
        self._store = store
        self._threads = threads

    @override
    def section(self) -> str:
        return (
            f"kind: object\nurl: {self._url}\nsettings: {self._settings}\n"
            f"connections: {CONNECTIONS}\nrequest_timeout: 2min"
        )

    @override
    def put(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        def one(name: str, payload: memoryview) -> None:
            obstore.put(self._store, name, payload, use_multipart=False)

        list(self._threads.map(one, names, payloads))

    @override
    def get(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        def one(name: str) -> int:
            return len(obstore.get(self._store, name).bytes())

        if {*self._threads.map(one, names)} != {CHUNK_NBYTES}:
            raise RuntimeError("get returned an object of another size")

    @override
    def clear(self) -> None:
        for listed in obstore.list(self._store):
            obstore.delete(self._store, [each["path"] for each in listed])


class S3Objects(Objects):
    """A bucket of a server on this host."""

    @classmethod
    @override
    @contextmanager
    def run(cls, directory: Path, memory: memoryview) -> Iterator[Self]:
        with cls.server(directory) as server, ThreadPoolExecutor(CONNECTIONS) as threads:
            store = S3Store(
                BUCKET,
                prefix="bench",
                client_options={"allow_http": True},
                endpoint=server.endpoint,
                access_key_id="id",
                secret_access_key="secret",
                unsigned_payload=True,
            )
            yield cls(f"s3://{BUCKET}/bench", server.settings, store, threads)

    @classmethod
    @abstractmethod
    def server(cls, directory: Path) -> S3Server: ...


class MotoObjects(S3Objects):
    """moto's server, which is one Python process."""

    @classmethod
    @override
    def server(cls, directory: Path) -> S3Server:
        return MotoServer()


class CephObjects(S3Objects):
    """Ceph's object gateway, whose storage daemon keeps objects in memory."""

    @classmethod
    @override
    def server(cls, directory: Path) -> S3Server:
        return CephServer(directory / "ceph")


class DirectoryObjects(Objects):
    """A directory for temporary files."""

    @classmethod
    @override
    @contextmanager
    def run(cls, directory: Path, memory: memoryview) -> Iterator[Self]:
        root = directory / "objects"
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            yield cls(f"file://{root}", "{}", LocalStore(root, mkdir=True), threads)


SERVICES["object"] = CephObjects
SERVICES["object-moto"] = MotoObjects
SERVICES["object-file"] = DirectoryObjects

if __name__ == "__main__":
    main()
