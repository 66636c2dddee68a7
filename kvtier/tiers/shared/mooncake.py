"""A shared tier in a Mooncake Store: memory of many machines, pooled by a master.

The client moves bytes between the engine's memory and other machines' memory without a copy.
The client's calls block and cannot be cancelled. Each call ends within bounded time, because
each network operation has a timeout (:mod:`kvtier.tiers.shared.mooncake_client`) and few
transfers are in flight.

A value is a chunk's bytes, followed by the proof. Mooncake reuses the memory of a removed value
at once, even while another engine reads the value. The reader then gets a mixture of values,
and the proof detects the mixture.
"""

from __future__ import annotations

import asyncio
import functools
import mmap
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, Final, NamedTuple

from typing_extensions import override

from kvtier.config import MooncakeTierConfig, SharedTierConfig
from kvtier.errors import ClosedError, ConfigError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.tiers.shared.base import SharedContext, SharedTier, Value
from kvtier.tiers.shared.mooncake_client import MooncakeClient, address_of
from kvtier.tiers.shared.proof import PROOF_NBYTES
from kvtier.types import Outcome, Purpose

__all__ = ["MooncakeTier"]

logger = get_logger(__name__)

_CALL_CHUNKS: Final = 16
"""Largest number of chunks that one call moves. It bounds the duration of a call: when a
machine stalls, the transfers in flight fail one after the other."""
_GETS: Final = 2
"""Number of concurrent calls that get values. During the verification of one call's values, the
other call transfers."""
_PUTS: Final = 2
"""Number of concurrent calls that put values. A get never waits for these calls."""
_ARENA_NBYTES: Final = _CALL_CHUNKS * PROOF_NBYTES
"""Number of bytes for the proofs of one call."""


class _Part(NamedTuple):
    """The chunks of a batch that one call moves. Their keys are distinct."""

    first: int
    keys: list[str]
    values: Sequence[Value]


class _Arenas:
    """A pool of memory blocks, each large enough for the proofs of one call."""

    def __init__(self, memory: memoryview) -> None:
        self._free: asyncio.Queue[memoryview] = asyncio.Queue()
        for start in range(0, memory.nbytes, _ARENA_NBYTES):
            self._free.put_nowait(memory[start : start + _ARENA_NBYTES])

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[memoryview]:
        """Wait for a free memory block, and lease it to the caller."""
        arena = await self._free.get()
        try:
            yield arena
        finally:
            self._free.put_nowait(arena)


