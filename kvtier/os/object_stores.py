"""Opens an object store by URL, with obstore: S3, Google Cloud Storage, Azure or a directory.

Credentials come from the environment, by the rules of each provider. obstore is an optional
extra, so it is imported when a store is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.printable import printable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["SCHEMES", "explain", "open_store"]

SCHEMES: Final = ("s3", "gs", "az")
"""URL schemes of buckets."""
_QUERY: Final = re.compile(r"(://[^\s?]*)\?\S*")
_BODY: Final = re.compile(
    r"<\?xml.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL
)


def open_store(
    url: str,
    *,
    client: ClientConfig,
    retry: RetryConfig,
    settings: Mapping[str, str] | None = None,
) -> ObjectStore:
    """Return a client for ``url``, which names a bucket and a prefix, or a directory.

    This function sends no request. For a URL ``file://`` it creates the directory.

    Args:
        url: The URL.
        client: Settings of the HTTP client.
        retry: Number and times of retries.
        settings: Settings of this kind of store, besides those in the environment.

    Raises:
        ConfigError: The package obstore is missing, or the URL, a setting or the environment is
            wrong.
    """
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an optional extra
        from obstore.store import from_url  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        remedy = "install it with: pip install 'kvtier[objects]'"
        raise ConfigError(f"{printable(url)} needs the package obstore; {remedy}") from error
    given: dict[str, Any] = dict(settings or {})
    if url.startswith("file:"):
        given["mkdir"] = True
    try:
        return from_url(url, client_options=client, retry_config=retry, **given)
    except (BaseError, OSError, ValueError) as error:
        where = "check the URL, the settings" if settings else "check the URL"
        remedy = f"{where} and the credentials in the environment"
        raise ConfigError(f"{printable(url)}: {explain(error)}; {remedy}") from error


def explain(error: Exception) -> str:
    """Return the message of an error of obstore as one line.

    The line omits debugging output. It also omits the queries of URLs, which may contain
    secrets.
    """
    text = str(error).partition("\n\nDebug source:")[0]
    text = _QUERY.sub(r"\1", _BODY.sub(r"\1: \2", text))
    return printable(text.partition("\n")[0].rstrip(" .:"))
