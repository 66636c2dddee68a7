"""Prints the results of ``kvtier sim run`` and ``kvtier sim fleet`` for a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.cli._render import (
    make_console,
    make_table,
    show_json,
    show_line,
    show_table,
    show_tiers_apart,
)
from kvtier.cli._trace import show_assumptions
from kvtier.sim.cache import CacheResult, SimulationResult, TierResult, TierTraffic
from kvtier.sim.fleet import FleetResult, Rate, SharedResult
from kvtier.sim.time_model import TimeModel
from kvtier.sim.traces import Trace
from kvtier.units import approximate_rate, approximate_size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_cache", "show_fleet"]

_Tier = TypeVar("_Tier", bound=TierTraffic)

_HITS: Final[Mapping[str, Callable[[TierTraffic], str]]] = {
    "chunks": lambda tier: f"{tier.capacity_chunks:,}",
    "hits": lambda tier: f"{tier.hits:,}",
    "ratio": lambda tier: f"{tier.hit_ratio:.4f}",
}
"""Columns of a tier's capacity and hits. A function returns the column's text for a tier."""
_MOVES: Final[Mapping[str, Callable[[TierTraffic], str]]] = {
    "written": lambda tier: f"{tier.chunks_written:,}",
    "promoted": lambda tier: f"{tier.chunks_promoted:,}",
    "evicted": lambda tier: f"{tier.evictions:,}",
}
"""Columns of the chunks that entered and left a tier."""


def show_cache(result: CacheResult, trace: Trace, *, as_json: bool) -> None:
    """Print the result of a simulation of one engine."""
    if as_json:
        show_json(asdict(result) | trace.reading())
        return

    def dwpd(tier: TierResult) -> str:
        return "" if tier.dwpd is None else f"{tier.dwpd:.2f}"

    console = make_console()
    _show_tiers(console, result.tiers, {**_HITS, **_MOVES, "DWPD": dwpd})
    console.print()
    for line in _cache_lines(result):
        show_line(console, line)
    show_assumptions(trace)


def show_fleet(result: FleetResult, trace: Trace, *, as_json: bool) -> None:
    """Print the result of a simulation of several engines."""
    if as_json:
        show_json(asdict(result) | trace.reading())
        return

    def hit_tokens(tier: TierTraffic) -> str:
        return f"{result.hit_tokens[tier.name]:,}"

    console = make_console()
    _show_tiers(console, result.tiers, {**_HITS, "hit tokens": hit_tokens, **_MOVES})
    console.print()
    names = tuple(f"from {tier.name}" for tier in result.tiers)
    table = make_table("engine", numbers=("requests", "prompt tokens", *names), narrow=True)
    for number, engine in enumerate(result.engines):
        hits = [f"{engine.hit_tokens[tier.name]:,}" for tier in result.tiers]
        table.add_row(str(number), f"{engine.requests:,}", f"{engine.prompt_tokens:,}", *hits)
    show_table(console, table)
    console.print()
    for line in _fleet_lines(result):
        show_line(console, line)
    show_assumptions(trace)


def _show_tiers(
    console: Console, tiers: Sequence[_Tier], columns: Mapping[str, Callable[[_Tier], str]]
) -> None:
    cells = [
        (tier.name, tier.eviction, *(text_of(tier) for text_of in columns.values()))
        for tier in tiers
    ]
    show_tiers_apart(console, "tier", "eviction", numbers=tuple(columns), tiers=cells)


def _cache_lines(result: CacheResult) -> Iterator[str]:
    yield _hits(result)
    yield (
        f"per reference {result.writes_per_ref:.4f} chunks written to slower tiers, "
        f"{result.promotions_per_ref:.4f} promoted"
    )
    yield _waits(result)
    for tier in result.tiers:
        if tier.bytes_written_per_day is not None:
            size = approximate_size(tier.bytes_written_per_day)
            yield f"{tier.name}: {size} written per day"
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
            "what the engine computes without a cache, so its times include a queue; compare "
            "hits, or give --prefill-rate"
        )
    tokens = f"{result.chunk_tokens:,} tokens, of the trace"
    yield (
        f"assumed: chunks of {approximate_size(result.chunk_bytes)} ({tokens}); "
        f"{_speeds(model)}; transfer.load_path: {result.load_path}"
    )


def _fleet_lines(result: FleetResult) -> Iterator[str]:
    yield _hits(result)
    yield _waits(result)
    if result.shared is not None:
        yield from _shared_lines(result.shared)
    size = f"{approximate_size(result.chunk_bytes)} ({result.chunk_tokens:,} tokens)"
    routing = f"routing: {result.routing}; transfer.load_path: {result.load_path}"
    yield (
        f"assumed for each engine: chunks of {size}; {_speeds(result.time_model)}; {routing}"
    )


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


def _hits(result: SimulationResult) -> str:
    of = f"{result.refs:,} references, {result.prefix_hit_ratio:.4f} of the prompt tokens"
    return f"hits {result.total_hit_ratio:.4f} of {of}"


def _waits(result: SimulationResult) -> str:
    waits, without = (
        ", ".join(f"{name} {value:.3f} s" for name, value in levels.items())
        for levels in (result.ttft_s, result.ttft_no_cache_s)
    )
    return f"time to first token {waits}; without a cache {without}"


def _speeds(model: TimeModel) -> str:
    speeds = ", ".join(
        f"{name} reads {approximate_rate(speed.read_bytes_per_s)}, "
        f"writes {approximate_rate(speed.write_bytes_per_s)}"
        for name, speed in model.speeds.items()
    )
    return f"{model.prefill_tokens_per_s:,.0f} prompt tokens computed per second; {speeds}"
