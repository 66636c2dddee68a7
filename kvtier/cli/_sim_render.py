"""Results of simulations, as JSON or as tables."""

from __future__ import annotations

from collections.abc import Sequence
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
from kvtier.sim.cache import CacheResult
from kvtier.sim.single import SingleResult
from kvtier.sim.sweep import SweepResult
from kvtier.sim.traces import Trace
from kvtier.units import approximate_rate, approximate_size

__all__ = ["show_cache", "show_single", "show_sweep"]


def show_single(result: SingleResult, trace: Trace, *, as_json: bool) -> None:
    """Print what one policy did with ``trace``."""
    if as_json:
        show_json(result.as_dict() | trace.reading())
        return
    table = make_table("", numbers=("",))
    for name, value in result.as_dict().items():
        table.add_row(name.replace("_", " "), _text(value))
    show_table(make_console(), table)
    show_assumptions(trace)


def show_sweep(results: Sequence[SweepResult]) -> None:
    """Print the prefix hit ratios of a sweep, one table per trace."""
    console = make_console()
    for trace in dict.fromkeys(result.of for result in results):
        rows = [result for result in results if result.of == trace]
        sizes = list(dict.fromkeys(row.capacity for row in rows))
        console.print(f"{trace[0]}: prefix hit ratio, %", soft_wrap=True)
        table = make_table("policy", numbers=tuple(sizes))
        for policy in dict.fromkeys(row.policy for row in rows):
            cells = {row.capacity: row for row in rows if row.policy == policy}
            table.add_row(
                policy, *(f"{cells[size].prefix_hit_ratio * 100:.2f}" for size in sizes)
            )
        show_table(console, table)


def show_cache(result: CacheResult, trace: Trace, *, as_json: bool) -> None:
    """Print what a ladder did with ``trace``."""
    if as_json:
        show_json(asdict(result) | trace.reading())
        return
    console = make_console()
    columns = ("chunks", "hits", "ratio", "written", "promoted", "evicted", "DWPD")
    tiers = [
        (
            tier.name,
            tier.eviction,
            f"{tier.capacity_chunks:,}",
            f"{tier.hits:,}",
            f"{tier.hit_ratio:.4f}",
            f"{tier.chunks_written:,}",
            f"{tier.chunks_promoted:,}",
            f"{tier.evictions:,}",
            "" if tier.dwpd is None else f"{tier.dwpd:.2f}",
        )
        for tier in result.tiers
    ]
    show_tiers_apart(console, "tier", "eviction", numbers=columns, tiers=tiers)
    console.print()
    for line in _summary(result):
        show_line(console, line)
    show_assumptions(trace)


def _summary(result: CacheResult) -> list[str]:
    of = f"{result.refs:,} references, {result.prefix_hit_ratio:.4f} of the prompt tokens"
    moved = f"{result.writes_per_ref:.4f} chunks written to slower tiers"
    waits = f"{_waits(result.ttft_s)}; without a cache {_waits(result.ttft_no_cache_s)}"
    lines = [
        f"hits {result.total_hit_ratio:.4f} of {of}",
        f"per reference {moved}, {result.promotions_per_ref:.4f} promoted",
        f"time to first token {waits}",
    ]
    lines += [
        f"{tier.name}: {approximate_size(tier.bytes_written_per_day)} written per day"
        for tier in result.tiers
        if tier.bytes_written_per_day is not None
    ]
    model = result.time_model
    speeds = ", ".join(
        f"{name} reads {approximate_rate(speed.read_bytes_per_s)}, "
        f"writes {approximate_rate(speed.write_bytes_per_s)}"
        for name, speed in model.speeds.items()
    )
    assumed = f"{model.prefill_tokens_per_s:,.0f} prompt tokens computed per second"
    tokens = f"({result.chunk_tokens:,} tokens, of the trace)"
    size = f"{approximate_size(result.chunk_bytes)} {tokens}"
    compute_s = result.chunk_tokens / model.prefill_tokens_per_s
    lines += [
        f"note: {name} reads a chunk in {read_s * 1e3:.2f} ms and computing it takes "
        f"{compute_s * 1e3:.2f} ms, so a busy {name} makes requests wait longer than no cache"
        for name, speed in model.speeds.items()
        if (read_s := result.chunk_bytes / speed.read_bytes_per_s) > compute_s
    ]
    if result.peak_load_no_cache > 1:
        lines.append(
            "note: without a cache the engine is asked for "
            f"{result.peak_load_no_cache:.1f} times what it computes in the busiest tenth of "
            "the trace, so its times are those of a queue; compare hits, or say --prefill-rate"
        )
    path = f"transfer.load_path: {result.load_path}"
    return [*lines, f"assumed: chunks of {size}; {assumed}; {speeds}; {path}"]


def _waits(levels: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in levels.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 1000 else f"{value:.6f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
