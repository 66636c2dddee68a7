"""Simulates all tiers: replays a trace through the managers of live engines.

As in a live engine, :mod:`kvtier.build` builds the manager from the YAML file. Time is
simulated: a time model decides when jobs end. No bytes move, so transfers never return wrong
bytes. The manager makes the same decisions as in a live engine with the same traffic. Requests
arrive at the times of the trace, and wait for promotions and demotions in progress.

Several engines have equal configurations and speeds, and each has local tiers of its own. They
find each other's chunks in a shared tier.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import KvtierConfig, check_chunk_fits, slot_nbytes
from kvtier.sim._batching_engine import StepModel
from kvtier.sim._run import Run, run_engines
from kvtier.sim.routing import ROUTINGS
from kvtier.sim.shared_cache import Meter, SharedTraffic
from kvtier.sim.single import BELADY, Progress, simulate_single
from kvtier.sim.time_model import TierSpeed, TimeModel, default_speed
from kvtier.sim.traces import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CacheResult",
    "EngineResult",
    "Rate",
    "SharedResult",
    "StepModel",
    "TierResult",
    "default_time_model",
    "simulate_cache",
    "wait_quantiles",
]

_DAY_S = 86_400.0
_BUSY = 0.7
_WINDOW = 0.1
"""Length of the window for the peak load, as a share of the trace's duration."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """The figures of one tier. The names of the fields are a stable interface.

    Each figure is a sum over the engines, but a shared tier counts once.

    Attributes:
        capacity_chunks: Largest number of chunks in the tier.
        hits: Number of chunks loaded into the GPU from this tier, through RAM or directly.
        hit_ratio: Hits as a share of all chunk references.
        chunks_written: Number of chunks stored or demoted into the tier, without promotions.
        chunks_promoted: Number of chunks promoted from the tier to RAM.
        evictions: Number of chunks evicted from the tier.
        bytes_written_per_day: Number of bytes written per day at the trace's request rate; None
            for RAM, or if the trace has no duration.
        dwpd: Drive writes per day for a drive as large as the tier, on average over the
            engines; None for a shared tier, or if ``bytes_written_per_day`` is None.
    """

    name: str
    kind: str
    eviction: str
    capacity_chunks: int
    hits: int
    hit_ratio: float
    chunks_written: int
    chunks_promoted: int
    evictions: int
    bytes_written_per_day: float | None
    dwpd: float | None


@dataclass(frozen=True, slots=True)
class Rate:
    """The mean and the peak of an amount per second.

    Attributes:
        mean: The mean over the trace's duration; None if the duration is 0.
        peak: The amount per second in the busiest minute.
    """

    mean: float | None
    peak: float


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The figures of one engine. The names of the fields are a stable interface.

    Attributes:
        prompt_tokens: Number of tokens of all prompts.
        saved_tokens: Number of prompt tokens loaded from any tier.
        hit_tokens: Number of tokens of whole chunks loaded from each tier, by the tier's name.
        shared: The engine's calls to the shared tier; None without a shared tier.
    """

    requests: int
    prompt_tokens: int
    saved_tokens: int
    hit_tokens: Mapping[str, int]
    shared: SharedTraffic | None


@dataclass(frozen=True, slots=True)
class SharedResult:
    """The figures of the shared tier. The names of the fields are a stable interface.

    Attributes:
        traffic: The calls of all engines together.
        chunks_at_end: Number of chunks in the shared tier after the last put.
        belady_hit_ratio: Hits as a share of all references, in a single cache of the shared
            tier's size. This cache serves every request and evicts by Belady's optimal rule.
        belady_prefix_hit_ratio: Prompt tokens in leading hits of the same cache, as a share of
            all prompt tokens.
    """

    traffic: SharedTraffic
    questions_per_s: Rate
    read_bytes_per_s: Rate
    written_bytes_per_s: Rate
    chunks_at_end: int
    belady_hit_ratio: float
    belady_prefix_hit_ratio: float


