"""Methods of copying fragments (contiguous ranges) between a CUDA device and RAM slots.

A copy engine of an H200 needs about a microsecond for each range in addition to the time on the
bus. Stores and loads in ranges of 64 KiB reached half of the bus's rate, and loads in ranges of
16 KiB a tenth. A kernel that accesses page-locked memory itself reached more than 0.85 of the
rate with ranges of 64 KiB. But such a kernel occupies multiprocessors while the bus transfers:
a step of small matrix products took up to 1.9 times as long beside it.

:class:`BufferedMethod` uses both. For a store, a kernel collects the ranges in a *staging
buffer* on the device, in the order of the slots. A copy engine then copies whole slots. For a
load, the copy engine fills the buffer and a kernel distributes the ranges. The device's memory
is about fifty times as fast as the bus, so the kernel ends soon. docs/benchmarks.md has the
measurements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, NamedTuple

import numpy as np
from typing_extensions import override

from kvtier.memory.cuda_api import Addresses, SourceOrder
from kvtier.memory.fragments import Fragments
from kvtier.memory.pinning import cut
from kvtier.memory.slot_layout import Indices
from kvtier.memory.streams import CopyStream, Driver, Fence

__all__ = ["STAGING_NBYTES", "BatchMethod", "BufferedMethod", "Method", "Streams"]

STAGING_NBYTES: Final = 32 << 20
"""Bytes of a staging buffer."""
_BUFFERS: Final = 2
"""Buffers per direction: a kernel uses one while a copy engine uses the other."""
_BATCHED: Final = 65536
"""Largest number of copies per driver call. A call may lock the driver until the call ends."""
_ROWS: Final = 65536
"""Largest number of copies per launch of the kernel."""
_FEWEST: Final = 32
"""Smallest number of fragments to stage. A copy engine copies fewer than these in less time
than a kernel needs to start."""
_WORD_NBYTES: Final = 8


class Streams(NamedTuple):
    """The streams for copies in one direction.

    Attributes:
        copies: Stream for the copy engines.
        kernels: Stream for kernels, which can run while a copy engine copies.
    """

    copies: CopyStream
    kernels: CopyStream

    def run(self, queue: Callable[[], None], *, after: Fence | None) -> None:
        """Call ``queue``, which queues copies, and wait until they have ended.

        Args:
            queue: Called with ``copies`` active. Its exception is raised after the wait.
            after: Point in the compute stream after which the copies start; None to start now.
        """
        with self.copies.active():
            try:
                if after is not None:
                    for stream in self:
                        stream.follow(after)
                queue()
            finally:
                # Also after an error, because copies in the queue still use blocks and slots.
                self.copies.follow(self.kernels.record())
                self.copies.record().wait()


class Method(ABC):
    """A method of copying fragments in one direction.

    Attributes:
        name: Name for the log.
    """

    name: ClassVar[str]

    @abstractmethod
    def queue(self, streams: Streams, fragments: Fragments, *, stores: bool) -> None:
        """Queue copies.

        Args:
            streams: The streams of the direction; ``copies`` is active.
            fragments: The ranges to copy; they do not overlap.
            stores: True to copy from the device to the host; False for the other direction.

        Raises:
            KvtierError: A copy could not be queued. Others may have been queued.
        """


class BatchMethod(Method):
    """Queues many copies with one driver call; the GPU's copy engines carry them out.

    The source of a load may be read at any time, because the slots of a load do not change. The
    source of a store must be read in stream order: otherwise the copy engines may read the
    blocks before the model has written them.

    Args:
        edges: Host addresses at which one page-locked segment ends and the next begins,
            ascending.
    """

    name = "batch"

    def __init__(self, edges: Addresses) -> None:
        self._edges = edges

    @override
    def queue(self, streams: Streams, fragments: Fragments, *, stores: bool) -> None:
        fragments = cut(fragments, self._edges)
        device, host = fragments.device, fragments.host
        sources, destinations = (device, host) if stores else (host, device)
        order = SourceOrder.STREAM if stores else SourceOrder.ANY
        for start in range(0, len(host), _BATCHED):
            some = slice(start, start + _BATCHED)
            streams.copies.copy_batch(
                destinations[some], sources[some], fragments.nbytes[some], order=order
            )


class BufferedMethod(Method):
    """Copies through staging buffers, with one kernel and one batch per buffer.

    Fragments are copied in batches, without a buffer, if there are few, if one is longer than
    a buffer, or if one is not made of whole words.

    Args:
        driver: The GPU.
        batch: The method that copies between buffers and slots.

    Raises:
        RuntimeError: There is not enough memory for the buffers.
    """

    name = "buffered"

    def __init__(self, driver: Driver, batch: BatchMethod) -> None:
        self._batch = batch
        self._buffers = deque(_StagingBuffer(driver) for _ in range(_BUFFERS))

    @override
    def queue(self, streams: Streams, fragments: Fragments, *, stores: bool) -> None:
        if not _can_stage(fragments):
            self._batch.queue(streams, fragments, stores=stores)
            return
        for content in _divide(fragments):
            self._queue_buffer(streams, content, stores=stores)

    def _queue_buffer(self, streams: Streams, content: _BufferContent, *, stores: bool) -> None:
        """Wait until the next buffer is unused, then queue the copies through it."""
        copies, kernels = streams
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.wait()
        blocks, nbytes = content.fragments.device, content.fragments.nbytes
        staged = content.offsets + buffer.address
        runs = content.runs
        runs = Fragments(runs.device + buffer.address, runs.host, runs.nbytes)
        if stores:
            buffer.copy(kernels, staged, blocks, nbytes)
            copies.follow(kernels.record())
            self._batch.queue(streams, runs, stores=True)
            buffer.ended = copies.record()
        else:
            self._batch.queue(streams, runs, stores=False)
            kernels.follow(copies.record())
            buffer.copy(kernels, blocks, staged, nbytes)
            buffer.ended = kernels.record()


class _BufferContent(NamedTuple):
    """Fragments that fit one staging buffer together.

    Attributes:
        fragments: The fragments.
        offsets: Offset of each fragment in the buffer.
        runs: The ranges to copy between the buffer and the slots. Adjacent
            fragments are merged. ``device`` is an offset in the buffer.
    """

    fragments: Fragments
    offsets: Indices
    runs: Fragments


def _divide(fragments: Fragments) -> Iterator[_BufferContent]:
    """Divide ``fragments`` into groups that each fit a buffer; yield the groups in order.

    Each numpy call handles the fragments of all buffers, so there are few calls. A call on a
    long array releases the interpreter lock, and then may wait until another thread releases
    the lock again.
    """
    host, nbytes = fragments.host, fragments.nbytes
    ends = np.cumsum(nbytes)
    starts = ends - nbytes
    bounds = [0]
    while bounds[-1] < len(ends):
        limit = starts[bounds[-1]] + STAGING_NBYTES
        end = int(np.searchsorted(ends, limit, side="right"))
        bounds.append(min(end, bounds[-1] + _ROWS))
    begins_run = np.ones(len(host), np.bool_)
    np.not_equal(host[1:], host[:-1] + nbytes[:-1], out=begins_run[1:])
    begins_run[bounds[:-1]] = True
    runs = np.flatnonzero(begins_run)
    run_starts, run_hosts, run_nbytes = starts[runs], host[runs], np.add.reduceat(nbytes, runs)
    run_bounds = np.searchsorted(runs, bounds).tolist()
    for number, start in enumerate(bounds[:-1]):
        some = slice(start, bounds[number + 1])
        those = slice(run_bounds[number], run_bounds[number + 1])
        yield _BufferContent(
            fragments.part(some),
            starts[some] - starts[start],
            Fragments(run_starts[those] - starts[start], run_hosts[those], run_nbytes[those]),
        )


def _can_stage(fragments: Fragments) -> bool:
    """Return whether there are enough fragments, and each is word-aligned and fits a buffer."""
    if len(fragments.host) < _FEWEST or fragments.nbytes.max() > STAGING_NBYTES:
        return False
    words = np.bitwise_or.reduce(fragments.device) | np.bitwise_or.reduce(fragments.nbytes)
    return not words % _WORD_NBYTES


class _StagingBuffer:
    """A buffer on the device, and a table of the copies between this buffer and blocks.

    A kernel reads the table while it runs. So the buffer and the table are used again only
    after the previous copies through the buffer have ended.

    Attributes:
        address: Address of the buffer.
        ended: Point at which the previous copies have ended; None before the first.
    """

    def __init__(self, driver: Driver) -> None:
        self._memory = driver.device_memory(STAGING_NBYTES)
        self._table = driver.pinned_words(_ROWS, 3)
        self.address = self._memory.data_ptr()
        self.ended: Fence | None = None

    def wait(self) -> None:
        """Wait until the previous copies have ended."""
        if self.ended is not None:
            self.ended.wait()

    def copy(
        self, stream: CopyStream, destinations: Addresses, sources: Addresses, nbytes: Addresses
    ) -> None:
        """Queue the kernel that copies between the buffer and blocks."""
        rows = self._table[: len(nbytes)]
        rows[:, 0], rows[:, 1], rows[:, 2] = destinations, sources, nbytes
        stream.copy_by_kernel(self._table, len(nbytes))
