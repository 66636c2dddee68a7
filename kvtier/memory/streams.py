"""Copy streams: where copies run, and which point in the compute stream they must follow.

On a GPU a copy runs on its own stream, after a fence in the engine's compute stream. The thread
that asked for the copy waits for it. On a CPU the engine's thread has finished computing when
it submits a copy, so no fence is needed.

**One torch thread.** torch spreads an operation over OpenMP threads, and every calling thread
gets its own team of threads. Two teams have more threads than the machine has processors, and
GNU's OpenMP then disables spinning. So threads sleep and wake in each of the model's few
hundred parallel loops per step. Steps of a small model took 1.5 times as long. One thread is
enough for a copy, because memory limits its speed.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._C import set_num_threads  # vLLM replaces torch's own name for it on CPUs
from typing_extensions import override

from kvtier.errors import UnsupportedError
from kvtier.os.iopool import start_thread

__all__ = [
    "CopyStream",
    "CudaStream",
    "Fence",
    "HostStream",
    "open_stream",
    "use_one_torch_thread",
]


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the compute stream."""

    event: torch.cuda.Event


class CopyStream(ABC):
    """Runs the copies of one rank."""

    @abstractmethod
    def mark(self) -> Fence | None:
        """Return the current point of the compute stream; called on the engine's thread.

        Copies must follow this point. A store reads blocks that the forward pass has just
        written, and a load overwrites blocks that the engine may still be clearing.
        """

    @abstractmethod
    def after(self, fence: Fence | None) -> contextlib.AbstractContextManager[None]:
        """Make a ``with`` block run its copies after ``fence`` and wait for the copies.

        The calling thread must not copy for another device.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin the host memory. Idempotent."""


class HostStream(CopyStream):
    """Copies within host memory; each copy has ended when its call returns."""

    @override
    def mark(self) -> Fence | None:
        return None

    @override
    def after(self, fence: Fence | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def close(self) -> None:
        return


class CudaStream(CopyStream):
    """Copies between a CUDA device and page-locked host memory.

    Args:
        device: The CUDA device.
        host: The host memory to page-lock; None to page-lock nothing.

    Raises:
        UnsupportedError: The driver refuses to page-lock ``host``.
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
        # A thread begins on the first device. Leaving the stream would return there and create
        # a context, which takes memory of another rank's GPU.
        torch.cuda.set_device(self._device)
        try:
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence.event)
                yield
        finally:
            # Also if the body raised: queued copies may still touch the caller's buffers.
            self._stream.synchronize()

    @override
    def close(self) -> None:
        if self._pinned_at:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)  # type: ignore[no-untyped-call]
            self._pinned_at = 0


def open_stream(device: torch.device, host: torch.Tensor) -> CopyStream:
    """Return the stream for copies between ``device`` and ``host``.

    Raises:
        UnsupportedError: kvtier cannot copy to such a device, or cannot page-lock ``host``.
    """
    if device.type == "cpu":
        return HostStream()
    if device.type == "cuda":
        return CudaStream(device, host)
    raise UnsupportedError(f"kvtier copies to and from CPU and CUDA devices, not {device}")


def _pin(host: torch.Tensor) -> int:
    """Page-lock ``host`` and return its address."""
    address = host.data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, host.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise UnsupportedError(
            f"CUDA cannot page-lock the RAM tier (error {int(error)}): raise the memlock limit "
            "(ulimit -l unlimited) or lower tiers[0].capacity"
        )
    return address


def use_one_torch_thread() -> None:
    """Limit torch operations of the calling thread to one thread.

    torch keeps a limit per thread, but also applies this one to threads that have not computed
    yet. So this function starts a thread that restores the old limit for those threads.
    """
    others = torch.get_num_threads()
    set_num_threads(1)
    restore = threading.Thread(target=set_num_threads, args=(others,), name="kvtier-restore")
    start_thread(restore)
    restore.join()