@dataclass(frozen=True, slots=True)
class CacheResult:
    """The figures of a simulation of all tiers. The names of the fields are a stable interface.

    Attributes:
        refs: Number of chunk references.
        chunk_bytes: Size in bytes of a chunk, without padding to whole pages.
        load_path: Path of loads from slower tiers: ``direct`` or ``staged``.
        routing: The rule by which requests were sent to engines.
        tiers: One result per tier, fastest first.
        total_hit_ratio: Chunks loaded from any tier, as a share of all chunk references.
        prefix_hit_ratio: Prompt tokens loaded from any tier, as a share of all prompt tokens.
        writes_per_ref: Number of chunks written to slower tiers, per chunk reference.
        promotions_per_ref: Number of promoted chunks, per chunk reference.
        ttft_s: Seconds from arrival to the first token: quantiles ``p50``, ``p90`` and ``p99``.
        ttft_no_cache_s: The same quantiles for engines that compute every prompt.
        peak_load_no_cache: Number of prompt tokens that arrive in the busiest tenth of the
            trace's time, divided by the number that the engines can compute in this tenth.
            Above 1, the queue of engines without a cache grows, and waiting dominates the times
            to the first token.
        time_model: The speeds of every engine.
        engines: One result per engine.
        shared: The figures of the shared tier; None without a shared tier.
        seconds: Real duration of the simulation.
        refs_per_second: ``refs / seconds``.
    """

    trace: str
    trace_sha256: str
    requests: int
    refs: int
    chunk_bytes: int
    chunk_tokens: int
    load_path: str
    routing: str
    tiers: Sequence[TierResult]
    total_hit_ratio: float
    prefix_hit_ratio: float
    writes_per_ref: float
    promotions_per_ref: float
    ttft_s: dict[str, float]
    ttft_no_cache_s: dict[str, float]
    peak_load_no_cache: float
    time_model: TimeModel
    engines: Sequence[EngineResult]
    shared: SharedResult | None
    seconds: float
    refs_per_second: float


def default_time_model(
    config: KvtierConfig,
    trace: Trace,
    *,
    engines: int = 1,
    prefill_tokens_per_s: float | None = None,
    speeds: Mapping[str, TierSpeed] | None = None,
) -> TimeModel:
    """Return a time model for ``config`` and ``trace``; use defaults for omitted speeds.

    Each tier has the default speed of its kind. Without a cache, each of ``engines`` engines
    would compute prompts during 70 % of the trace's time.
    """
    tokens = int(trace.input_tokens.sum()) / engines
    duration_s = max(trace.duration_s, 1e-3)
    return TimeModel(
        prefill_tokens_per_s=prefill_tokens_per_s or max(tokens / duration_s / _BUSY, 1.0),
        speeds={tier.name: default_speed(tier.kind) for tier in config.tiers}
        | dict(speeds or {}),
    )


def simulate_cache(  # noqa: PLR0913 - one keyword for each part
    trace: Trace,
    config: KvtierConfig,
    *,
    chunk_bytes: int,
    model: TimeModel | None = None,
    progress: Progress | None = None,
    engines: int = 1,
    routing: str = "round-robin",
) -> CacheResult:
    """Replay ``trace`` through engines with the tiers of ``config``; use no directories.

    Args:
        trace: The trace.
        config: The configuration of every engine.
        chunk_bytes: Size in bytes of one chunk of the trace, summed over all ranks.
        model: The speeds of every engine; with a :class:`StepModel`, the one engine computes in
            steps.
        progress: Called at intervals with the share of finished requests, 0 to 1.
        engines: Number of engines; with a :class:`StepModel`, one.
        routing: One of :data:`~kvtier.sim.routing.ROUTINGS`.

    Raises:
        ConfigError: A tier is smaller than one chunk, or a policy is not installed.
        NoVictimError: An eviction policy picks too few victims.
    """
    begun = time.perf_counter()
    check_chunk_fits(config, chunk_bytes)
    model = model or default_time_model(config, trace, engines=engines)
    routes = ROUTINGS[routing](trace, engines)
    slot_bytes = slot_nbytes(chunk_bytes)
    run = run_engines(
        trace,
        config,
        routes,
        engines=engines,
        slot_bytes=slot_bytes,
        model=model,
        progress=progress,
    )
    seconds = time.perf_counter() - begun
    tiers = [
        _tier_result(trace, config, run, index, slot_bytes)
        for index in range(len(config.tiers))
    ]
    return CacheResult(
        trace=trace.name,
        trace_sha256=trace.sha256,
        requests=trace.requests,
        refs=trace.refs,
        chunk_bytes=chunk_bytes,
        chunk_tokens=trace.chunk_tokens,
        load_path=config.transfer.load_path,
        routing=routing,
        tiers=tiers,
        total_hit_ratio=sum(tier.hits for tier in tiers) / trace.refs,
        prefix_hit_ratio=sum(run.saved_tokens) / max(int(trace.input_tokens.sum()), 1),
        writes_per_ref=sum(tier.chunks_written for tier in tiers[1:]) / trace.refs,
        promotions_per_ref=sum(tier.chunks_promoted for tier in tiers[1:]) / trace.refs,
        ttft_s=wait_quantiles(run.waits_s),
        ttft_no_cache_s=wait_quantiles(_waits_without_cache(trace, model, routes, engines)),
        peak_load_no_cache=_peak_load(trace, model, engines),
        time_model=model,
        engines=_engine_results(trace, run, routes),
        shared=_shared_result(trace, run, slot_bytes),
        seconds=seconds,
        refs_per_second=trace.refs / seconds,
    )


def wait_quantiles(waits: NDArray[np.float64]) -> dict[str, float]:
    """Return the quantiles ``p50``, ``p90`` and ``p99`` of ``waits``, in seconds."""
    levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: float(np.quantile(waits, share)) for name, share in levels.items()}


