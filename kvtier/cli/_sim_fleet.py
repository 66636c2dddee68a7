"""Prints the result of ``kvtier sim fleet``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from kvtier.cli._render import (
    make_console,
    make_table,
    show_json,
    show_line,
    show_table,
    show_tiers_apart,
)
from kvtier.cli._trace import show_assumptions
from kvtier.sim.fleet import FleetResult, Rate, SharedResult
from kvtier.sim.traces import Trace
from kvtier.units import approximate_rate, approximate_size

__all__ = ["show_fleet"]


def show_fleet(result: FleetResult, trace: Trace, *, as_json: bool) -> None:
    """Print the result of a simulation of several engines."""
    if as_json:
        show_json(asdict(result) | trace.reading())
        return
    console = make_console()
    columns = ("chunks", "hits", "ratio", "hit tokens", "written", "promoted", "evicted")
    tiers = [
        (
            tier.name,
            tier.eviction,
            f"{tier.capacity_chunks:,}",
            f"{tier.hits:,}",
            f"{tier.hit_ratio:.4f}",
            f"{result.hit_tokens[tier.name]:,}",
            f"{tier.chunks_written:,}",
            f"{tier.chunks_promoted:,}",
            f"{tier.evictions:,}",
        )
        for tier in result.tiers
    ]
    show_tiers_apart(console, "tier", "eviction", numbers=columns, tiers=tiers)
    console.print()
    names = tuple(f"from {tier.name}" for tier in result.tiers)
    table = make_table("engine", numbers=("requests", "prompt tokens", *names), narrow=True)
    for number, engine in enumerate(result.engines):
        hits = [f"{engine.hit_tokens[tier.name]:,}" for tier in result.tiers]
        table.add_row(str(number), f"{engine.requests:,}", f"{engine.prompt_tokens:,}", *hits)
    show_table(console, table)
    console.print()
    for line in _summary(result):
        show_line(console, line)
    show_assumptions(trace)


def _summary(result: FleetResult) -> Iterator[str]:
    of = f"{result.refs:,} references, {result.prefix_hit_ratio:.4f} of the prompt tokens"
    yield f"hits {result.total_hit_ratio:.4f} of {of}"
    yield (
        f"time to first token {_waits(result.ttft_s)}; without a cache "
        f"{_waits(result.ttft_no_cache_s)}"
    )
    if result.shared is not None:
        yield from _shared_lines(result.shared)
    model = result.time_model
    speeds = ", ".join(
        f"{name} reads {approximate_rate(speed.read_bytes_per_s)}, "
        f"writes {approximate_rate(speed.write_bytes_per_s)}"
        for name, speed in model.speeds.items()
    )
    size = f"{approximate_size(result.chunk_bytes)} ({result.chunk_tokens:,} tokens)"
    rate = f"{model.prefill_tokens_per_s:,.0f} prompt tokens computed per second"
    routing = f"routing: {result.routing}; transfer.load_path: {result.load_path}"
    yield f"assumed for each engine: chunks of {size}; {rate}; {speeds}; {routing}"


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


def _waits(levels: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in levels.items())