class MooncakeTier(SharedTier):
    """One engine's access to a Mooncake Store.

    Args:
        options: The tier's options.
        context: The size of a chunk, threads and memory.
        client: The blocking client; owned by this object.
        proofs: Memory for the proofs of all calls, registered with the client.
    """

    Options: ClassVar[type[SharedTierConfig]] = MooncakeTierConfig

    def __init__(
        self,
        options: MooncakeTierConfig,
        context: SharedContext,
        client: MooncakeClient,
        proofs: memoryview,
    ) -> None:
        self._name = options.name
        self._pool = context.pool
        self._client = client
        self._value_nbytes = context.payload_nbytes + PROOF_NBYTES
        self._gets = _Arenas(proofs[: _GETS * _ARENA_NBYTES])
        self._puts = _Arenas(proofs[_GETS * _ARENA_NBYTES :])
        self._closed = False

    @classmethod
    @override
    def open(cls, options: SharedTierConfig, context: SharedContext) -> MooncakeTier:
        assert isinstance(options, MooncakeTierConfig)
        if context.memory is None and options.protocol == "rdma":
            raise ConfigError(
                f"tier {options.name}: RDMA needs shared memory for the chunks; use `protocol: "
                "tcp`, or add a tier of kind ram"
            )
        proofs = memoryview(mmap.mmap(-1, (_GETS + _PUTS) * _ARENA_NBYTES))
        regions = [each for each in (proofs, context.memory, context.scratch) if each]
        client = MooncakeClient(options, regions)
        try:
            client.connect()
        except TierUnavailableError as error:
            logger.warning("%s; trying again when it is used", error)
        return cls(options, context, client, proofs)

    @override
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        self._require_open()
        if not keys:
            return []
        asked = list(keys)
        return await self._pool.run(
            lambda: self._client.contains(asked), priority=int(Purpose.QUESTION)
        )

    @override
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        return await self._move(self._get, keys, into, self._gets, Purpose.LOAD)

    @override
    async def add(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        send = functools.partial(self._send, self._client.add)
        return await self._move(send, keys, values, self._puts, Purpose.STORE)

    @override
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        send = functools.partial(self._send, self._client.put)
        return await self._move(send, keys, values, self._puts, Purpose.STORE)

    @override
    async def aclose(self) -> None:
        self._closed = True
        await self._pool.run(self._client.close, priority=int(Purpose.DEMOTE))

    async def _move(
        self,
        move: Callable[[_Part, memoryview], Sequence[Outcome]],
        keys: Sequence[str],
        values: Sequence[Value],
        arenas: _Arenas,
        purpose: Purpose,
    ) -> list[Outcome]:
        """Move a batch in several calls of ``move``; start no more calls after an error."""
        outcomes = [Outcome.FAILED] * len(keys)
        errors: list[TierUnavailableError] = []

        async def run(part: _Part) -> None:
            async with arenas.lease() as arena:
                if errors:
                    return
                try:
                    moved = await self._pool.run(
                        lambda: move(part, arena), priority=int(purpose)
                    )
                except TierUnavailableError as error:
                    errors.append(error)
                else:
                    outcomes[part.first : part.first + len(part.keys)] = moved

        async with asyncio.TaskGroup() as group:
            for part in _parts(keys, values):
                group.create_task(run(part))
        if errors:
            raise errors[0]
        return outcomes

    def _get(self, part: _Part, arena: memoryview) -> Sequence[Outcome]:
        proofs = _proofs_in(arena, part)
        outcomes = self._client.get(part.keys, *_buffers(part, proofs), self._value_nbytes)
        for value, proof, outcome in zip(part.values, proofs, outcomes, strict=True):
            if outcome is Outcome.DONE:
                value.proof[:] = proof
        return outcomes

    @staticmethod
    def _send(
        call: Callable[[list[str], list[list[int]], list[list[int]]], Sequence[Outcome]],
        part: _Part,
        arena: memoryview,
    ) -> Sequence[Outcome]:
        proofs = _proofs_in(arena, part)
        for value, proof in zip(part.values, proofs, strict=True):
            proof[:] = value.proof
        return call(part.keys, *_buffers(part, proofs))

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self._name} is closed")


def _parts(keys: Sequence[str], values: Sequence[Value]) -> Iterator[_Part]:
    """Split a batch into calls with distinct keys, because the client mixes up equal keys."""
    first = 0
    while first < len(keys):
        end = first
        seen: set[str] = set()
        while end < len(keys) and end - first < _CALL_CHUNKS and keys[end] not in seen:
            seen.add(keys[end])
            end += 1
        yield _Part(first, list(keys[first:end]), values[first:end])
        first = end


def _proofs_in(arena: memoryview, part: _Part) -> list[memoryview]:
    """Split the start of ``arena`` into one proof buffer for each key of ``part``."""
    return [arena[at * PROOF_NBYTES : (at + 1) * PROOF_NBYTES] for at in range(len(part.keys))]


def _buffers(
    part: _Part, proofs: Sequence[memoryview]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each value the addresses and the sizes of its two buffers."""
    pairs = [(value.payload, proof) for value, proof in zip(part.values, proofs, strict=True)]
    return (
        [[address_of(payload), address_of(proof)] for payload, proof in pairs],
        [[payload.nbytes, proof.nbytes] for payload, proof in pairs],
    )
