"""Tries the copy methods at start, and chooses one for stores and one for loads.

A *fragment* is a contiguous range to copy. The rate of a method depends on the size of the
engine's fragments, the bus and the driver. So each method copies up to 64 MiB between scratch
memory on the device and page-locked scratch memory on the host, in fragments as long as the
engine's. The trial does not use slots, because another rank may already use them. A method that
fails or copies wrong bytes is not chosen.

Copies in batches leave all multiprocessors to the model. So buffered copies must be clearly
faster to be chosen.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from kvtier.errors import CudaError
from kvtier.logs import get_logger
from kvtier.memory.cuda_api import Addresses
from kvtier.memory.cuda_methods import BatchMethod, BufferedMethod, Method, Streams
from kvtier.memory.fragments import Fragments
from kvtier.memory.streams import Driver
from kvtier.units import approximate_size

__all__ = ["SCRATCH_NBYTES", "Choice", "choose_methods"]

logger = get_logger(__name__)

SCRATCH_NBYTES: Final = 64 << 20
"""Bytes of scratch memory on the device, and as many on the host; freed after the trial."""
_ROUNDS: Final = 3
_LONGEST_TO_STAGE_NBYTES: Final = 1 << 20
"""Staging is not tried if the median fragment is at least as long as this, because batches of
such fragments are nearly as fast as the bus."""
_LEAST_GAIN: Final = 1.1
"""Buffered copies are chosen if their rate is at least this multiple of that of batches."""
_LEAST_S: Final = 1e-9


class Choice(NamedTuple):
    """The methods for stores and for loads; None where no method works."""

    store: Method | None
    load: Method | None


@dataclass(frozen=True, slots=True)
class _Rated:
    """A method that copied the right bytes, with its measured rate."""

    method: Method
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.method.name} at {self.bytes_per_s / 1e9:.1f} GB/s"


def choose_methods(driver: Driver, sample: Fragments, edges: Addresses) -> Choice:
    """Return the best methods for fragments like ``sample``, and log the reasons.

    Args:
        driver: The GPU.
        sample: Fragments like those of jobs; their addresses are ignored.
        edges: Host addresses at which one page-locked segment of the slots ends and the next
            begins, ascending.
    """
    batch = BatchMethod(edges)
    try:
        with _opened_trial(driver, sample, batch) as trial:
            rated = [trial.rate_all(stores=stores) for stores in (True, False)]
    except (RuntimeError, CudaError) as error:
        logger.warning(
            "copies between GPU and RAM: in batches, because the trial failed: %s", error
        )
        return Choice(batch, batch)
    reasons = []
    for kind, (best, *others) in zip(("stores", "loads"), rated, strict=True):
        also = f" (not by {others[0]})" if others else ""
        reasons.append(f"{kind} by {best or 'torch'}{also}")
    logger.info(
        "copies between GPU and RAM: %s; a typical copy has %s",
        ", ".join(reasons),
        approximate_size(int(np.median(sample.nbytes))),
    )
    store, load = (best.method if best else None for best, *_ in rated)
    return Choice(store, load)


class _Trial:
    """Measures methods by copies between scratch memory on the device and on the host.

    Args:
        driver: The GPU.
        sample: Fragments like those of jobs; their addresses are ignored.
        batch: Copies in batches.
        device: Memory on the device, :data:`SCRATCH_NBYTES` bytes.
        host: Page-locked memory on the host, with as many bytes.
    """

    def __init__(
        self,
        driver: Driver,
        sample: Fragments,
        batch: BatchMethod,
        *,
        device: torch.Tensor,
        host: torch.Tensor,
    ) -> None:
        self._driver = driver
        self._batch = batch
        self._streams = Streams(driver.open_stream(), driver.open_stream())
        nbytes = np.minimum(sample.nbytes, SCRATCH_NBYTES)
        ends = np.cumsum(nbytes)
        fits = ends <= SCRATCH_NBYTES
        starts, lengths = (ends - nbytes)[fits], nbytes[fits]
        self._typical_nbytes = int(np.median(lengths))
        total_nbytes = int(lengths.sum())
        self._device, self._host = device[:total_nbytes], host[:total_nbytes]
        self._fragments = Fragments(
            device.data_ptr() + starts, host.data_ptr() + starts, lengths
        )

    def rate_all(self, *, stores: bool) -> list[_Rated | None]:
        """Measure the methods; return the working ones, best first, or ``[None]`` if none."""
        batch = self._rate(BatchMethod.name, lambda: self._batch, stores=stores)
        if batch is None or self._typical_nbytes >= _LONGEST_TO_STAGE_NBYTES:
            return [batch]
        buffered = self._rate(
            BufferedMethod.name,
            lambda: BufferedMethod(self._driver, self._batch),
            stores=stores,
        )
        if buffered is None:
            return [batch]
        gain = buffered.bytes_per_s / batch.bytes_per_s
        return [buffered, batch] if gain >= _LEAST_GAIN else [batch, buffered]

    def _rate(
        self, name: str, make_method: Callable[[], Method], *, stores: bool
    ) -> _Rated | None:
        """Measure a method; return None and log the reason if the method does not work."""
        try:
            method = make_method()
            self._require_right_bytes(method, stores=stores)
            seconds = min(self._seconds(method, stores=stores) for _ in range(_ROUNDS))
        except Exception as error:  # noqa: BLE001 - Triton's compiler raises any type
            kind = "stores" if stores else "loads"
            logger.warning(
                "%s are not copied by %s: %s: %s", kind, name, type(error).__name__, error
            )
            return None
        return _Rated(method, len(self._host) / max(seconds, _LEAST_S))

    def _require_right_bytes(self, method: Method, *, stores: bool) -> None:
        """Raise CudaError if ``method`` does not copy the right bytes."""
        source, destination = (
            (self._device, self._host) if stores else (self._host, self._device)
        )
        words = np.random.default_rng(stores).integers(1 << 62, size=len(source) // 8 + 1)
        expected = torch.from_numpy(words.view(np.int8)[: len(source)])
        source.copy_(expected)
        destination.zero_()
        self._copy(method, stores=stores)
        if not torch.equal(destination.cpu(), expected):
            raise CudaError("the copies deliver wrong bytes")

    def _seconds(self, method: Method, *, stores: bool) -> float:
        began_s = time.perf_counter()
        self._copy(method, stores=stores)
        return time.perf_counter() - began_s

    def _copy(self, method: Method, *, stores: bool) -> None:
        queue = partial(method.queue, self._streams, self._fragments, stores=stores)
        self._streams.run(queue, after=self._driver.mark())


@contextmanager
def _opened_trial(driver: Driver, sample: Fragments, batch: BatchMethod) -> Iterator[_Trial]:
    """Yield a trial, and release its memory afterwards."""
    device = driver.device_memory(SCRATCH_NBYTES)
    host = torch.frombuffer(mmap.mmap(-1, SCRATCH_NBYTES), dtype=torch.int8)
    driver.register(host.data_ptr(), SCRATCH_NBYTES)
    try:
        yield _Trial(driver, sample, batch, device=device, host=host)
    finally:
        driver.unregister(host.data_ptr())