def _peak_load(trace: Trace, model: TimeModel, engines: int) -> float:
    """Return the load of the busiest window: arriving tokens / tokens that can be computed.

    The busiest window ends with an arrival. The load of a trace without duration is 0.
    """
    window_s = trace.duration_s * _WINDOW
    if not window_s:
        return 0.0
    arrivals = trace.timestamps_s
    tokens = np.concatenate(([0], np.cumsum(trace.input_tokens)))
    begins = np.searchsorted(arrivals, arrivals - window_s, side="right")
    peak = int((tokens[1:] - tokens[begins]).max())
    return peak / (window_s * model.prefill_tokens_per_s * engines)


def _waits_without_cache(
    trace: Trace, model: TimeModel, routes: Sequence[int], engines: int
) -> NDArray[np.float64]:
    """Return each request's time to the first token, in seconds, without a cache."""
    services = np.maximum(trace.input_tokens, 1) / model.prefill_tokens_per_s
    waits = np.zeros(trace.requests)
    free_s = [0.0] * engines
    arrivals = zip(trace.timestamps_s.tolist(), services.tolist(), routes, strict=True)
    for number, (arrival, service, at) in enumerate(arrivals):
        free_s[at] = max(free_s[at], arrival) + service
        waits[number] = free_s[at] - arrival
    return waits


def _tier_result(
    trace: Trace, config: KvtierConfig, run: Run, index: int, slot_bytes: int
) -> TierResult:
    options = config.tiers[index]
    capacity, written, evicted = _traffic(run, index, is_shared=options.is_shared)
    counters = [engine.tiers[index].counters for engine in run.engines]
    hits = sum(each.hits for each in counters)
    per_day = dwpd = None
    if index and trace.duration_s:
        per_day = written * slot_bytes / trace.duration_s * _DAY_S
        if not options.is_shared:
            dwpd = per_day / (options.capacity_bytes * len(run.engines))
    return TierResult(
        name=options.name,
        kind=options.kind,
        eviction="lru" if options.is_shared else options.eviction,
        capacity_chunks=capacity,
        hits=hits,
        hit_ratio=hits / trace.refs,
        chunks_written=written,
        chunks_promoted=sum(each.promoted for each in counters),
        evictions=evicted,
        bytes_written_per_day=per_day,
        dwpd=dwpd,
    )


def _traffic(run: Run, index: int, *, is_shared: bool) -> tuple[int, int, int]:
    """Return a tier's capacity, writes and evictions, in chunks."""
    if is_shared and run.service is not None:
        return run.service.capacity, run.service.written.total, run.service.evicted
    tiers = [engine.tiers[index] for engine in run.engines]
    written = sum(tier.counters.stored for tier in tiers)
    if index == 0:  # without the chunks that were promoted to RAM
        written -= sum(one.counters.promoted for each in run.engines for one in each.tiers)
    capacity = sum(tier.slots.capacity for tier in tiers)
    return capacity, written, sum(tier.counters.evicted for tier in tiers)


def _engine_results(trace: Trace, run: Run, routes: Sequence[int]) -> list[EngineResult]:
    engines = len(run.engines)
    requests = np.bincount(routes, minlength=engines).tolist()
    tokens = np.bincount(routes, trace.input_tokens, minlength=engines).tolist()
    return [
        EngineResult(
            requests=requests[at],
            prompt_tokens=int(tokens[at]),
            saved_tokens=run.saved_tokens[at],
            hit_tokens={
                tier.name: tier.counters.hits * trace.chunk_tokens for tier in built.tiers
            },
            shared=None if built.shared is None else built.shared.traffic,
        )
        for at, built in enumerate(run.engines)
    ]


def _shared_result(trace: Trace, run: Run, slot_bytes: int) -> SharedResult | None:
    """Return the figures of the shared tier, if there is one."""
    if (service := run.service) is None:
        return None

    def rate(meter: Meter, unit: int = 1) -> Rate:
        mean = meter.total * unit / trace.duration_s if trace.duration_s else None
        return Rate(mean, meter.peak_per_s(trace.duration_s) * unit)

    best = simulate_single(trace, policy=BELADY, capacity=service.capacity)
    traffic = [built.shared.traffic for built in run.engines if built.shared is not None]
    sums = {
        field.name: sum(getattr(part, field.name) for part in traffic)
        for field in fields(SharedTraffic)
    }
    return SharedResult(
        traffic=SharedTraffic(**sums),
        questions_per_s=rate(service.asked),
        read_bytes_per_s=rate(service.read, slot_bytes),
        written_bytes_per_s=rate(service.written, slot_bytes),
        chunks_at_end=len(service),
        belady_hit_ratio=best.block_hit_ratio,
        belady_prefix_hit_ratio=best.prefix_hit_ratio,
    )
