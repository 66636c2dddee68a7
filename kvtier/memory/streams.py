"""Copy streams: queues of GPU copies, and fences that order copies and computation.

On a GPU, copies are queued on separate streams and run after a fence, a point in the engine's
compute stream. The thread that queued a job's copies then waits for them. On a CPU the engine's
thread has finished computing when it submits a copy, so streams and fences are not needed.

A :class:`Driver` has all functions of a GPU that copies need. The real driver is in
:mod:`kvtier.memory.cuda_driver`. The driver for tests runs queued work late and in any allowed
order.

**One torch thread.** torch divides an operation between OpenMP threads, and every calling
thread gets its own team of threads. Two teams have more threads than the machine has
processors, so GNU's OpenMP disables spinning. The threads of the model then sleep and wake in
each of a few hundred parallel loops per step, and steps of a small model took 1.5 times as
long. One thread suffices for a copy, because the memory limits its speed.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod

import torch
from torch._C import set_num_threads  # vLLM replaces torch's own name for it on CPUs

from kvtier.memory.cuda_api import Addresses, SourceOrder
from kvtier.os.iopool import start_thread

__all__ = ["CopyStream", "Driver", "Fence", "use_one_torch_thread"]


class Fence(ABC):
    """A point in a stream, which the device reaches after all work queued before it."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the device has reached the point; the thread sleeps meanwhile."""


class CopyStream(ABC):
    """A queue of work for the device. Work runs in the order in which it was queued.

    One thread at a time uses a stream.
    """

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Make this stream and its device current for the thread, in a ``with`` statement.

        torch operations within the statement are queued on this stream. Call the other methods
        only within such a statement, of this stream or of another one of the device. The thread
        must never use another device.
        """

    @abstractmethod
    def follow(self, fence: Fence) -> None:
        """Make all work that is queued later wait for ``fence``."""

    @abstractmethod
    def record(self) -> Fence:
        """Return the point after all work queued so far."""

    @abstractmethod
    def copy_batch(
        self,
        destinations: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        *,
        order: SourceOrder,
    ) -> None:
        """Queue copies for the copy engines, which run them in any order.

        The caller may reuse the arrays after this call.

        Raises:
            KvtierError: The driver has no batches of copies or refuses this batch. Some copies
                may have been queued.
        """

    @abstractmethod
    def copy_by_kernel(self, table: Addresses, copies: int) -> None:
        """Queue copies within the device's memory for a kernel, which runs them in any order.

        Args:
            table: Page-locked memory of :meth:`Driver.pinned_words`. Row i has a destination,
                a source and a number of bytes, all multiples of 8. The device reads the rows
                when the kernel runs.
            copies: Number of rows to use.

        Raises:
            KvtierError: The device cannot run the kernel.
        """

    @abstractmethod
    def hash_by_kernel(self, table: Addresses, sums: Addresses, ranges: int) -> None:
        """Queue a kernel that hashes ranges of device memory.

        Args:
            table: Page-locked memory of :meth:`Driver.pinned_words`: rows of
                :data:`kvtier.memory.part_hashes.HashRanges`. The device reads the rows when the
                kernel runs.
            sums: Page-locked memory with one word for each range, which receives the hash.
            ranges: Number of rows to use, at least 1.

        Raises:
            KvtierError: The device cannot run the kernel.
        """


class Driver(ABC):
    """The functions of one GPU that copies need. Any thread may call the methods."""

    @abstractmethod
    def mark(self) -> Fence:
        """Return the current point of the compute stream. The model thread calls this."""

    @abstractmethod
    def open_stream(self, *, is_urgent: bool = False) -> CopyStream:
        """Return a new stream.

        Args:
            is_urgent: Whether its kernels start before waiting kernels of the model.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory.

        Raises:
            CudaError: The driver refuses; the memory is not page-locked.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo :meth:`register` for the memory that begins at ``address``.

        Raises:
            CudaError: No such memory is registered.
        """

    @abstractmethod
    def pinned_words(self, rows: int, columns: int) -> Addresses:
        """Return page-locked host memory as an array; freeing the array frees the memory.

        Raises:
            RuntimeError: There is not enough memory.
        """

    @abstractmethod
    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return int8 memory on the device; freeing the tensor frees the memory.

        Raises:
            RuntimeError: There is not enough memory.
        """


def use_one_torch_thread() -> None:
    """Limit the torch operations of the calling thread to one thread.

    torch has a limit per thread. But a new limit also applies to all threads that have not used
    torch yet. So this function starts a helper thread, which restores the old limit for these
    threads.
    """
    others = torch.get_num_threads()
    set_num_threads(1)
    restore = threading.Thread(target=set_num_threads, args=(others,), name="kvtier-restore")
    start_thread(restore)
    restore.join()
