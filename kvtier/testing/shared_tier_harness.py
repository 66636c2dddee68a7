"""A harness for tests of a shared tier, with several clients and versioned values."""

from __future__ import annotations

import random
import secrets
import string
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from typing_extensions import override

from kvtier.config import SharedTierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import Arena, make_buffers
from kvtier.tiers.shared import SharedContext, SharedTier, Value, with_proof_buffers
from kvtier.tiers.shared.proof import is_proof_of, make_proof
from kvtier.types import Outcome

__all__ = [
    "KEY_CHARACTERS",
    "RecordingTier",
    "SharedTierHarness",
    "make_value_buffers",
    "make_values",
    "version_of",
]

KEY_CHARACTERS = string.ascii_letters + string.digits + "-/"
"""All characters that a key may have. A key neither starts nor ends with a slash."""

T = TypeVar("T")
Opener: TypeAlias = Callable[[int], SharedTier]
"""Takes the size of a payload in bytes and opens a client. The call may block."""

_VERSION_NBYTES = 8


def make_values(
    keys: Sequence[str], payload_nbytes: int, arena: Arena | None = None, *, version: int = 0
) -> list[Value]:
    """Return a distinct value, with proof, for each key. The payloads contain ``version``."""
    values = make_value_buffers(len(keys), payload_nbytes, arena)
    for key, value in zip(keys, values, strict=True):
        value.payload[:] = _payload(key, version, payload_nbytes)
        value.proof[:] = make_proof(key, value.payload)
    return values


class SharedTierHarness:
    """Opens clients of one service, and puts, gets and verifies values.

    Attributes:
        tier: The first client.
        other: Another client.
    """

    tier: SharedTier
    other: SharedTier

    def __init__(
        self, opener: Opener, pool: IoPool, arena: Arena, *, payload_nbytes: int
    ) -> None:
        self._opener = opener
        self._pool = pool
        self._arena = arena
        self._payload_nbytes = payload_nbytes
        self._space = f"contract-{secrets.token_hex(6)}"
        self._clients: list[SharedTier] = []

    async def open(self) -> None:
        """Open both clients."""
        self.tier = await self.client()
        self.other = await self.client()

    async def client(self, payload_nbytes: int | None = None) -> SharedTier:
        """Open another client, for payloads of ``payload_nbytes`` bytes."""
        nbytes = payload_nbytes or self._payload_nbytes
        client = await self.run(lambda: self._opener(nbytes))
        self._clients.append(client)
        return client

    async def run(self, call: Callable[[], T]) -> T:
        """Run a blocking call of a test in a thread."""
        return await self._pool.run(call, priority=0)

    async def aclose(self) -> None:
        """Close all clients."""
        while self._clients:
            await self._clients.pop().aclose()

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """Return one key per number, in the form of an engine's keys.

        Each harness has its own keys, so that tests may share a service.
        """
        return [
            f"{self._space}/0-{random.Random(number).randbytes(32).hex()}" for number in numbers
        ]

    def buffers(self, count: int, payload_nbytes: int | None = None) -> list[Value]:
        """Return zeroed buffers for ``count`` values."""
        return make_value_buffers(count, payload_nbytes or self._payload_nbytes, self._arena)

    def values(self, keys: Sequence[str], *, version: int = 0) -> list[Value]:
        """Return version ``version`` of the values of ``keys``."""
        return make_values(keys, self._payload_nbytes, self._arena, version=version)

    async def put(
        self, keys: Sequence[str], *, version: int = 0, client: SharedTier | None = None
    ) -> list[Outcome]:
        """Put the values of ``keys`` and return the outcomes."""
        return list(await (client or self.tier).put(keys, self.values(keys, version=version)))

    async def get(
        self,
        keys: Sequence[str],
        *,
        client: SharedTier | None = None,
        into: Sequence[Value] | None = None,
    ) -> list[int | Outcome]:
        """Get the values of ``keys`` into the buffers ``into``, or into new buffers.

        Returns:
            For each key, the version of its value if the outcome is DONE, else the outcome.

        Raises:
            AssertionError: A value with outcome DONE is incomplete, or belongs to another key.
        """
        into = into or self.buffers(len(keys))
        outcomes = await (client or self.tier).get(keys, into)
        return [
            version_of(key, value) if outcome is Outcome.DONE else outcome
            for key, value, outcome in zip(keys, into, outcomes, strict=True)
        ]


class RecordingTier(SharedTier):
    """Wraps a shared tier, which it owns, and records the keys of ``add`` and ``put``.

    Attributes:
        puts: The keys that were added or put, in the order of the calls.
        replaced: The keys that were put.
    """

    Options = SharedTierConfig

    def __init__(self, tier: SharedTier) -> None:
        self._tier = tier
        self.asks_before_adding = tier.asks_before_adding
        self.puts: list[str] = []
        self.replaced: list[str] = []

    @classmethod
    @override
    def open(cls, options: SharedTierConfig, context: SharedContext) -> RecordingTier:
        raise TypeError("give the constructor the tier to record")

    @override
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        return await self._tier.contains(keys)

    @override
    async def contains_leading(self, keys: Sequence[str]) -> Sequence[bool]:
        return await self._tier.contains_leading(keys)

    @override
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        return await self._tier.get(keys, into)

    @override
    async def add(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self.puts += keys
        return await self._tier.add(keys, values)

    @override
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self.puts += keys
        self.replaced += keys
        return await self._tier.put(keys, values)

    @override
    async def aclose(self) -> None:
        await self._tier.aclose()


def make_value_buffers(
    count: int, payload_nbytes: int, arena: Arena | None = None
) -> list[Value]:
    """Return zeroed buffers for ``count`` values.

    The proofs are outside the shared memory, as in an engine.
    """
    return with_proof_buffers(make_buffers(count, payload_nbytes, arena))


def _payload(key: str, version: int, nbytes: int) -> bytes:
    noise = random.Random(f"{key} {version}").randbytes(nbytes - _VERSION_NBYTES)
    return version.to_bytes(_VERSION_NBYTES, "little") + noise


def version_of(key: str, value: Value) -> int:
    """Check that a value is complete and belongs to ``key``, and return its version."""
    version = int.from_bytes(value.payload[:_VERSION_NBYTES], "little")
    if not is_proof_of(value.proof, key, value.payload):
        raise AssertionError(f"the value of {key} is not whole")
    if value.payload != _payload(key, version, value.payload.nbytes):
        raise AssertionError(f"wrong bytes under key {key}")
    return version
