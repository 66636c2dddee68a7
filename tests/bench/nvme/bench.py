"""Runs the benches, peers interleaved round by round."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvtier.units import approximate_size
from tests.bench.nvme.fio import QUEUE_DEPTHS, Fio
from tests.bench.nvme.isolation import IsolatedProcess
from tests.bench.nvme.measures import Passes
from tests.bench.nvme.passes import Peer, TransferSpec, transfer
from tests.bench.nvme.rows import Row
from tests.bench.nvme.workload import CHUNK_SIZES, Workload

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Bench", "Plan"]

_MANAGED: tuple[Peer, ...] = ("native_fs", "kvtier")
_TRANSFERS = {"promote", "store", "cpu", "jitter"}
_FRACTION = 4
"""Of the working set for benches that compare a peer with itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        rounds: Rounds per figure.
        working_set_nbytes: Bytes of all requests.
        ram_nbytes: Bytes of the RAM tier.
        only: Names of the benches wanted.
    """

    rounds: int
    working_set_nbytes: int
    ram_nbytes: int
    only: frozenset[str]

    @property
    def disk_nbytes(self) -> int:
        """Bytes needed at most at any moment: fio's file, two stores, and some slack."""
        return 4 * self.working_set_nbytes + (6 << 30)

    def workload(self, chunk_nbytes: int, *, fraction: int = 1) -> Workload:
        """Return the sizes for one chunk size."""
        return Workload(chunk_nbytes, self.working_set_nbytes // fraction, self.ram_nbytes)


@dataclass(slots=True)
class _Figures:
    """Figures of one chunk size, by name, one per round."""

    fio: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    passes: dict[Peer, list[Passes]] = field(default_factory=lambda: defaultdict(list))

    def of(self, peer: Peer, figure: Callable[[Passes], float]) -> list[float]:
        """Return one figure of a peer, round by round."""
        return [figure(passes) for passes in self.passes[peer]]

    def best_fio(self, direction: str) -> tuple[int, list[float]]:
        """Return the queue depth with the better median, and its figures."""
        depth = max(
            QUEUE_DEPTHS, key=lambda depth: statistics.median(self.fio[direction, depth])
        )
        return depth, self.fio[direction, depth]


class Bench:
    """All benches of one run. A context manager: its processes end with it.

    Args:
        plan: What to run.
        directory: Where; emptied bit by bit as the run goes on.
        console: Where progress is shown.
    """

    def __init__(self, plan: Plan, directory: Path, console: Console) -> None:
        self._plan = plan
        self._directory = directory
        self._console = console
        self._stack = contextlib.ExitStack()
        self._processes: dict[Peer, IsolatedProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(self) -> list[Row]:
        """Run what the plan wants."""
        rows: list[Row] = []
        if _TRANSFERS & self._plan.only:
            fio = Fio(self._directory / "fio.bin", self._plan.working_set_nbytes)
            self._say("fio: fill its file")
            fio.fill()
            for chunk_nbytes in CHUNK_SIZES:
                rows += self._transfers(self._plan.workload(chunk_nbytes), fio)
            (self._directory / "fio.bin").unlink()
        return [row for row in rows if row.bench in self._plan.only]

    # -- promote, store, cpu, jitter ----------------------------------------------------------

    def _transfers(self, workload: Workload, fio: Fio) -> list[Row]:
        figures = _Figures()
        with self._scratch("kvtier") as store, self._scratch("native_fs") as files:
            # Written once, like fio's file: slots that were never written are another disk.
            self._transfer(TransferSpec("kvtier", store, workload))
            for round_number in range(1, self._plan.rounds + 1):
                for peer in _rotated(("fio", *_MANAGED), round_number - 1):
                    self._say(
                        f"{approximate_size(workload.chunk_nbytes)}, "
                        f"round {round_number} of {self._plan.rounds}: {peer}"
                    )
                    if peer == "fio":
                        self._measure_fio(fio, workload, figures)
                    elif peer == "kvtier":
                        spec = TransferSpec("kvtier", store, workload, round_number)
                        figures.passes["kvtier"].append(self._transfer(spec))
                    else:
                        spec = TransferSpec("native_fs", files, workload, round_number)
                        figures.passes["native_fs"].append(self._transfer(spec))
                        _empty(files)
        return list(_transfer_rows(workload.chunk_nbytes, figures))

    def _measure_fio(self, fio: Fio, workload: Workload, figures: _Figures) -> None:
        for depth in QUEUE_DEPTHS:
            # Written before read, like the stores.
            for direction in ("write", "read"):
                measured = fio.measure(direction, depth, workload)
                figures.fio[direction, depth].append(measured)
                self._say(f"    {direction} at queue depth {depth}: {measured:.0f} MB/s")

    def _transfer(self, spec: TransferSpec) -> Passes:
        passes = self._process(spec.peer).run(transfer, spec)
        self._say(
            f"    store {passes.store.mb_per_s:.0f} MB/s, promote "
            f"{passes.promote.mb_per_s:.0f} MB/s, {passes.cpu_s_per_gib:.2f} core-s/GiB, "
            f"p99 {passes.p99_delay_ms:.2f} ms{_missed(passes)}"
        )
        return passes

    # -- odds and ends ------------------------------------------------------------------------

    def _process(self, peer: Peer) -> IsolatedProcess:
        """Return the process that runs ``peer``; started when first needed."""
        if peer not in self._processes:
            self._processes[peer] = self._stack.enter_context(IsolatedProcess())
        return self._processes[peer]

    @contextlib.contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        path = self._directory / name
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def _say(self, words: str) -> None:
        self._console.print(words, highlight=False)


def _transfer_rows(chunk_nbytes: int, figures: _Figures) -> Iterator[Row]:
    for bench, direction, figure in (
        ("promote", "read", lambda passes: passes.promote.mb_per_s),
        ("store", "write", lambda passes: passes.store.mb_per_s),
    ):
        ours = figures.of("kvtier", figure)
        depth, measured = figures.best_fio(direction)
        remark = f"fio {direction}s {approximate_size(chunk_nbytes)} at queue depth {depth}."
        yield Row.over_rounds(
            bench, chunk_nbytes, "fio", (ours, measured), "MB/s", remark=remark
        )
        theirs = figures.of("native_fs", figure)
        yield Row.over_rounds(bench, chunk_nbytes, "native_fs", (ours, theirs), "MB/s")
    for bench, of, unit, figure in (
        ("cpu", "cpu", "core-s/GiB", lambda passes: passes.cpu_s_per_gib),
        ("jitter", "p99", "ms", lambda passes: passes.p99_delay_ms),
    ):
        both = figures.of("kvtier", figure), figures.of("native_fs", figure)
        yield Row.over_rounds(bench, chunk_nbytes, "native_fs", both, unit, of=of)


def _rotated(peers: Sequence[str], by: int) -> Sequence[str]:
    by %= len(peers)
    return (*peers[by:], *peers[:by])


def _missed(passes: Passes) -> str:
    missed = passes.store.missed_chunks + passes.promote.missed_chunks
    return f", {missed} chunks missed" if missed else ""


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        shutil.rmtree(entry)
