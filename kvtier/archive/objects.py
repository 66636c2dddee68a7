"""The location of an archive in S3, Google Cloud Storage or Azure, accessed by obstore.

The module also opens any location by path or URL. Each provider defines which environment
variables have the credentials and the endpoint. A part is small enough for one request. So the
module avoids multipart uploads, which would need a clean-up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kvtier.archive.locations import Directory, Location
from kvtier.errors import ConfigError
from kvtier.os.object_stores import SCHEMES, explain, open_store
from kvtier.printable import printable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["Bucket", "open_bucket", "open_location"]

_CLIENT: Final[ClientConfig] = {
    "connect_timeout": timedelta(seconds=10),
    "timeout": timedelta(seconds=120),
    "allow_http": True,  # only an endpoint that the environment names is without TLS
}
"""Settings of the HTTP client. They apply to each request."""
_RETRY: Final[RetryConfig] = {"max_retries": 5, "retry_timeout": timedelta(minutes=3)}
_NAMES_AT_ONCE: Final = 1000


class Bucket(Location):
    """The objects below a prefix of a bucket.

    Args:
        store: obstore's client of the bucket. The client adds the prefix.
        url: URL of the bucket with the prefix, for messages.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url

    @override
    def __str__(self) -> str:
        return printable(self._url)

    @override
    def names(self) -> dict[str, int]:
        import obstore  # noqa: PLC0415 - an optional extra

        with self._explained(""):
            listed = obstore.list(self._store, chunk_size=_NAMES_AT_ONCE)
            return {each["path"]: each["size"] for some in listed for each in some}

    @override
    def read(self, name: str, into: memoryview) -> int:
        import obstore  # noqa: PLC0415 - an optional extra

        with self._explained(name):
            found = memoryview(obstore.get_range(self._store, name, start=0, end=len(into)))
        into[: len(found)] = found.cast("B")
        return len(found)

    @override
    def write(self, name: str, source: memoryview, nbytes: int) -> None:
        import obstore  # noqa: PLC0415 - an optional extra

        with self._explained(name):
            obstore.put(self._store, name, source[:nbytes], use_multipart=False)

    @override
    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        yield  # object stores have no locks; a part never replaces another one

    @override
    def sync(self) -> None:
        """Return at once, because an accepted object is durable."""

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Convert obstore's errors to errors that name the object and a remedy."""
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an optional extra

        try:
            yield
        except BaseError as error:
            remedy = "check its name, the credentials in the environment and the network"
            where = f"{self}/{name}" if name else str(self)
            raise ConfigError(f"{where}: {explain(error)}; {remedy}") from error


def open_location(text: str) -> Location:
    """Return the location at a path or a URL.

    Raises:
        ConfigError: The URL does not name an object store, or the package for object stores is
            missing.
    """
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Directory(Path(text))
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(f"{printable(text)}: no such location; give a path, or {known}")
    return open_bucket(text)


def open_bucket(url: str) -> Bucket:
    """Return the location at the URL of a bucket and a prefix.

    Raises:
        ConfigError: The package obstore is missing, or the URL or the environment is wrong.
    """
    return Bucket(open_store(url, client=_CLIENT, retry=_RETRY), url.rstrip("/"))
