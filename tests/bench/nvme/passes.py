"""What runs in a peer's process: one store pass and one promote pass, from cold RAM.

Light to import: vLLM, which takes ten seconds, is imported where the passes run and not in the
process that orders them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.bench.nvme.machine import drop_page_cache
from tests.bench.nvme.measures import Pass, Passes
from tests.bench.nvme.workload import Workload, shuffled

__all__ = ["Peer", "TransferSpec", "promote", "transfer"]

Peer = Literal["kvtier", "native_fs"]


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """What to move, with whom and beside what.

    Attributes:
        peer: Whose manager.
        path: Its directory.
        workload: Sizes.
        generation: Version of the working set; another one has other keys.
        busy: Whether a thread of the same process computes in pure Python all the while.
    """

    peer: Peer
    path: Path
    workload: Workload
    generation: int = 0
    busy: bool = False


def transfer(spec: TransferSpec) -> Passes:
    """Store a generation, reopen, and promote it in random order."""
    from tests.bench.nvme.sides import opened  # noqa: PLC0415 - imports vLLM

    requests = spec.workload.generation(spec.generation)
    # As before fio's writes: what another peer wrote, or removed, is not to be waited for here.
    drop_page_cache()
    with opened(spec) as loop, _busy_thread(spec.busy):
        store = loop.store(requests)
    return Passes(store, promote(spec))


def promote(spec: TransferSpec, seed: int = 0) -> Pass:
    """Load a generation that is on the disk, in random order and with an empty RAM tier."""
    from tests.bench.nvme.sides import opened  # noqa: PLC0415 - imports vLLM

    requests = shuffled(spec.workload.generation(spec.generation), seed or spec.generation)
    drop_page_cache()
    with opened(spec) as loop, _busy_thread(spec.busy):
        return loop.load(requests)


@contextlib.contextmanager
def _busy_thread(wanted: bool) -> Iterator[None]:
    """Run a thread that never lets go of the interpreter lock by itself."""
    stop = threading.Event()

    def compute() -> None:
        number = 0
        while not stop.is_set():
            for _ in range(10_000):
                number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF

    thread = threading.Thread(target=compute, name="busy", daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()
