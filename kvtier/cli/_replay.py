"""The command ``kvtier replay`` runs a trace through real tiers, with real bytes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli._options import AsJson, choice, finite, quantity
from kvtier.cli._progress import show_progress
from kvtier.cli._render import make_console, make_table, show_json, show_line, show_table
from kvtier.cli._sim import ChunkBytes, PrefillRate, Speeds, chunk_bytes_of
from kvtier.cli._trace import FormatOption, TokensPerId, TraceFile, read, show_assumptions
from kvtier.config import KvtierConfig, load_config, resolve_rank_paths
from kvtier.errors import ConfigError
from kvtier.sim.time_model import TierSpeed, parse_speed
from kvtier.units import approximate_rate, approximate_size, parse_size

if TYPE_CHECKING:
    from kvtier.replay import ReplayResult

__all__ = ["replay"]

_MEASURE_S = 2.0
_QUANTILES = ("p50", "p90", "p99")
_LATE = 0.1
"""Largest share of delays in the replay's time. Above it, the times are unreliable."""


def replay(  # noqa: PLR0913 - each is an option of the command
    trace: TraceFile,
    *,
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Configuration with the tiers.", readable=False)
    ],
    speedup: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, metavar="N", help="Replay N times as fast."),
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Replay the first N requests only.")
    ] = None,
    gpu_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Paged KV memory of the engine.")
    ] = "1GiB",
    chunk_bytes: ChunkBytes = None,
    prefill_rate: PrefillRate = None,
    tier_speed: Speeds = None,
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE through real tiers, beside a simulation.

    Runs an engine without a model in real time. The engine looks up, stores and loads chunks,
    and compares every loaded byte with the stored one. Its stores are temporary directories
    beside those of the configuration. Disks without --tier-speed are measured first, for the
    simulation.
    """
    _check_torch()
    # Importing torch takes seconds, and only this command needs it.
    from kvtier.replay import ReplayOptions, replay_trace  # noqa: PLC0415

    settings = resolve_rank_paths(load_config(config), rank=None)
    loaded = read(trace, format_name, tokens_per_id)
    given = dict(parse_speed(text) for text in tier_speed or ())
    for name in given:
        choice("--tier-speed", name, [tier.name for tier in settings.tiers])
        if name == settings.ram.name:
            problem = "copies between RAM and the KV memory are always measured"
            raise ConfigError(f"--tier-speed {name}: {problem}; leave it out")
    _check_beside(settings)
    options = ReplayOptions(
        chunk_bytes=chunk_bytes_of(loaded, chunk_bytes),
        gpu_bytes=quantity("--gpu-memory", gpu_memory, parse_size),
        speedup=speedup,
        requests=requests,
        tokens_per_s=prefill_rate,
        speeds=_measured(settings, given) | given,
    )
    with exit_on_signals(), show_progress("replaying") as progress:
        result = replay_trace(loaded, settings, options, progress=progress)
    if as_json:
        show_json(asdict(result) | {"apart": result.apart()} | loaded.reading())
        return
    _show(result)
    show_assumptions(loaded)


def _check_torch() -> None:
    if find_spec("torch") is None:
        remedy = "install it with: pip install 'kvtier[torch]'"
        raise ConfigError(f"kvtier replay needs the package torch; {remedy}")


def _check_beside(config: KvtierConfig) -> None:
    """Check that the replay can create cache directories next to those of ``config``."""
    for number, tier in enumerate(config.tiers):
        store = tier.local_directory()
        if store is None or os.access(store.path.parent, os.W_OK | os.X_OK):
            continue
        problem = f"the replay cannot write its caches to {store.path.parent}"
        remedy = "name a directory whose parent you may write to"
        key = f"tiers[{number}].{store.key}"
        raise ConfigError(config.origin.format_problem(key, problem, remedy, value=store.path))


def _measured(config: KvtierConfig, given: dict[str, TierSpeed]) -> dict[str, TierSpeed]:
    """Measure the disk of each tier that ``given`` lacks; return the speeds by tier."""
    from kvtier.doctor.rates import measure_directory  # noqa: PLC0415

    speeds = {}
    for tier in config.tiers:
        store = tier.local_directory()
        if store is None or tier.name in given:
            continue
        rates = measure_directory(config, store, seconds=_MEASURE_S)
        speeds[tier.name] = TierSpeed(
            rates.read_bytes_per_s, rates.write_bytes_per_s, rates.read_p50_s
        )
    return speeds


def _show(result: ReplayResult) -> None:
    console = make_console()
    apart = result.apart()
    table = make_table("", numbers=("replayed", "simulated", "apart"))
    for name in _QUANTILES:
        table.add_row(
            f"TTFT {name}, ms",
            f"{result.ttft_s[name] * 1e3:.1f}",
            f"{result.predicted.ttft_s[name] * 1e3:.1f}",
            f"{apart[name]:+.0%}",
        )
    table.add_row(
        "chunks loaded, %",
        f"{result.hit_ratio:.1%}".rstrip("%"),
        f"{result.predicted.total_hit_ratio:.1%}".rstrip("%"),
        f"{apart['hit_ratio']:+.0%}",
    )
    show_table(console, table)
    hits = make_table("tier", numbers=("hits", "simulated"))
    columns = ("read", "simulated", "written", "simulated")
    traffic = make_table("tier", numbers=columns, narrow=True)
    for tier in result.tiers:
        speed = result.predicted.time_model.speeds[tier.name]
        hits.add_row(tier.name, f"{tier.hits:,}", f"{tier.predicted_hits:,}")
        traffic.add_row(
            tier.name,
            _moved(tier.read_bytes, tier.read_bytes_per_s),
            approximate_rate(speed.read_bytes_per_s),
            _moved(tier.written_bytes, tier.write_bytes_per_s),
            approximate_rate(speed.write_bytes_per_s),
        )
    show_table(console, hits)
    show_table(console, traffic)
    for line in _remarks(result):
        show_line(console, line)


def _moved(nbytes: int, bytes_per_s: float) -> str:
    return (
        f"{approximate_size(nbytes)}, {approximate_rate(bytes_per_s)}" if nbytes else "nothing"
    )


def _remarks(result: ReplayResult) -> Iterator[str]:
    counts = result.counts
    yield f"{result.requests:,} requests in {result.seconds:.1f} s, {counts.steps:,} steps"
    yield f"{counts.loaded_blocks:,} blocks loaded, every byte equal to the stored one"
    for count, what in (
        (counts.failed_loads, "loads failed and were computed"),
        (sum(tier.failed_chunks for tier in result.tiers), "chunks not moved between tiers"),
        (result.preemptions, "preemptions"),
        (result.skipped_requests, "requests left out: too long for --gpu-memory"),
    ):
        if count:
            yield f"{count:,} {what}"
    for tier in result.tiers:
        if tier.skipped_chunks:
            yield (
                f"{tier.skipped_chunks:,} chunks of {tier.name} were computed, because loading "
                "them would have taken longer; placement.load_if: always loads them"
            )
    if counts.late_s > _LATE * result.seconds:
        yield (
            f"note: steps took {counts.late_s:.1f} s longer than the model would, so the times "
            "are wrong; use a smaller --speedup or --chunk-bytes, or an idle machine"
        )


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to ``SystemExit``, so that the ``with`` block cleans up.

    The exit code is 128 plus the signal's number, as in shells. An ignored signal, as under
    ``nohup``, stays ignored.
    """
    signals = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, _: FrameType | None) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)  # a second signal must not end the cleanup
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
