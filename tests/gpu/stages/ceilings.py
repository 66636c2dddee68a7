"""What the bus allows: one large copy each way and both at once, by kind of host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import torch

from kvtier.memory.backing import HugePages, create_memory
from kvtier.os.limits import huge_page_pool
from kvtier.os.memory import map_shared
from kvtier.units import format_size
from tests.gpu.bench import Bench
from tests.gpu.torch_device import on_new_stream, page_locked, random_bytes, seconds

_NBYTES: Final = 1 << 30


def run(bench: Bench) -> None:
    """Measure copies from and to each kind of host memory, then the time to page-lock."""
    nbytes = bench.sized(_NBYTES, 1 << 20)
    kinds: dict[str, Callable[[], AbstractContextManager[torch.Tensor]]] = {
        "cudaHostAlloc": lambda: _allocated(bench, nbytes),
        "memory file": lambda: _memory_file(bench, nbytes, "off"),
    }
    if huge_page_pool(Path("/proc")).holds(nbytes):
        kinds["memory file of huge pages"] = lambda: _memory_file(bench, nbytes, "require")
    else:
        bench.fact("huge pages", f"too few for {format_size(nbytes)}: not measured")
    for kind in bench.while_time(kinds):
        with kinds[kind]() as host:
            _copies(bench, kind, host)


@contextmanager
def _allocated(bench: Bench, nbytes: int) -> Iterator[torch.Tensor]:
    yield torch.empty(nbytes, dtype=torch.int8, pin_memory=not bench.rehearses)


@contextmanager
def _memory_file(bench: Bench, nbytes: int, huge_pages: HugePages) -> Iterator[torch.Tensor]:
    """Yield page-locked memory as the RAM tier has it, after measuring the page-locking."""
    descriptor = create_memory("kvtier-gpu", nbytes, huge_pages)
    try:
        taken = [_locking_s(bench, descriptor, nbytes) for _ in bench.runs()]
        method = "memory file of huge pages" if huge_pages == "require" else "memory file"
        per_gib = [each * (1 << 30) / nbytes for each in taken]
        bench.figure("page-locking", per_gib, "s/GiB", method=method)
        host = _mapped(descriptor, nbytes)
        with page_locked(bench.device, host):
            yield host
    finally:
        os.close(descriptor)


def _locking_s(bench: Bench, descriptor: int, nbytes: int) -> float:
    """Return the time to page-lock a new mapping."""
    host = _mapped(descriptor, nbytes)
    with ExitStack() as locked:
        return seconds(
            bench.device, lambda: locked.enter_context(page_locked(bench.device, host))
        )


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(map_shared(descriptor), dtype=torch.int8)[:nbytes]


def _copies(bench: Bench, kind: str, host: torch.Tensor) -> None:
    """Measure ``load``, ``store`` and ``both``, and verify what they copied."""
    nbytes, half = host.numel(), host.numel() // 2
    size = format_size(nbytes)
    truth = random_bytes(bench.device, nbytes)
    truth_on_host = truth.cpu()
    device = torch.empty_like(truth)
    first, second = on_new_stream(bench.device), on_new_stream(bench.device)

    def load() -> None:
        device.copy_(host, non_blocking=True)

    def store() -> None:
        host.copy_(device, non_blocking=True)

    def both() -> None:
        with first():
            device[:half].copy_(host[:half], non_blocking=True)
        with second():
            host[half:].copy_(device[half:], non_blocking=True)

    host.copy_(truth)
    for what, copy in {"load": load, "store": store, "both": both}.items():
        loaded, stored = {"load": (nbytes, 0), "store": (0, nbytes), "both": (half, half)}[what]
        device[:loaded].zero_()
        host[nbytes - stored :].zero_()
        rates = [nbytes / seconds(bench.device, copy) / 1e9 for _ in bench.runs()]
        right = torch.equal(device, truth) and torch.equal(host, truth_on_host)
        bench.require_right(right, what, method=kind, size=size)
        bench.figure(what, rates, "GB/s", method=kind, size=size)
