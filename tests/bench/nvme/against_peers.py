"""Promote, store, processor time and jitter: kvtier beside fio and vLLM's own tiering."""

from __future__ import annotations

import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from kvtier.units import approximate_size
from tests.bench.nvme.fio import QUEUE_DEPTHS, Direction, Fio, Memory
from tests.bench.nvme.lab import MANAGED, Lab
from tests.bench.nvme.measures import Passes
from tests.bench.nvme.passes import Peer, TransferSpec
from tests.bench.nvme.rows import Row
from tests.bench.nvme.workload import CHUNK_SIZES, Workload

__all__ = ["against_peers"]

_OF: dict[Memory, str] = {"malloc": "", "shmhuge": "fio in huge pages"}
_WORDS: dict[Memory, str] = {"malloc": "small pages", "shmhuge": "huge pages"}


@dataclass(slots=True)
class _Figures:
    """Figures of one chunk size, one per round."""

    fio: dict[tuple[Memory, Direction, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    passes: dict[Peer, list[Passes]] = field(default_factory=lambda: defaultdict(list))

    def both(self, figure: Callable[[Passes], float]) -> tuple[list[float], list[float]]:
        """Return one figure of kvtier and of vLLM, round by round."""
        ours, theirs = self.passes["kvtier"], self.passes["native_fs"]
        return [figure(passes) for passes in ours], [figure(passes) for passes in theirs]

    def best_fio(self, memory: Memory, direction: Direction) -> tuple[int, list[float]]:
        """Return the queue depth with the better median, and its figures."""
        by_depth = {depth: self.fio[memory, direction, depth] for depth in QUEUE_DEPTHS}
        return max(by_depth.items(), key=lambda measured: statistics.median(measured[1]))


def against_peers(lab: Lab) -> Iterator[Row]:
    """Run all rounds of all chunk sizes."""
    with lab.scratch("fio") as directory:
        fio = Fio(directory / "file", lab.plan.working_set_nbytes)
        lab.say("fio: fill its file")
        fio.fill()
        for chunk_nbytes in CHUNK_SIZES:
            figures = _run_rounds(lab, lab.plan.workload(chunk_nbytes), fio)
            yield from _throughput_rows(chunk_nbytes, figures, fio.memories)
            yield from _cost_rows(chunk_nbytes, figures)


def _run_rounds(lab: Lab, workload: Workload, fio: Fio) -> _Figures:
    figures = _Figures()
    size, rounds = approximate_size(workload.chunk_nbytes), lab.plan.rounds
    with lab.scratch("kvtier") as store, lab.scratch("native_fs") as files:
        lab.say(f"{size}: kvtier fills its store")
        # Written once, like fio's file: slots that were never written are another disk.
        lab.transfer(TransferSpec("kvtier", store, workload))
        for number in range(1, rounds + 1):
            for peer in _order(("fio", *MANAGED), number - 1):
                lab.say(f"{size}, round {number} of {rounds}: {peer}")
                if peer == "fio":
                    _measure_fio(lab, fio, workload, figures)
                elif peer == "kvtier":
                    spec = TransferSpec("kvtier", store, workload, number)
                    figures.passes["kvtier"].append(lab.transfer(spec))
                else:
                    spec = TransferSpec("native_fs", files, workload, number)
                    figures.passes["native_fs"].append(lab.transfer(spec))
                    _empty(files)
    return figures


def _measure_fio(lab: Lab, fio: Fio, workload: Workload, figures: _Figures) -> None:
    directions: tuple[Direction, ...] = ("write", "read")  # written before read, like a store
    for memory, depth, direction in product(fio.memories, QUEUE_DEPTHS, directions):
        measured = fio.measure(direction, depth, memory, workload)
        figures.fio[memory, direction, depth].append(measured)
        lab.say(f"    {direction} at queue depth {depth}, {memory}: {measured:.0f} MB/s")


def _throughput_rows(
    chunk_nbytes: int, figures: _Figures, fio_memories: Sequence[Memory]
) -> Iterator[Row]:
    benches: tuple[tuple[str, Direction, Callable[[Passes], float]], ...] = (
        ("promote", "read", lambda passes: passes.promote.mb_per_s),
        ("store", "write", lambda passes: passes.store.mb_per_s),
    )
    for bench, direction, figure in benches:
        both = figures.both(figure)
        for memory in fio_memories:
            depth, measured = figures.best_fio(memory, direction)
            yield Row.over_rounds(
                bench,
                chunk_nbytes,
                "fio",
                (both[0], measured),
                "MB/s",
                of=_OF[memory],
                remark=f"fio {direction}s {approximate_size(chunk_nbytes)} best at depth "
                f"{depth} with its buffers in {_WORDS[memory]}.",
            )
        yield Row.over_rounds(
            bench,
            chunk_nbytes,
            "native_fs",
            both,
            "MB/s",
            remark=_missed(chunk_nbytes, figures),
        )


def _cost_rows(chunk_nbytes: int, figures: _Figures) -> Iterator[Row]:
    cpu = figures.both(lambda passes: passes.cpu_s_per_gib)
    yield Row.over_rounds("cpu", chunk_nbytes, "native_fs", cpu, "core-s/GiB")
    delay = figures.both(lambda passes: passes.p99_delay_ms)
    yield Row.over_rounds("jitter", chunk_nbytes, "native_fs", delay, "ms", of="p99")


def _missed(chunk_nbytes: int, figures: _Figures) -> str:
    """Say who did not move all it was asked to; the rates are of what was moved."""
    missed = {
        peer: sum(passes.missed_chunks for passes in figures.passes[peer]) for peer in MANAGED
    }
    words = ", ".join(f"{peer} {chunks}" for peer, chunks in missed.items() if chunks)
    return f"{approximate_size(chunk_nbytes)}: chunks missed: {words}." if words else ""


def _order(peers: Sequence[str], number: int) -> Sequence[str]:
    """Return the order of a round; over the rounds each peer follows each other one."""
    by = number // 2 % len(peers)
    rotated = (*peers[by:], *peers[:by])
    return rotated[::-1] if number % 2 else rotated


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        shutil.rmtree(entry)
