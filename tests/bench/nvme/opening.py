"""Opens a store as an engine does when it starts, and weighs the process before and after."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from tests.bench.nvme.errors import BenchError
from tests.bench.nvme.machine import drop_page_cache
from tests.bench.nvme.measures import anonymous_nbytes
from tests.bench.nvme.passes import TransferSpec

__all__ = ["Opened", "fill_store", "open_once"]


@dataclass(frozen=True, slots=True)
class Opened:
    """What one opening took.

    Attributes:
        chunks: How many were recovered.
        seconds: Until the manager knew them all.
        nbytes: Growth of private memory, of all processes involved.
    """

    chunks: int
    seconds: float
    nbytes: int


def fill_store(spec: TransferSpec) -> None:
    """Store a generation as an engine does."""
    from tests.bench.nvme.sides import opened  # noqa: PLC0415 - imports vLLM

    with opened(spec) as loop:
        loop.store(spec.workload.generation(spec.generation))


def open_once(spec: TransferSpec) -> Opened:
    """Open the tiers and build the manager's state, in a process that has done neither.

    Raises:
        BenchError: Not every chunk came back.
    """
    from tests.bench.nvme.kvtier_side import (  # noqa: PLC0415 - imports vLLM
        make_config,
        make_region,
        open_tiers,
    )

    workload = spec.workload
    config = make_config(spec.path, ram_nbytes=workload.ram_nbytes, nvme_nbytes=workload.nbytes)
    region = make_region(config, workload.chunk_nbytes)
    drop_page_cache()
    gc.collect()
    before_nbytes = anonymous_nbytes()
    began_s = time.perf_counter()
    storage = open_tiers(config, region)
    seconds = time.perf_counter() - began_s
    gc.collect()
    grown_nbytes = anonymous_nbytes() - before_nbytes
    chunks = storage.manager.snapshot().tiers[1].resident
    storage.close(timeout_s=config.transfer.close_timeout_s)
    if chunks != workload.chunks:
        raise BenchError(f"{workload.chunks} chunks were stored and {chunks} came back")
    return Opened(chunks, seconds, grown_nbytes)
