"""Blocking calls to a Mooncake Store, each with a time limit.

The client library has no deadline for a whole call. It has a deadline for each of these: the
master's answer, a connection, and each 64 KiB of a transfer.

One problem remains. After 60 s the library returns from a transfer that still makes progress,
while one of the library's threads continues to use the buffers. Only closing the client ends
that thread. So a call that fails after 60 s closes the client before it returns, and the next
call connects again.

After its first connection the library reconnects by itself, also to a restarted master. Until
the first connection, :meth:`MooncakeClient.connect` retries with back-off. Both ``setup`` and
``close`` of the library hold the interpreter's lock, for seconds if the master does not answer.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvtier.config import MooncakeTierConfig
from kvtier.errors import TierUnavailableError
from kvtier.tiers.shared.mooncake_library import Replica, Store, load_library
from kvtier.types import Outcome

__all__ = ["MooncakeClient", "address_of"]

_PROBE_S: Final = 1.0
"""Longest wait for the probe connection to the master, before the library connects."""
_FIRST_DELAY_S: Final = 1.0
_LONGEST_DELAY_S: Final = 30.0
_ABANDONED_S: Final = 50.0
"""Number of seconds after which a failed transfer may still be running. The library gives up on
a transfer after 60 s."""

_TRANSFER_FAILED: Final = -800
_WRONG_SIZE: Final = -600
"""The stored value is larger than the buffers."""
_ABSENT: Final = frozenset(
    {
        -702,  # no usable replica
        -703,  # being stored
        -704,  # no such key
        -707,  # evicted while it was read
        -710,  # no such replica
        -712,  # evicted a moment ago
    }
)
_NO_ROOM: Final = frozenset(
    {
        -101,  # no host lends memory
        -200,  # all memory is in use
    }
)
_ANSWERS: Final = {-900: "the master is not reachable", -901: "the master did not answer"}
_ALL_FAILED: Final = {**_ANSWERS, _TRANSFER_FAILED: "the host of the values did not answer"}


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class MooncakeClient:
    """A client that connects at the first call. The methods block; any thread may call them.

    Each method raises TierUnavailableError if the master or the hosts do not answer.

    Args:
        options: The tier's options.
        regions: Memory that contains all buffers; each new connection registers it.

    Raises:
        ConfigError: The client library is not installed.
    """

    def __init__(self, options: MooncakeTierConfig, regions: Sequence[memoryview]) -> None:
        self._library = load_library(options)
        self._replicas = self._library.ReplicateConfig()
        self._replicas.replica_num = options.replicas
        self._options = options
        self._regions = regions
        self._changed = threading.Condition()
        self._store: Store | None = None
        self._running = 0
        self._abandoned = 0
        self._retry_at_s = 0.0
        self._delay_s = _FIRST_DELAY_S

    def connect(self) -> None:
        """Connect to the master if there is no connection.

        Soon after a failed attempt, raise TierUnavailableError without a new attempt.
        """
        with self._changed:
            self._connected()

    def contains(self, keys: list[str]) -> list[bool]:
        """Return for each key whether the service has a value."""
        with self._connection() as store:
            codes = store.batch_is_exist(keys)
        if min(codes) < 0:
            raise self._unavailable(_ALL_FAILED.get(min(codes), f"error {min(codes)}"))
        return [code == 1 for code in codes]

    def get(
        self,
        keys: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        value_nbytes: int,
    ) -> list[Outcome]:
        """Read values of ``value_nbytes`` bytes, each into several buffers."""

        def get(store: Store) -> list[int]:
            codes = store.batch_get_into_multi_buffers(keys, addresses, sizes)
            failed = [at for at, code in enumerate(codes) if code == _TRANSFER_FAILED]
            if failed:  # so is a value that is smaller than its buffers
                replicas = store.batch_get_replica_desc([keys[at] for at in failed])
                for at in failed:
                    if not {*map(_nbytes, replicas.get(keys[at], ()))} <= {value_nbytes, None}:
                        codes[at] = _WRONG_SIZE
            return codes

        return [_got(code, value_nbytes) for code in self._transfer(get)]

    def add(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[Outcome]:
        """Store the values of ``keys``, except for keys that already have a value."""

        def add(store: Store) -> list[int]:
            return store.batch_put_from_multi_buffers(keys, addresses, sizes, self._replicas)

        return [_put(code) for code in self._transfer(add)]

    def put(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[Outcome]:
        """Store the values of ``keys``, after removing earlier values."""

        def put(store: Store) -> list[int]:
            # A master that does not answer must not remove values later.
            found = zip(keys, store.batch_is_exist(keys), strict=True)
            stored = [key for key, code in found if code == 1]
            if stored:
                store.batch_remove(stored, force=True)
            return store.batch_put_from_multi_buffers(keys, addresses, sizes, self._replicas)

        return [_put(code) for code in self._transfer(put)]

    def close(self) -> None:
        """Close the connection. No other call may be running."""
        with self._changed:
            self._disconnect()

    def _transfer(self, transfer: Callable[[Store], list[int]]) -> list[int]:
        """Run ``transfer``; return its result codes once the buffers are unused."""
        with self._connection() as store:
            begun_s = time.monotonic()
            codes = transfer(store)
            late = time.monotonic() - begun_s > _ABANDONED_S
            if late and _TRANSFER_FAILED in codes:
                self._abandon()
        if {*codes} <= _ALL_FAILED.keys():
            raise self._unavailable(_ALL_FAILED[codes[0]])
        return codes

    @contextmanager
    def _connection(self) -> Iterator[Store]:
        """Yield the library's client for one call."""
        with self._changed:
            if self._abandoned:
                raise self._unavailable("a stalled transfer is being ended")
            store = self._connected()
            self._running += 1
        try:
            yield store
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _abandon(self) -> None:
        """Close the connection to end an abandoned transfer.

        Call this method within :meth:`_connection`. This method waits until all other running
        calls have ended.
        """
        with self._changed:
            self._abandoned += 1
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._store is None or self._running == self._abandoned
            )
            self._disconnect()
            self._abandoned -= 1
            self._changed.notify_all()

    def _connected(self) -> Store:
        """Return the library's client; connect first if there is no connection."""
        if self._store is None:
            left_s = self._retry_at_s - time.monotonic()
            if left_s > 0:
                raise self._unavailable(f"no connection; next attempt in {left_s:.0f} s")
            try:
                self._store = self._set_up()
            except OSError as error:
                self._retry_at_s = time.monotonic() + self._delay_s
                self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
                raise self._unavailable(f"no connection: {error}") from error
            self._delay_s = _FIRST_DELAY_S
        return self._store

    def _set_up(self) -> Store:
        """Return a new client; raise OSError if the master or a setting cannot be used."""
        options = self._options
        host = _local_address(options.master)
        store = self._library.MooncakeDistributedStore()
        code = store.setup(
            {
                "local_hostname": options.host or host,
                "metadata_server": options.metadata,
                "master_server_addr": options.master,
                "protocol": options.protocol,
                "rdma_devices": options.devices,
                "global_segment_size": str(options.segment_bytes or 0),
                "local_buffer_size": "0",  # for values in memory that is not registered
            }
        )
        for region in self._regions if code == 0 else ():
            code = code or store.register_buffer(address_of(region), region.nbytes)
        if code != 0:
            store.close()
            raise OSError(f"the client's setup returned {code}; MC_LOG_LEVEL=INFO says why")
        return store

    def _disconnect(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _unavailable(self, problem: str) -> TierUnavailableError:
        return TierUnavailableError(
            self._options.name, f"Mooncake master {self._options.master}: {problem}"
        )


def _nbytes(replica: Replica) -> int | None:
    """Return the size of one copy of a value; None if the copy is not in memory."""
    if not replica.is_memory_replica():
        return None
    return replica.get_memory_descriptor().buffer_descriptor.size


def _got(code: int, value_nbytes: int) -> Outcome:
    if code == value_nbytes:
        return Outcome.DONE
    if code >= 0 or code == _WRONG_SIZE:
        return Outcome.CORRUPT
    return Outcome.MISSING if code in _ABSENT else Outcome.FAILED


def _put(code: int) -> Outcome:
    if code == 0:
        return Outcome.DONE
    return Outcome.REFUSED if code in _NO_ROOM else Outcome.FAILED


def _local_address(master: str) -> str:
    """Return this machine's address as seen by ``master``, or raise OSError."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as probe:
        address: str = probe.getsockname()[0]
        return address
