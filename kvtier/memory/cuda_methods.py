"""Methods of copying fragments (contiguous ranges) between a CUDA device and RAM slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
from typing_extensions import override

from kvtier.errors import UnsupportedError
from kvtier.memory.cuda_api import SourceOrder
from kvtier.memory.fragments import Fragments
from kvtier.memory.streams import CopyStream, Driver, Fence

__all__ = ["BatchMethod", "KernelMethod", "Method"]

_BATCHED: Final = 65536
"""Largest number of copies per driver call. A call may lock the driver until the call ends."""
_FEWEST: Final = 32
"""Smallest number of fragments for which a kernel is faster, by vLLM's measurements."""
_WORD_NBYTES: Final = 8


class Method(ABC):
    """A method of copying fragments.

    Attributes:
        name: Name for the log.
    """

    name: ClassVar[str]

    @abstractmethod
    def queue(self, stream: CopyStream, fragments: Fragments, *, stores: bool) -> None:
        """Queue copies on a stream.

        Args:
            stream: An active stream.
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
    """

    name = "batch"

    @override
    def queue(self, stream: CopyStream, fragments: Fragments, *, stores: bool) -> None:
        device, host = fragments.device, fragments.host
        sources, destinations = (device, host) if stores else (host, device)
        order = SourceOrder.STREAM if stores else SourceOrder.ANY
        for start in range(0, len(host), _BATCHED):
            some = slice(start, start + _BATCHED)
            stream.copy_batch(
                destinations[some], sources[some], fragments.nbytes[some], order=order
            )


class KernelMethod(Method):
    """Copies loads by a kernel if there are many fragments, else by the copy engines.

    The kernel reads a table of copies from page-locked memory while it runs. So the table is
    overwritten only after the previous kernel has ended.

    Args:
        driver: The GPU.
        batch: Copies by the copy engines, for fragments that are few or not made of whole
            words.

    Raises:
        RuntimeError: There is no page-locked memory for the table.
    """

    name = "kernel"

    def __init__(self, driver: Driver, batch: BatchMethod) -> None:
        self._batch = batch
        self._table = driver.pinned_words(_BATCHED, 3)
        self._ended: Fence | None = None

    @staticmethod
    def suits(fragments: Fragments) -> bool:
        """Return whether there are many fragments, all made of whole words."""
        if len(fragments.host) < _FEWEST:
            return False
        words = (fragments.device, fragments.host, fragments.nbytes)
        return not any(np.bitwise_or.reduce(each) % _WORD_NBYTES for each in words)

    @override
    def queue(self, stream: CopyStream, fragments: Fragments, *, stores: bool) -> None:
        if stores:
            raise UnsupportedError("the kernel is for loads")
        if not self.suits(fragments):
            self._batch.queue(stream, fragments, stores=False)
            return
        for start in range(0, len(fragments.host), _BATCHED):
            some = slice(start, start + _BATCHED)
            nbytes = fragments.nbytes[some]
            if self._ended is not None:
                self._ended.wait()
            rows = self._table[: len(nbytes)]
            rows[:, 0], rows[:, 1] = fragments.device[some], fragments.host[some]
            rows[:, 2] = nbytes
            stream.copy_by_kernel(self._table, len(nbytes))
            self._ended = stream.record()
