"""A shared tier in the memory of this process, with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import override

from kvtier.config import SharedTierConfig
from kvtier.errors import ClosedError
from kvtier.os.iopool import UncancellableFuture, wait_uncancelled
from kvtier.tiers.shared import SharedContext, SharedTier, Value
from kvtier.types import Outcome

__all__ = ["MemoryService", "MemorySharedTier", "MemorySharedTierConfig", "ServiceCall"]


class MemorySharedTierConfig(SharedTierConfig):
    """A tier in a dictionary that several engines of this process share."""

    kind: str = Field(
        default="tests.support.memory_shared_tier:MemorySharedTier",
        pattern="^tests.support.memory_shared_tier:MemorySharedTier$",
    )
    service: str = "default"
    """Name of the dictionary."""
    own_process: bool = False
    """Always false, because another process could not access the dictionary."""


class ServiceCall(NamedTuple):
    """A call that the service received, with the method's name and the keys."""

    method: str
    keys: tuple[str, ...]


class MemoryService:
    """The values of all clients, and the faults to simulate.

    Attributes:
        values: The stored values by key. A value is a payload and its proof.
        calls: The calls so far.
        error: Error that every call raises; None for a working service.
        failing: Keys whose outcome is FAILED.
        is_full: Whether the outcome of every put is REFUSED.
    """

    _named: ClassVar[dict[str, MemoryService]] = {}

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[ServiceCall] = []
        self.error: Exception | None = None
        self.failing: set[str] = set()
        self.is_full = False
        self._hangs = False
        self._hanging: list[tuple[asyncio.AbstractEventLoop, UncancellableFuture[None]]] = []

    @classmethod
    def named(cls, name: str) -> MemoryService:
        """Return the service for clients with the option ``service: name``."""
        return cls._named.setdefault(name, cls())

    def hang(self) -> None:
        """Make every later call hang until :meth:`release`, even if the call is cancelled."""
        self._hangs = True

    def release(self) -> None:
        """Let hanging and later calls continue. Any thread may call this method."""
        self._hangs = False
        while self._hanging:
            loop, future = self._hanging.pop()
            loop.call_soon_threadsafe(future.set_result, None)

    def evict(self, keys: Sequence[str] | None = None) -> None:
        """Remove the values of ``keys``, or all values."""
        for key in list(self.values) if keys is None else keys:
            self.values.pop(key, None)

    async def receive(self, method: str, keys: Sequence[str]) -> None:
        """Record a call, hang while the service hangs, and raise the service's error.

        Cancellation:
            Deferred until the service is released.
        """
        self.calls.append(ServiceCall(method, tuple(keys)))
        if self._hangs:
            loop = asyncio.get_running_loop()
            future = UncancellableFuture[None](loop=loop)
            self._hanging.append((loop, future))
            await wait_uncancelled(future)
        else:
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error


class MemorySharedTier(SharedTier):
    """A client of a :class:`MemoryService`, for tests.

    Args:
        service: The service.
    """

    Options: ClassVar[type[SharedTierConfig]] = MemorySharedTierConfig

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._closed = False

    @classmethod
    @override
    def open(cls, options: SharedTierConfig, context: SharedContext) -> MemorySharedTier:
        assert isinstance(options, MemorySharedTierConfig)
        return cls(MemoryService.named(options.service))

    @override
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        await self._begin("contains", keys)
        return [key in self._service.values for key in keys]

    @override
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        await self._begin("get", keys)
        return [self._get(key, value) for key, value in zip(keys, into, strict=True)]

    @override
    async def add(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        await self._begin("add", keys)
        return [
            Outcome.DONE if key in self._service.values else self._put(key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    @override
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        await self._begin("put", keys)
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    @override
    async def aclose(self) -> None:
        self._closed = True

    async def _begin(self, method: str, keys: Sequence[str]) -> None:
        if self._closed:
            raise ClosedError("the client is closed")
        await self._service.receive(method, keys)

    def _get(self, key: str, into: Value) -> Outcome:
        if key in self._service.failing:
            return Outcome.FAILED
        value = self._service.values.get(key)
        if value is None:
            return Outcome.MISSING
        payload_nbytes = into.payload.nbytes
        if len(value) != payload_nbytes + into.proof.nbytes:
            return Outcome.CORRUPT
        into.payload[:] = value[:payload_nbytes]
        into.proof[:] = value[payload_nbytes:]
        return Outcome.DONE

    def _put(self, key: str, value: Value) -> Outcome:
        if key in self._service.failing:
            return Outcome.FAILED
        if self._service.is_full:
            return Outcome.REFUSED
        self._service.values[key] = bytes(value.payload) + bytes(value.proof)
        return Outcome.DONE
