"""Tries the copy methods at the start, and chooses one for stores and one for loads.

A *fragment* is a contiguous range to copy. The rate of a method depends on the size of the
engine's fragments, the bus and the driver. So each method copies some MiB between a scratch
buffer on the device and RAM slots, in fragments like the engine's. The slots are still empty,
and KV memory is not touched. A method that fails or copies wrong bytes is left out.

Stores are copied in batches. Loads are copied by a kernel if fragments are short and the kernel
is faster, else in batches.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from kvtier.errors import CudaError
from kvtier.logs import get_logger
from kvtier.memory.cuda_methods import BatchMethod, KernelMethod, Method
from kvtier.memory.fragments import Fragments
from kvtier.memory.streams import Driver
from kvtier.units import approximate_size

__all__ = ["SCRATCH_NBYTES", "Choice", "choose_methods"]

logger = get_logger(__name__)

SCRATCH_NBYTES: Final = 16 << 20
"""Device memory for a trial, freed afterwards."""
_ROUNDS: Final = 3
_LONGEST_FOR_KERNEL_NBYTES: Final = 64 << 10
"""Length of fragments above which no kernel is compiled, because copy engines then reach the
rate of the bus."""


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


def _rate_loads(trial: _Trial, driver: Driver, batch: BatchMethod) -> list[_Rated]:
    """Return the methods that work for loads, fastest first."""
    loads = trial.rate(batch.name, lambda: batch, stores=False)
    rated = [loads] if loads else []
    if loads and trial.suits_kernel:
        by_kernel = trial.rate(
            KernelMethod.name, lambda: KernelMethod(driver, batch), stores=False
        )
        rated += [by_kernel] if by_kernel else []
    return sorted(rated, key=lambda each: -each.bytes_per_s)


def choose_methods(driver: Driver, places: Fragments) -> Choice:
    """Return the fastest methods for fragments like ``places``, and log the reasons.

    Args:
        driver: The GPU.
        places: Fragments of empty slots; their device addresses are ignored.
    """
    batch = BatchMethod()
    try:
        trial = _Trial(driver, places)
    except RuntimeError as error:
        logger.warning("copies between GPU and RAM: in batches, not tried before: %s", error)
        return Choice(batch, batch)
    stores = trial.rate(batch.name, lambda: batch, stores=True)
    rated = _rate_loads(trial, driver, batch)
    logger.info(
        "copies between GPU and RAM: stores by %s, loads by %s; a typical copy has %s",
        stores or "torch",
        " (not by ".join(map(str, rated)) + ")" * (len(rated) - 1) or "torch",
        approximate_size(trial.typical_nbytes),
    )
    return Choice(stores.method if stores else None, rated[0].method if rated else None)


class _Trial:
    """Measures methods by copies between scratch memory on the device and empty slots.

    Args:
        driver: The GPU.
        places: Fragments of empty slots; their device addresses are ignored.

    Attributes:
        typical_nbytes: Median size of the fragments.
        suits_kernel: Whether a kernel might be faster than the copy engines for these
            fragments.
    """

    def __init__(self, driver: Driver, places: Fragments) -> None:
        self._driver = driver
        self._stream = driver.open_stream()
        self._scratch = driver.device_memory(SCRATCH_NBYTES)
        nbytes = np.minimum(places.nbytes, SCRATCH_NBYTES)
        ends = np.cumsum(nbytes)
        fits = ends <= SCRATCH_NBYTES
        device = self._scratch.data_ptr() + ends - nbytes
        self._fragments = Fragments(device[fits], places.host[fits], nbytes[fits])
        self._nbytes = int(self._fragments.nbytes.sum())
        self.typical_nbytes = int(np.median(places.nbytes))
        self.suits_kernel = (
            self.typical_nbytes < _LONGEST_FOR_KERNEL_NBYTES
            and KernelMethod.suits(self._fragments)
        )

    def rate(
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
        return _Rated(method, self._nbytes / seconds if seconds else math.inf)

    def _require_right_bytes(self, method: Method, *, stores: bool) -> None:
        """Raise CudaError if ``method`` does not copy the right bytes."""
        random = np.random.default_rng(stores)
        expected = random.integers(-128, 128, self._nbytes, np.int8)
        self._fill_device(expected if stores else np.zeros_like(expected))
        self._fill_slots(np.zeros_like(expected) if stores else expected)
        self._copy(method, stores=stores)
        found = self._read_slots() if stores else self._read_device()
        if not np.array_equal(found, expected):
            raise CudaError("the copies deliver wrong bytes")

    def _seconds(self, method: Method, *, stores: bool) -> float:
        began_s = time.perf_counter()
        self._copy(method, stores=stores)
        return time.perf_counter() - began_s

    def _copy(self, method: Method, *, stores: bool) -> None:
        with self._stream.active():
            try:
                self._stream.follow(self._driver.mark())
                method.queue(self._stream, self._fragments, stores=stores)
            finally:
                self._stream.record().wait()

    def _fill_device(self, content: np.ndarray[tuple[int], np.dtype[np.int8]]) -> None:
        self._scratch[: self._nbytes].copy_(torch.from_numpy(content))

    def _read_device(self) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        return self._scratch[: self._nbytes].cpu().numpy()

    def _fill_slots(self, content: np.ndarray[tuple[int], np.dtype[np.int8]]) -> None:
        at = content.ctypes.data
        for host, nbytes in self._host_ranges():
            ctypes.memmove(host, at, nbytes)
            at += nbytes

    def _read_slots(self) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        read = b"".join(ctypes.string_at(host, nbytes) for host, nbytes in self._host_ranges())
        return np.frombuffer(read, np.int8)

    def _host_ranges(self) -> Iterator[tuple[int, int]]:
        yield from zip(
            self._fragments.host.tolist(), self._fragments.nbytes.tolist(), strict=True
        )
