"""Errors that kvtier raises on purpose.

::

    KvtierError
     +- ConfigError              an invalid file, option or environment
     +- UnsupportedError         an engine, a layout or a platform kvtier does not support
     +- ClosedError              used after close
     +- CapacityError            not enough space
     +- CudaError                a call of the CUDA driver failed
     +- TierError                a tier could not do its work; has .tier
         +- TierUnavailableError the medium failed or did not answer
         +- CacheLockedError     another process owns the cache; has .holder
         +- CacheDamagedError    the cache's files are missing, foreign or inconsistent

A miss is not an error: it is a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CacheDamagedError",
    "CacheLockedError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "CudaError",
    "KvtierError",
    "TierError",
    "TierUnavailableError",
    "UnsupportedError",
    "did_you_mean",
]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean x?`` for a similar known word; empty if there is none."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class KvtierError(Exception):
    """Base of all errors that kvtier raises on purpose."""


class ConfigError(KvtierError):
    """An invalid configuration; the message says where the error is, and names a remedy."""


class UnsupportedError(KvtierError):
    """An engine version, KV layout or platform that kvtier does not support."""


class ClosedError(KvtierError):
    """The object was closed before this call."""


class CapacityError(KvtierError):
    """A memory, a disk or a tier has too little space."""


class CudaError(KvtierError):
    """A call of the CUDA driver failed; the message names the call and CUDA's error."""


class TierError(KvtierError):
    """A tier could not do its work.

    Attributes:
        tier: Name of the tier.
    """

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"tier {tier}: {message}")
        self.tier = tier


class TierUnavailableError(TierError):
    """The medium failed, or did not answer in time."""


class CacheLockedError(TierError):
    """Another process owns the cache.

    Attributes:
        holder: Owner named in the lock file, such as ``pid 4711 on host a``.
    """

    def __init__(
        self,
        tier: str,
        path: object,
        holder: str,
        remedy: str = "one engine at a time may write a cache: stop the other engine or give "
        "this one another path",
    ) -> None:
        super().__init__(tier, f"{path} is in use by {holder}; {remedy}")
        self.holder = holder


class CacheDamagedError(TierError):
    """The cache's own files are missing, foreign or inconsistent."""
