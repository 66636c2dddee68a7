"""Implements :class:`kvtier.memory.streams.Driver` with torch and the CUDA driver.

Streams, events and memory come from torch, the rest from :mod:`kvtier.memory.cuda_api`.

All events are blocking: a thread that waits for such an event sleeps. A thread that waits for a
stream or for another kind of event occupies a processor that the model needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, cast

import torch
from typing_extensions import override

from kvtier.errors import UnsupportedError
from kvtier.memory.cuda_api import Addresses, CudaApi, SourceOrder
from kvtier.memory.streams import CopyStream, Driver, Fence

__all__ = ["CudaDriver"]

_PRIORITY: Final = 0
_URGENT_PRIORITY: Final = -1
"""Priorities of torch's streams; the model's stream has priority 0, the lowest."""


class CudaDriver(Driver):
    """One CUDA device.

    Args:
        device: The device, with its number.
        api: The driver's functions for this device; None to load them.

    Raises:
        UnsupportedError: The driver's library cannot be used.
    """

    def __init__(self, device: torch.device, api: CudaApi | None = None) -> None:
        self._device = device
        self._api = api or CudaApi(device.index)

    @override
    def mark(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaFence(event)

    @override
    def open_stream(self, *, is_urgent: bool = False) -> CopyStream:
        priority = _URGENT_PRIORITY if is_urgent else _PRIORITY
        return _CudaStream(self._device, self._api, priority)

    @override
    def register(self, address: int, nbytes: int) -> None:
        self._api.bind()
        self._api.register(address, nbytes)

    @override
    def unregister(self, address: int) -> None:
        self._api.bind()
        self._api.unregister(address)

    @override
    def pinned_words(self, rows: int, columns: int) -> Addresses:
        words = torch.empty((rows, columns), dtype=torch.int64, pin_memory=True)
        return cast("Addresses", words.numpy())

    @override
    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8, device=self._device)


class _CudaFence(Fence):
    """A point in a stream, marked by an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @override
    def wait(self) -> None:
        self.event.synchronize()


class _CudaStream(CopyStream):
    """A copy stream that uses a torch stream."""

    def __init__(self, device: torch.device, api: CudaApi, priority: int) -> None:
        self._device = device
        self._api = api
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    @override
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # A new thread uses the first device. Leaving the stream would switch back to that
        # device and create a context there, which takes memory of another rank's GPU.
        torch.cuda.set_device(self._device)
        self._api.bind()
        with torch.cuda.stream(self._stream):
            yield

    @override
    def follow(self, fence: Fence) -> None:
        assert isinstance(fence, _CudaFence)
        self._stream.wait_event(fence.event)

    @override
    def record(self) -> Fence:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaFence(event)

    @override
    def copy_batch(
        self,
        destinations: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        *,
        order: SourceOrder,
    ) -> None:
        self._api.copy_batch(
            destinations, sources, nbytes, order=order, stream=self._stream.cuda_stream
        )

    @override
    def copy_by_kernel(self, table: Addresses, copies: int) -> None:
        with self._kernels():
            from kvtier.memory.cuda_kernel import launch  # noqa: PLC0415 - needs Triton
        with torch.cuda.stream(self._stream):
            launch(table, copies)

    @override
    def hash_by_kernel(self, table: Addresses, sums: Addresses, ranges: int) -> None:
        with self._kernels():
            from kvtier.memory.cuda_hash import launch  # noqa: PLC0415 - needs Triton
        with torch.cuda.stream(self._stream):
            launch(table, sums, ranges)

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        """Raise UnsupportedError if the device or the installed Triton cannot run kernels."""
        if not self._api.uses_host_addresses:
            raise UnsupportedError("the device does not use the host's addresses")
        try:
            yield
        except ImportError as error:
            raise UnsupportedError(f"Triton cannot be used: {error}") from error
