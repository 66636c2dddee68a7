"""Simulates many policies at many sizes on many traces, in several processes.

A *cell* is one run: a trace, a policy and a size, with a single tier. Each trace is read once
and sent to every process once. A result can be reproduced from its fields: the trace's hash,
the seed of the policies' random numbers, every parameter and the version.
"""

from __future__ import annotations

import csv
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final

import kvtier
from kvtier.policies import build_eviction
from kvtier.sim.capacity import parse_capacity
from kvtier.sim.single import BELADY, SEED, Progress, TouchOrder, simulate_single
from kvtier.sim.traces import Trace

__all__ = ["COLUMNS", "Cell", "SweepResult", "sweep", "write_csv"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        trace: Index of the trace.
        policy: The policy's name.
        capacity: The size, as the user wrote it.
        capacity_chunks: The size as a number of chunks of this trace.
    """

    trace: int
    policy: str
    capacity: str
    capacity_chunks: int


@dataclass(frozen=True, slots=True)
class SweepResult:
    """One row of a sweep; the fields are the columns of its CSV file.

    :class:`~kvtier.sim.single.SingleResult` documents the fields that both classes have.
    ``capacity`` is the size, as the user wrote it. ``assumed`` and ``warnings`` are those of
    the :class:`~kvtier.sim.traces.Trace`, each joined into one text.
    """

    trace: str
    trace_sha256: str
    format: str
    chunk_tokens: int
    distinct: int
    policy: str
    touch_order: str
    capacity: str
    capacity_chunks: int
    capacity_share: float
    refs: int
    hits: int
    block_hit_ratio: float
    prefix_hit_ratio: float
    lead_chunks: int
    stranded_hits: int
    seed: int
    seconds: float
    refs_per_second: float
    kvtier_version: str
    assumed: str
    warnings: str

    @property
    def of(self) -> tuple[str, str]:
        """The trace's name and hash. The hash distinguishes files with the same name."""
        return self.trace, self.trace_sha256


COLUMNS: Final = tuple(SweepResult.__dataclass_fields__)


def sweep(  # noqa: PLR0913 - the parameters of a grid
    traces: Sequence[Trace],
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    chunk_bytes: Sequence[int],
    touch_order: TouchOrder = "policy",
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[SweepResult]:
    """Run every policy at every size on every trace.

    Args:
        traces: The traces.
        policies: Names of eviction policies.
        capacities: Sizes as :func:`~kvtier.sim.capacity.parse_capacity` reads them.
        chunk_bytes: Bytes of a chunk, for each trace.
        touch_order: The order of touches in every run.
        jobs: Number of processes; 1 runs in this process.
        progress: Called with the finished share after each run.

    Returns:
        One result per cell, ordered by trace, policy and size as given.

    Raises:
        ConfigError: A policy does not exist, or a size is invalid.
    """
    for name in policies:
        if name != BELADY:
            build_eviction(name, capacity=1)
    cells = [
        Cell(
            number,
            policy,
            capacity,
            parse_capacity(
                capacity, distinct=traces[number].distinct, chunk_bytes=chunk_bytes[number]
            ),
        )
        for number, policy, capacity in product(range(len(traces)), policies, capacities)
    ]
    results: dict[Cell, SweepResult] = {}
    with _runner(traces, touch_order, min(jobs, len(cells))) as run:
        for cell, result in run(cells):
            results[cell] = result
            if progress is not None:
                progress(len(results) / len(cells))
    return [results[cell] for cell in cells]


def write_csv(results: Sequence[SweepResult], path: Path) -> None:
    """Write ``results`` to ``path``: a header line, then one row per result.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


def _run(
    traces: Sequence[Trace], touch_order: TouchOrder, cell: Cell
) -> tuple[Cell, SweepResult]:
    """Run one cell."""
    trace = traces[cell.trace]
    result = simulate_single(
        trace, policy=cell.policy, capacity=cell.capacity_chunks, touch_order=touch_order
    )
    return cell, SweepResult(
        **asdict(result),
        trace_sha256=trace.sha256,
        format=trace.format,
        chunk_tokens=trace.chunk_tokens,
        assumed="; ".join(trace.assumed),
        warnings="; ".join(trace.warnings),
        distinct=trace.distinct,
        capacity=cell.capacity,
        capacity_share=cell.capacity_chunks / trace.distinct,
        seed=SEED,
        kvtier_version=kvtier.__version__,
    )


@contextmanager
def _runner(traces: Sequence[Trace], touch_order: TouchOrder, jobs: int) -> Iterator[Any]:
    """Yield a function from cells to an iterator of (cell, result) pairs, in any order."""
    run = partial(_run, traces, touch_order)
    if jobs <= 1:
        yield partial(map, run)
        return
    # Spawned, not forked: a fork copies locks that another thread may hold.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (run,))
    try:
        yield lambda cells: (
            done.result()
            for done in as_completed(pool.submit(_run_prepared, cell) for cell in cells)
        )
    finally:
        pool.shutdown(cancel_futures=True)


_prepared: list[Callable[[Cell], tuple[Cell, SweepResult]]] = []
"""The function that runs a cell, in a process of the pool; empty in other processes."""


def _prepare(run: Callable[[Cell], tuple[Cell, SweepResult]]) -> None:
    # An interrupt reaches all processes of a terminal; the workers end at once and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prepared[:] = [run]


def _end_with_parent() -> None:
    """End this process if its parent is killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_prepared(cell: Cell) -> tuple[Cell, SweepResult]:
    return _prepared[0](cell)
