"""The contract of a shared tier.

A shared tier keeps chunks that many engines store and load, for example in other machines'
memory, an object store or a shared directory. Chunks are addressed by key. The service decides
its capacity and its evictions, and other engines add and remove chunks at any time. So any
chunk may disappear at any time, and a missing chunk is no failure.

A *value* is what the service keeps for a key: the chunk's bytes, followed by their proof.
:class:`~kvtier.tiers.shared.keyed_tier.KeyedTier` makes the proof of each value to put, and
verifies the proof of each value that was read. A shared tier only moves bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from kvtier.config import SharedTierConfig
from kvtier.tiers.shared.proof import PROOF_NBYTES
from kvtier.types import Outcome

if TYPE_CHECKING:
    from kvtier.os.iopool import IoPool

__all__ = ["SharedContext", "SharedTier", "Value", "with_proof_buffers"]


class Value(NamedTuple):
    """The buffers of one value. The service keeps the payload followed by the proof.

    Attributes:
        payload: The bytes of the chunk, aligned to 4096 bytes in the shared memory.
        proof: :data:`~kvtier.tiers.shared.proof.PROOF_NBYTES` bytes.
    """

    payload: memoryview
    proof: memoryview


def with_proof_buffers(payloads: Sequence[memoryview]) -> list[Value]:
    """Return one value for each payload. The proofs are new, zeroed buffers."""
    proofs = memoryview(bytearray(PROOF_NBYTES * len(payloads)))
    return [
        Value(payload, proofs[at * PROOF_NBYTES : (at + 1) * PROOF_NBYTES])
        for at, payload in enumerate(payloads)
    ]


@dataclass(frozen=True, slots=True)
class SharedContext:
    """Arguments of :meth:`SharedTier.open` besides the tier's own options.

    Attributes:
        payload_nbytes: Bytes of one chunk, a multiple of 4096.
        pool: The caller's threads, for the tier's blocking calls.
        memory: The memory that contains all payloads, as this process maps it; None if payloads
            may be anywhere. A client that must register memory does so when the tier opens.
        scratch: Memory for one more payload, to register too; None if there is none.
        is_nbytes_known: Whether the engines' chunks are known to have ``payload_nbytes`` bytes.
            If not, ``contains`` also counts values of other sizes.
    """

    payload_nbytes: int
    pool: IoPool
    memory: memoryview | None = None
    scratch: memoryview | None = None
    is_nbytes_known: bool = True


class SharedTier(ABC):
    """A service that keeps values by key, for many engines.

    Keys are text of at most 200 characters: letters, digits, ``-``, and ``/`` between two other
    characters. All coroutines run on one event loop. They must not block that loop: blocking
    calls go through :class:`kvtier.os.iopool.IoPool`. Batches may run concurrently. Every call
    must end within bounded time even if the service hangs, because the call's buffers stay in
    use until the call ends.
    """

    Options: ClassVar[type[SharedTierConfig]]
    """The class that parses the tier's section of the YAML file. In that section, ``kind`` is
    the tier's entry point in the group ``kvtier.shared_tiers``, or the tier's class as
    ``module:Class``."""

    asks_before_adding: bool = True
    """Whether kvtier calls :meth:`contains` before :meth:`add`. False if the question costs as
    much as :meth:`add`, which finds stored values too."""

    @classmethod
    @abstractmethod
    def open(cls, options: SharedTierConfig, context: SharedContext) -> Self:
        """Return a client of the service. This call blocks for some seconds at most.

        If the service is unreachable now, this method still returns a client. The client's
        calls fail until the service is reachable.

        Args:
            options: An instance of :attr:`Options`.
            context: The size of a chunk, threads and memory.

        Raises:
            ConfigError: The options cannot work here; the message says what to do.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return for each key whether the service has a value.

        Raises:
            Exception: The service did not answer.

        Cancellation:
            Has no effect on the service.
        """

    async def contains_leading(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return for each key of a prompt whether the service has a value; may infer answers.

        The keys are those of consecutive chunks of one prompt. Engines store a prompt's chunks
        in order, so usually the service has the first chunks and lacks the others. If each key
        costs a request, a tier may ask for few keys and infer the answers for the others. A
        wrong answer costs a miss.

        Raises:
            Exception: The service did not answer.
        """
        return await self.contains(keys)

    @abstractmethod
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        """Read the value of ``keys[i]`` into the buffers ``into[i]``.

        Returns:
            For each key: DONE, MISSING if the service has no value of the buffers' size, or
            FAILED. CORRUPT if it has a value of another size that :meth:`add` would keep. The
            content of a buffer is undefined unless its outcome is DONE.

        Raises:
            Exception: The service did not answer; every chunk counts as failed.

        Cancellation:
            Deferred until nothing writes into the buffers.
        """

    async def add(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        """Store the value of each key; keep or replace an existing value.

        Both values are good, so either may stay. Override this method if a replacement has a
        cost, for example for engines that read the existing value.

        See :meth:`put` for the rest.
        """
        return await self.put(keys, values)

    @abstractmethod
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        """Store the value of each key, and replace an existing value.

        A new value is visible whole or not at all. While a value is replaced, others may get
        mixed bytes, which the proof detects. The service may evict any value.

        Returns:
            For each key: DONE, FAILED, or REFUSED if the service has no room.

        Raises:
            Exception: The service did not answer; every chunk counts as failed.

        Cancellation:
            Deferred until nothing reads the buffers.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release the client's connections and memory. Idempotent.

        No other call may be running, and no call may follow.
        """
