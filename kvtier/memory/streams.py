"""Where copies run, and what they must come after.

On a GPU a copy runs on a stream of its own, after a mark in the engine's compute stream, and is
waited for by the thread that asked. On a CPU the engine's thread has finished by the time it
submits, so there is nothing to order.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from kvtier.errors import UnsupportedError

__all__ = ["CopyStream", "CudaStream", "Fence", "HostStream", "open_stream"]


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the compute stream."""

    event: torch.cuda.Event


class CopyStream(ABC):
    """Runs copies of one rank."""

    @abstractmethod
    def mark(self) -> Fence | None:
        """Return the current point of the compute stream; called on the engine's thread.

        A store reads what the forward pass just wrote, a load overwrites blocks that the
        engine may still be clearing: both must come after it.
        """

    @abstractmethod
    def after(self, fence: Fence | None) -> contextlib.AbstractContextManager[None]:
        """Run the copies in the body after ``fence``; leaving it waits until they are done.

        The calling thread copies for this device only.
        """

    @abstractmethod
    def beside(self) -> CopyStream:
        """Return a stream whose copies run at the same time as this one's, in other threads."""

    @abstractmethod
    def close(self) -> None:
        """Unpin what was pinned. Idempotent."""


class HostStream(CopyStream):
    """Copies within host memory: done when the call returns."""

    @override
    def mark(self) -> Fence | None:
        return None

    @override
    def after(self, fence: Fence | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def beside(self) -> HostStream:
        return HostStream()

    @override
    def close(self) -> None:
        return


class CudaStream(CopyStream):
    """Copies between a CUDA device and page-locked host memory.

    Args:
        device: The CUDA device.
        host: The host memory, page-locked here; None if somebody else does that.

    Raises:
        UnsupportedError: The driver refuses to page-lock it.
    """

    def __init__(self, device: torch.device, host: torch.Tensor | None) -> None:
        self._device = device
        self._pinned_at = 0 if host is None else _pin(host)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def mark(self) -> Fence | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return Fence(event)

    @override
    @contextlib.contextmanager
    def after(self, fence: Fence | None) -> Iterator[None]:
        # A thread begins on the first device. Leaving the stream would return there and give
        # this process a context on it: memory of a GPU that is another rank's.
        torch.cuda.set_device(self._device)
        try:
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence.event)
                yield
        finally:
            # Also when the body raised: what it queued may still touch the caller's buffers.
            self._stream.synchronize()

    @override
    def beside(self) -> CudaStream:
        return CudaStream(self._device, None)

    @override
    def close(self) -> None:
        if self._pinned_at:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)  # type: ignore[no-untyped-call]
            self._pinned_at = 0


def open_stream(device: torch.device, host: torch.Tensor) -> CopyStream:
    """Return the stream for copies between ``device`` and ``host``.

    Raises:
        UnsupportedError: kvtier cannot copy to such a device, or not page-lock ``host``.
    """
    if device.type == "cpu":
        return HostStream()
    if device.type == "cuda":
        return CudaStream(device, host)
    raise UnsupportedError(f"kvtier copies to and from CPU and CUDA devices, not {device}")


def _pin(host: torch.Tensor) -> int:
    """Page-lock ``host``; returns its address."""
    address = host.data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, host.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise UnsupportedError(
            f"CUDA cannot page-lock the RAM tier (error {int(error)}): raise the memlock limit "
            "(ulimit -l unlimited) or lower tiers[0].capacity"
        )
    return address
