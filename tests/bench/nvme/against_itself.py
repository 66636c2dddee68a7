"""kvtier beside itself: a busy process, an aged store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvtier.units import approximate_size
from tests.bench.nvme.ageing import age
from tests.bench.nvme.lab import MANAGED, Lab
from tests.bench.nvme.measures import Pass, Passes
from tests.bench.nvme.passes import Peer, TransferSpec, promote
from tests.bench.nvme.rows import Row
from tests.bench.nvme.workload import CHUNK_SIZES

__all__ = ["aged", "busy"]


def busy(lab: Lab) -> Iterator[Row]:
    """Compare each peer beside a busy thread with itself, and the two losses."""
    for chunk_nbytes in CHUNK_SIZES:
        runs: dict[tuple[Peer, bool], list[Passes]] = {}
        workload = lab.plan.workload(chunk_nbytes)
        for peer in MANAGED:
            with lab.scratch(f"busy-{peer}") as path:
                spec = TransferSpec(peer, path, workload)
                lab.transfer(spec)
                for number in range(1, lab.plan.rounds + 1):
                    for thread in (False, True) if number % 2 else (True, False):
                        _announce(lab, chunk_nbytes, number, f"{peer}, busy thread: {thread}")
                        one = replace(spec, generation=2 * number + thread, busy=thread)
                        runs.setdefault((peer, thread), []).append(lab.transfer(one))
        for of in ("promote", "store"):
            yield from _busy_rows(chunk_nbytes, of, runs)


def _busy_rows(
    chunk_nbytes: int, of: str, runs: dict[tuple[Peer, bool], list[Passes]]
) -> Iterator[Row]:
    kept: dict[Peer, list[float]] = {}
    for peer in MANAGED:
        laden, idle = (
            [getattr(passes, of).mb_per_s for passes in runs[peer, thread]]
            for thread in (True, False)
        )
        kept[peer] = [with_it / without for with_it, without in zip(laden, idle, strict=True)]
        if peer == "kvtier":
            both = laden, idle
            yield Row.over_rounds("busy", chunk_nbytes, "self", both, "MB/s", of=of)
    shares = kept["kvtier"], kept["native_fs"]
    yield Row.over_rounds("busy", chunk_nbytes, "native_fs", shares, "share kept", of=of)


def aged(lab: Lab) -> Iterator[Row]:
    """Compare a store that was filled once with one that was refilled at random."""
    kvtier = lab.process("kvtier")
    for chunk_nbytes in CHUNK_SIZES:
        workload = lab.plan.workload(chunk_nbytes)
        with lab.scratch("fresh") as fresh_path, lab.scratch("aged") as aged_path:
            fresh = TransferSpec("kvtier", fresh_path, workload)
            old = TransferSpec("kvtier", aged_path, workload)
            lab.say(f"{approximate_size(chunk_nbytes)}: filling one store, ageing another")
            lab.transfer(fresh)
            kvtier.run(age, old)
            figures: dict[TransferSpec, list[float]] = {fresh: [], old: []}
            for number in range(1, lab.plan.rounds + 1):
                for spec in (fresh, old) if number % 2 else (old, fresh):
                    _announce(lab, chunk_nbytes, number, f"promote, {spec.path.name}")
                    figures[spec].append(_say(lab, kvtier.run(promote, spec, number)))
        both = figures[old], figures[fresh]
        yield Row.over_rounds("aged", chunk_nbytes, "self", both, "MB/s")


def _announce(lab: Lab, chunk_nbytes: int, number: int, what: str) -> None:
    lab.say(f"{approximate_size(chunk_nbytes)}, round {number} of {lab.plan.rounds}: {what}")


def _say(lab: Lab, one: Pass) -> float:
    lab.say(f"    {one.mb_per_s:.0f} MB/s")
    return one.mb_per_s
