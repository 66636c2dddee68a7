"""Prints the results of ``kvtier sim run`` and ``kvtier sim sweep``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.cli._render import (
    make_console,
    make_table,
    show_line,
    show_table,
    show_tiers_apart,
)
from kvtier.cli._trace import show_assumptions
from kvtier.sim.cache import CacheResult, Rate, SharedResult, TierResult
from kvtier.sim.sweep import SweepResult
from kvtier.sim.traces import Trace
from kvtier.units import approximate_rate, approximate_size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_cache", "show_sweep"]

_TIER_COLUMNS: Final[Mapping[str, Callable[[TierResult], str]]] = {
    "chunks": lambda tier: f"{tier.capacity_chunks:,}",
    "hits": lambda tier: f"{tier.hits:,}",
    "ratio": lambda tier: f"{tier.hit_ratio:.4f}",
    "written": lambda tier: f"{tier.chunks_written:,}",
    "promoted": lambda tier: f"{tier.chunks_promoted:,}",
    "evicted": lambda tier: f"{tier.evictions:,}",
    "DWPD": lambda tier: "" if tier.dwpd is None else f"{tier.dwpd:.2f}",
}
"""Columns of numbers of a tier. A function returns the column's text."""
_SWEEP_TABLES: Final[Mapping[str, Callable[[SweepResult], float]]] = {
    "prefix hit ratio, %": lambda cell: cell.prefix_hit_ratio,
    "stranded hits, % of the references": lambda cell: cell.stranded_hits / max(cell.refs, 1),
}
"""Tables of a sweep. A function returns a cell's figure as a ratio."""


def show_cache(result: CacheResult, trace: Trace) -> None:
    """Print the result of a simulation of all tiers."""
    console = make_console()
    cells = [
        (tier.name, tier.eviction, *(text_of(tier) for text_of in _TIER_COLUMNS.values()))
        for tier in result.tiers
    ]
    show_tiers_apart(console, "tier", "eviction", numbers=tuple(_TIER_COLUMNS), tiers=cells)
    console.print()
    if len(result.engines) > 1:
        _show_engines(console, result)
        console.print()
    for line in _lines(result):
        show_line(console, line)
    show_assumptions(trace)


def show_sweep(results: Sequence[SweepResult]) -> None:
    """Print the prefix hit ratios and the stranded hits of a sweep, for each trace."""
    console = make_console()
    for trace in dict.fromkeys(result.of for result in results):
        rows = [result for result in results if result.of == trace]
        sizes = list(dict.fromkeys(row.capacity for row in rows))
        for title, ratio_of in _SWEEP_TABLES.items():
            console.print(f"{trace[0]}: {title}", soft_wrap=True)
            table = make_table("policy", numbers=tuple(sizes))
            for policy in dict.fromkeys(row.policy for row in rows):
                cells = {row.capacity: row for row in rows if row.policy == policy}
                table.add_row(policy, *(f"{ratio_of(cells[size]) * 100:.2f}" for size in sizes))
            show_table(console, table)


def _show_engines(console: Console, result: CacheResult) -> None:
    names = tuple(f"from {tier.name}" for tier in result.tiers)
    table = make_table("engine", numbers=("requests", "prompt tokens", *names), narrow=True)
    for number, engine in enumerate(result.engines):
        hits = [f"{engine.hit_tokens[tier.name]:,}" for tier in result.tiers]
        table.add_row(str(number), f"{engine.requests:,}", f"{engine.prompt_tokens:,}", *hits)
    show_table(console, table)


def _lines(result: CacheResult) -> Iterator[str]:
    yield (
        f"hits {result.total_hit_ratio:.4f} of {result.refs:,} references, "
        f"{result.prefix_hit_ratio:.4f} of the prompt tokens"
    )
    yield (
        f"per reference {result.writes_per_ref:.4f} chunks written to slower tiers, "
        f"{result.promotions_per_ref:.4f} promoted"
    )
    waits, without = (
        ", ".join(f"{name} {value:.3f} s" for name, value in levels.items())
        for levels in (result.ttft_s, result.ttft_no_cache_s)
    )
    yield f"time to first token {waits}; without a cache {without}"
    for tier in result.tiers:
        if tier.bytes_written_per_day is not None:
            size = approximate_size(tier.bytes_written_per_day)
            yield f"{tier.name}: {size} written per day"
    if result.shared is not None:
        yield from _shared_lines(result.shared)
    yield from _notes(result)
    yield _assumed(result)


def _shared_lines(shared: SharedResult) -> Iterator[str]:
    traffic = shared.traffic
    yield (
        f"shared tier: {traffic.questions:,} questions for {traffic.keys_asked:,} chunks, "
        f"{traffic.keys_found:,} found; {traffic.chunks_read:,} read, "
        f"{traffic.chunks_missing:,} gone before; {traffic.chunks_written:,} written, "
        f"{traffic.chunks_already_there:,} there already"
    )
    rates = (
        _rate("read", shared.read_bytes_per_s, approximate_rate),
        _rate("written", shared.written_bytes_per_s, approximate_rate),
        _rate("questions", shared.questions_per_s, lambda rate: f"{rate:,.2f}/s"),
    )
    yield f"shared tier, mean and busiest minute: {', '.join(rates)}"
    yield (
        f"belady at the shared tier's size, all requests: hits {shared.belady_hit_ratio:.4f}, "
        f"{shared.belady_prefix_hit_ratio:.4f} of the prompt tokens"
    )


def _rate(what: str, rate: Rate, form: Callable[[float], str]) -> str:
    mean = "-" if rate.mean is None else form(rate.mean)
    return f"{what} {mean} and {form(rate.peak)}"


def _notes(result: CacheResult) -> Iterator[str]:
    model = result.time_model
    compute_s = result.chunk_tokens / model.prefill_tokens_per_s
    for name, speed in model.speeds.items():
        if (read_s := result.chunk_bytes / speed.read_bytes_per_s) > compute_s:
            yield (
                f"note: {name} reads a chunk in {read_s * 1e3:.2f} ms, longer than computing "
                f"it ({compute_s * 1e3:.2f} ms), so requests may wait longer than without a "
                "cache"
            )
    if result.peak_load_no_cache > 1:
        yield (
            f"note: the busiest tenth of the trace needs {result.peak_load_no_cache:.1f} times "
            "the prefill rate without a cache, so its times include a queue; compare hits, or "
            "give --prefill-rate"
        )


def _assumed(result: CacheResult) -> str:
    model, engines = result.time_model, len(result.engines)
    speeds = ", ".join(
        f"{name} reads {approximate_rate(speed.read_bytes_per_s)}, "
        f"writes {approximate_rate(speed.write_bytes_per_s)}"
        for name, speed in model.speeds.items()
    )
    chunks = f"{approximate_size(result.chunk_bytes)} ({result.chunk_tokens:,} tokens"
    line = (
        f"assumed: chunks of {chunks}, of the trace); "
        f"{model.prefill_tokens_per_s:,.0f} prompt tokens computed per second; {speeds}; "
        f"transfer.load_path: {result.load_path}"
    )
    return f"{line}; {engines} such engines, routing: {result.routing}" if engines > 1 else line
