"""How much slower compute loops are beside stores at full rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kvtier.units import format_size
from tests.gpu.bench import Bench
from tests.gpu.paged import PagedMemory, opened_memory
from tests.gpu.torch_device import compute_seconds, random_bytes

PAGE_NBYTES: Final = 64 << 10
_SLICE_S: Final = 0.5
_GRACE_S: Final = 30.0


class Storing:
    """Stores again and again in a thread, as fast as they go."""

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._stored = threading.Event()
        self._error: Exception | None = None
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name="storing", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Store while the body runs, which starts after the first store."""
        self._thread.start()
        self._stored.wait(_GRACE_S)
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(_GRACE_S)
        if self._error is not None:
            raise self._error

    @property
    def gb_per_s(self) -> float:
        """Rate of the stores."""
        return self._rate

    def _run(self) -> None:
        memory, stores = self._memory, 0
        begun = time.perf_counter()
        try:
            while not self._stop.is_set():
                memory.copier.store(memory.plans["store"], after=None)
                stores += 1
                self._stored.set()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
            self._stored.set()
        self._rate = stores * memory.nbytes / (time.perf_counter() - begun) / 1e9


def run(bench: Bench) -> None:
    """Measure the loops."""
    loops = {
        "matmul loop": _matmul(bench, rows=8192),
        "HBM loop": _copying(bench),
        "decode loop": _matmul(bench, rows=64),
    }
    with opened_memory(bench, PAGE_NBYTES, bench.sized(256 << 20, 1 << 20)) as memory:
        for name in bench.while_time(loops):
            _measure(bench, memory, name, loops[name])


def _matmul(bench: Bench, *, rows: int) -> Callable[[], object]:
    """Return the product of so many rows, tokens of a step, and a large matrix."""
    width = bench.sized(8192, 64)
    rows = min(rows, width)
    left, right = (
        torch.randn(height, width, device=bench.device).bfloat16() for height in (rows, width)
    )
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _copying(bench: Bench) -> Callable[[], object]:
    """Return a copy within the device's memory."""
    source = random_bytes(bench.device, bench.sized(1 << 30, 1 << 16))
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)


def _measure(bench: Bench, memory: PagedMemory, name: str, step: Callable[[], object]) -> None:
    """Run the loop alone and beside stores, in turn, and compare neighbours."""

    def loop(steps: int) -> float:
        return compute_seconds(bench.device, lambda: [step() for _ in range(steps)])

    loop(3)
    steps = max(int(bench.sized(_SLICE_S, 0.01) / (loop(10) / 10)), 10)
    slowdowns, rates = [], []
    memory.prepare("store")
    for _ in bench.runs(share_s=bench.left_s / 3):
        alone_s = loop(steps)
        storing = Storing(memory)
        with storing.running():
            beside_s = loop(steps)
        slowdowns.append((beside_s / alone_s - 1) * 100)
        rates.append(storing.gb_per_s)
    size = format_size(PAGE_NBYTES)
    bench.require_right(memory.is_right("store"), f"store beside {name}", size=size)
    bench.figure(name, slowdowns, "% slower", method="kvtier", size=size)
    bench.figure(f"store beside {name}", rates, "GB/s", method="kvtier", size=size)
