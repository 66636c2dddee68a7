"""Mooncake's client library: the methods that kvtier calls, and its settings."""

# ruff: noqa: D102, N802 - the library's own names, which it documents

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol, cast

from kvtier.config import MooncakeTierConfig, set_default_variables
from kvtier.errors import ConfigError

__all__ = ["Library", "Replica", "Replication", "Store", "load_library"]

_LANES: Final = 16
"""Number of connections to each machine. When a machine stalls, all its connections fail at the
same time."""


class _Place(Protocol):
    size: int


class _Memory(Protocol):
    buffer_descriptor: _Place


class Replica(Protocol):
    """One copy of a value."""

    def is_memory_replica(self) -> bool: ...
    def get_memory_descriptor(self) -> _Memory: ...


class Replication(Protocol):
    """The settings of a value's copies."""

    replica_num: int


class Store(Protocol):
    """The library's client. Results are one code per key; negative codes are errors."""

    def setup(self, config: dict[str, str]) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], *, force: bool) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]: ...
    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Replication,
    ) -> list[int]: ...
    def close(self) -> int: ...


class Library(Protocol):
    """The Python module ``mooncake.store``."""

    def MooncakeDistributedStore(self) -> Store: ...
    def ReplicateConfig(self) -> Replication: ...


def load_library(options: MooncakeTierConfig) -> Library:
    """Import the library with the timeouts of ``options``.

    Raises:
        ConfigError: Mooncake is not installed.
    """
    set_default_variables(_variables(options))
    try:
        from mooncake import store  # noqa: PLC0415 - an optional extra, and slow
    except ImportError as error:
        raise ConfigError(
            f"tier {options.name}: Mooncake's client is missing ({error}): pip install "
            "'kvtier[mooncake]', or mooncake-transfer-engine-non-cuda on a host without CUDA"
        ) from error
    return cast("Library", store)


def _variables(options: MooncakeTierConfig) -> dict[str, str]:
    """Return the library's settings, as environment variables."""
    milliseconds = str(math.ceil(options.request_timeout_s * 1000))
    seconds = str(math.ceil(options.request_timeout_s))
    return {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_SLICE_TIMEOUT": seconds,
        "MC_TCP_LANES_PER_PEER": str(_LANES),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
        "MC_YLT_LOG_LEVEL": "critical",
    }
