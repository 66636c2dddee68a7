"""Timing and page-locked memory on a CUDA device, and the same calls on a CPU to rehearse."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from tests.gpu.bench import Device

__all__ = [
    "compute_seconds",
    "on_new_stream",
    "page_locked",
    "random_bytes",
    "seconds",
    "seconds_at_once",
    "synchronize",
]


def synchronize(device: Device) -> None:
    """Wait for all work on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: Device, call: Callable[[], object]) -> float:
    """Return how long ``call`` takes, including the work that it leaves on the device."""
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun


def seconds_at_once(device: Device, calls: Sequence[Callable[[], object]]) -> float:
    """Return how long ``calls`` take at once, each in a thread of its own."""
    ready = threading.Barrier(len(calls) + 1)

    def start(call: Callable[[], object]) -> None:
        ready.wait()
        call()

    synchronize(device)
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(start, call) for call in calls]
        ready.wait()
        begun = time.perf_counter()
        for call in running:
            call.result()
        synchronize(device)
        return time.perf_counter() - begun


def compute_seconds(device: Device, launch: Callable[[], object]) -> float:
    """Return the time on the device of the work that ``launch`` puts on the current stream."""
    if device == "cpu":
        return seconds(device, launch)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def on_new_stream(device: Device) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a ``with`` block run on a stream that is new now."""
    if device == "cpu":
        return contextlib.nullcontext
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return lambda: torch.cuda.stream(stream)


@contextmanager
def page_locked(device: Device, host: torch.Tensor) -> Iterator[None]:
    """Page-lock ``host`` while the body runs."""
    if device == "cpu":
        yield
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if error:
        raise RuntimeError(f"cudaHostRegister fails with {error}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(host.data_ptr())


def random_bytes(device: Device, *shape: int) -> torch.Tensor:
    """Return random bytes on the device."""
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
