"""Simulates many policies at many sizes on many traces, in several processes.

A *cell* is one simulation of a single tier, with one trace, one policy and one size. Each trace
is read once and sent to every process once. A result can be reproduced from its fields. They
include the trace's hash, the seed of the random numbers, every parameter and the version.
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
from kvtier.sim.hybrid import ONE_GROUP
from kvtier.sim.single import (
    BELADY,
    SEED,
    Progress,
    SingleResult,
    TouchOrder,
    check_belady,
    distinct_chunks,
    simulate_single,
)
from kvtier.sim.traces import Trace

__all__ = ["COLUMNS", "Cell", "SweepResult", "sweep", "write_csv"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep.

    Attributes:
        trace: Index of the trace.
        distinct: Number of distinct chunks of the trace, in all KV cache groups.
        capacity: The size as the user wrote it.
        capacity_chunks: The size as a number of chunks of this trace.
    """

    trace: int
    distinct: int
    policy: str
    capacity: str
    capacity_chunks: int


@dataclass(frozen=True, slots=True)
class SweepResult(SingleResult):
    """One row of a sweep; the fields are the columns of its CSV file.

    ``capacity`` is the size as the user wrote it. ``distinct`` is the number of chunks that a
    tier without evictions has in the end. ``assumed`` and ``warnings`` are the
    attributes of the :class:`~kvtier.sim.traces.Trace`, each joined into one text.
    """

    trace_sha256: str
    format: str
    chunk_tokens: int
    distinct: int
    capacity: str
    capacity_share: float
    seed: int
    kvtier_version: str
    assumed: str
    warnings: str

    @property
    def of(self) -> tuple[str, str]:
        """The trace's name and hash. The hash distinguishes two files with the same name."""
        return self.trace, self.trace_sha256


COLUMNS: Final = tuple(SweepResult.__dataclass_fields__)


def sweep(  # noqa: PLR0913 - the parameters of a grid
    traces: Sequence[Trace],
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    chunk_bytes: Sequence[int],
    touch_order: TouchOrder = "policy",
    groups: str = ONE_GROUP,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[SweepResult]:
    """Simulate every policy at every size on every trace.

    Args:
        traces: The traces.
        policies: Names of eviction policies.
        capacities: Sizes in a form that :func:`~kvtier.sim.capacity.parse_capacity` reads.
        chunk_bytes: Size in bytes of a chunk of each trace.
        touch_order: The order of touches in every simulation.
        groups: KV cache groups as :func:`~kvtier.sim.hybrid.parse_group_list` reads them.
        jobs: Number of processes. With 1, the sweep runs in this process.
        progress: Called with the share of finished simulations after each simulation.

    Returns:
        One result per cell, in the given order of traces, policies and sizes.

    Raises:
        ConfigError: A policy does not exist, or a size or ``groups`` is invalid.
    """
    for name in policies:
        if name == BELADY:
            check_belady(groups)
        else:
            build_eviction(name, capacity=1)
    distinct = [distinct_chunks(trace, groups) for trace in traces]
    cells = [
        Cell(
            number,
            distinct[number],
            policy,
            capacity,
            parse_capacity(
                capacity, distinct=distinct[number], chunk_bytes=chunk_bytes[number]
            ),
        )
        for number, policy, capacity in product(range(len(traces)), policies, capacities)
    ]
    results: dict[Cell, SweepResult] = {}
    with _runner(traces, touch_order, groups, min(jobs, len(cells))) as run:
        for cell, result in run(cells):
            results[cell] = result
            if progress is not None:
                progress(len(results) / len(cells))
    return [results[cell] for cell in cells]


def write_csv(results: Sequence[SweepResult], path: Path) -> None:
    """Write ``results`` to ``path``: a header line, then one row per result."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


def _run(
    traces: Sequence[Trace], touch_order: TouchOrder, groups: str, cell: Cell
) -> tuple[Cell, SweepResult]:
    """Simulate one cell."""
    trace = traces[cell.trace]
    result = simulate_single(
        trace,
        policy=cell.policy,
        capacity=cell.capacity_chunks,
        touch_order=touch_order,
        groups=groups,
    )
    return cell, SweepResult(
        **asdict(result),
        trace_sha256=trace.sha256,
        format=trace.format,
        chunk_tokens=trace.chunk_tokens,
        assumed="; ".join(trace.assumed),
        warnings="; ".join(trace.warnings),
        distinct=cell.distinct,
        capacity=cell.capacity,
        capacity_share=cell.capacity_chunks / cell.distinct,
        seed=SEED,
        kvtier_version=kvtier.__version__,
    )


@contextmanager
def _runner(
    traces: Sequence[Trace], touch_order: TouchOrder, groups: str, jobs: int
) -> Iterator[Any]:
    """Yield a function that simulates cells and yields (cell, result) pairs in any order."""
    run = partial(_run, traces, touch_order, groups)
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
"""In a process of the pool, the function that simulates a cell; empty in other processes."""


def _prepare(run: Callable[[Cell], tuple[Cell, SweepResult]]) -> None:
    # An interrupt reaches all processes of a terminal; the workers end at once and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prepared[:] = [run]


def _end_with_parent() -> None:
    """Wait until the parent process ends, then end this process."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_prepared(cell: Cell) -> tuple[Cell, SweepResult]:
    return _prepared[0](cell)
