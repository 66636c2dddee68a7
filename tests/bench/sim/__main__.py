"""``python -m tests.bench.sim``: references per second against the bars, and a whole sweep.

Every figure is the best of a few runs in the processor time of this one process, because a
machine that does other things as well tells nothing by the wall; the sweep alone, which uses
several, is timed by the wall. With ``--markdown`` they are the rows of the documentation's
table. ``--only default`` compares the default policy with LRU on traffic made to mislead it,
``--only batching`` in an engine that batches, and ``--only replay`` compares the simulator with
replays of real bytes; these three are left out otherwise.

The trace is the conversation trace if there is one, in the directory ``KVTIER_TRACES`` names or
in ``shared/traces`` beside the repository; else it is a generated one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from kvtier.config import parse_config
from kvtier.sim.cache import simulate_cache
from kvtier.sim.single import TouchOrder, simulate_single
from kvtier.sim.sweep import sweep
from kvtier.sim.traces import Trace, generate, read_trace
from tests.bench.sim.batching import compared
from tests.bench.sim.hostile import FLOOR_POINTS, rows
from tests.bench.sim.replayed import AIM, predictions
from tests.unit.sim_traces import TRACES

CHUNK = 4 << 20
BARS = {
    "lru": 1_000_000,
    "fifo": 1_000_000,
    "arc": 500_000,
    "s3-fifo": 500_000,
    "slru": 500_000,
    "2q": 500_000,
    "lhd": 500_000,
}
ORDERS: Final[tuple[TouchOrder, ...]] = ("forward", "reverse")
TIERS_BAR = 250_000
SWEEP_BAR_S = 60.0
SWEPT = (
    *(policy for policy in BARS if policy != "lhd"),
    "lirs",
    "w-tinylfu",
)
SIZES = ("0.1%", "1%", "5%", "10%", "20%", "50%")


class Figure(NamedTuple):
    """One measurement."""

    what: str
    value: float
    bar: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value >= self.bar if self.unit == "refs/s" else self.value <= self.bar


def load() -> Trace:
    path = TRACES / "mooncake_conversation.jsonl"
    if path.exists():
        return read_trace(path)
    return generate("chat", sessions=12_000, per_s=3.0, chunk_tokens=512, seed=1)


def refs_per_s(trace: Trace, run: Callable[[], object], rounds: int) -> float:
    best = min(_seconds(run) for _ in range(rounds))
    return trace.refs / best


def _seconds(run: Callable[[], object]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def singles(trace: Trace, rounds: int) -> Iterator[Figure]:
    capacity = trace.distinct // 20
    for policy, bar in BARS.items():
        for order in ORDERS:
            run = partial(
                simulate_single, trace, policy=policy, capacity=capacity, touch_order=order
            )
            yield Figure(
                f"{policy}, 5 %, {order}", refs_per_s(trace, run, rounds), bar, "refs/s"
            )


def several_tiers(trace: Trace, rounds: int) -> Iterator[Figure]:
    ram, nvme = (trace.distinct * share // 100 * CHUNK // (1 << 20) for share in (1, 10))
    for write in ("through", "evict"):
        text = (
            "tiers:\n"
            f"  - {{kind: ram, capacity: {ram}MiB, eviction: lru}}\n"
            f"  - {{kind: nvme, path: /nowhere, capacity: {nvme}MiB, eviction: lru}}\n"
            f"placement: {{write: {write}}}\n"
            "transfer: {queue_limit: 4GiB}\n"
        )
        config = parse_config(text, source="bench")
        run = partial(simulate_cache, trace, config, chunk_bytes=CHUNK)
        what = f"tiers of 1 % + 10 %, write: {write}"
        yield Figure(what, refs_per_s(trace, run, rounds), TIERS_BAR, "refs/s")


def swept(trace: Trace) -> Figure:
    begun = time.perf_counter()
    sweep([trace], SWEPT, SIZES, chunk_bytes=[CHUNK], jobs=2)
    seconds = time.perf_counter() - begun
    return Figure(f"sweep {len(SWEPT)} x {len(SIZES)}, 2 jobs", seconds, SWEEP_BAR_S, "s")


def measure(trace: Trace, rounds: int, only: str | None) -> Iterator[Figure]:
    if only in (None, "singles"):
        yield from singles(trace, rounds)
    if only in (None, "tiers"):
        yield from several_tiers(trace, rounds)
    if only in (None, "sweep"):
        yield swept(trace)


def show(console: Console, figure: Figure) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=36)
    for _ in range(2):
        table.add_column(width=18, justify="right")
    table.add_row(
        figure.what,
        f"{figure.value:,.0f} {figure.unit}",
        f"bar {figure.bar:,.0f}",
        "" if figure.met else "MISSED",
    )
    console.print(table)


def markdown(console: Console, figure: Figure) -> None:
    sign = ">=" if figure.unit == "refs/s" else "<="
    value, bar = f"{figure.value:,.0f} {figure.unit}", f"{sign} {figure.bar:,.0f}"
    _row(console, figure.what, value, bar, _word(figure.met))


def _word(met: bool) -> str:
    return "yes" if met else "no"


def compare_default(console: Console) -> None:
    """Print what the default loses and wins against LRU, as rows of a table."""
    _rows(console, "traffic", "cases", "worst", "median", "best", f">= {FLOOR_POINTS}")
    for row in rows():
        points = [f"{value:+.2f}" for value in (row.worst, row.median, row.best)]
        met = _word(row.worst >= FLOOR_POINTS)
        _row(console, row.traffic, str(row.cases), *points, met)


def compare_batching(console: Console) -> None:
    """Print the hits of the default and of LRU in an engine that batches."""
    path = TRACES / "mooncake_synthetic.jsonl"
    _rows(console, "traffic", "size", "lru", "lhd", "lead")
    for row in compared(read_trace(path) if path.exists() else None):
        points = (f"{row.lru:.2f}", f"{row.lhd:.2f}", f"{row.lhd - row.lru:+.2f}")
        _row(console, row.traffic, f"{row.size:.0%}", *points)


def compare_replay(console: Console, directory: Path) -> None:
    """Print how far predictions are from replays, as rows of a table."""
    _rows(console, "figure", "replayed", "predicted", "apart", f"within {AIM:.0%}")
    for figure in predictions(directory):
        values = [
            f"{value:,.1f} {figure.unit}" for value in (figure.replayed, figure.predicted)
        ]
        verdict = ("", "")
        if figure.apart is not None:
            verdict = (f"{figure.apart:+.1%}", _word(abs(figure.apart) <= AIM))
        _row(console, figure.what, *values, *verdict)


def _rows(console: Console, *names: str) -> None:
    _row(console, *names)
    _row(console, *("---" for _ in names))


def _row(console: Console, *cells: str) -> None:
    console.print(f"| {' | '.join(cells)} |", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sim", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs per figure; the best counts"
    )
    parts = ["singles", "tiers", "sweep", "default", "batching", "replay"]
    parser.add_argument("--only", choices=parts, help="this part alone")
    parser.add_argument("--markdown", action="store_true", help="print rows of a table")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk that replays use")
    options = parser.parse_args()
    console = Console(highlight=False, width=96)
    if options.only == "default":
        compare_default(console)
    elif options.only == "batching":
        compare_batching(console)
    elif options.only == "replay":
        compare_replay(console, options.dir.resolve())
    else:
        time_simulator(console, options)


def time_simulator(console: Console, options: argparse.Namespace) -> None:
    """Print the speeds."""
    trace = load()
    if options.markdown:
        _rows(console, "figure", "measured", "bar", "met")
    else:
        text = f"{trace.name}: {trace.refs:,} references to {trace.distinct:,} chunks"
        console.print(text)
    for figure in measure(trace, options.rounds, options.only):
        (markdown if options.markdown else show)(console, figure)


if __name__ == "__main__":
    main()
