"""Simulates all tiers: replays a trace through the manager of a live engine.

As in a live engine, :mod:`kvtier.connector.build` builds the manager from the YAML file. Time
is simulated: a time model decides when jobs end. No bytes move, so transfers never return wrong
bytes. The manager makes the same decisions as in a live engine with the same traffic. Requests
arrive at the times of the trace, and wait for promotions and demotions in progress.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvtier.config import (
    KvtierConfig,
    SharedTierConfig,
    check_chunk_fits,
    slot_nbytes,
)
from kvtier.connector.build import build_manager, build_tiers
from kvtier.manager import TieredOffloadingManager, TierState
from kvtier.sim._batching_engine import BatchingEngine, StepModel
from kvtier.sim._engine import Engine, ModelRequest, ReliableSlotStatus
from kvtier.sim._sequential_engine import SequentialEngine, serve_fleet
from kvtier.sim.shared_cache import SharedCache, SharedClient
from kvtier.sim.single import Progress, chunk_keys
from kvtier.sim.time_model import TierSpeed, TimeModel, TransferModel, default_speed
from kvtier.sim.traces import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BuiltEngine",
    "CacheResult",
    "Simulation",
    "SimulationResult",
    "StepModel",
    "TierResult",
    "TierTraffic",
    "default_time_model",
    "simulate_cache",
    "simulate_engines",
    "wait_quantiles",
]

_Engine = TypeVar("_Engine", bound=Engine[Any])

_DAY_S = 86_400.0
_BUSY = 0.7
_WINDOW = 0.1
"""Length of the window for the peak load, as a share of the trace's duration."""
_GALLOPING = frozenset({"object", "shared_dir"})
"""Kinds of shared tiers that send a question in rounds; others ask about all keys at once."""


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """The figures of one tier. The names of the fields are a stable interface.

    Attributes:
        capacity_chunks: Largest number of chunks in the tier.
        hits: Number of chunks loaded into the GPU from this tier, through RAM or directly.
        hit_ratio: Hits as a share of all chunk references.
        chunks_written: Number of chunks stored or demoted into the tier, without promotions.
        chunks_promoted: Number of chunks promoted from the tier to RAM.
        evictions: Number of chunks evicted from the tier.
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


@dataclass(frozen=True, slots=True)
class TierResult(TierTraffic):
    """The figures of one simulated tier, with the wear of its medium.

    Attributes:
        bytes_written_per_day: Number of bytes written per day at the trace's request rate; None
            for RAM, or if the trace has no duration.
        dwpd: Drive writes per day for a drive as large as the tier; None for a shared tier, or
            if ``bytes_written_per_day`` is None.
    """

    bytes_written_per_day: float | None
    dwpd: float | None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The figures of one engine or of a fleet. The names of the fields are a stable interface.

    Attributes:
        refs: Number of chunk references.
        chunk_bytes: Size in bytes of a chunk, without padding to whole pages.
        load_path: Path of loads from slower tiers: ``direct`` or ``staged``.
        total_hit_ratio: Chunks loaded from any tier, as a share of all chunk references.
        prefix_hit_ratio: Prompt tokens loaded from any tier, as a share of all prompt tokens.
        ttft_s: Seconds from arrival to the first token: quantiles ``p50``, ``p90`` and ``p99``.
        ttft_no_cache_s: The same quantiles for an engine that computes every prompt.
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
    total_hit_ratio: float
    prefix_hit_ratio: float
    ttft_s: dict[str, float]
    ttft_no_cache_s: dict[str, float]
    time_model: TimeModel
    seconds: float
    refs_per_second: float


@dataclass(frozen=True, slots=True)
class CacheResult(SimulationResult):
    """The figures of one engine on a trace. The names of the fields are a stable interface.

    Attributes:
        tiers: One result per tier, fastest first.
        writes_per_ref: Number of chunks written to slower tiers, per chunk reference.
        promotions_per_ref: Number of promoted chunks, per chunk reference.
        peak_load_no_cache: Number of prompt tokens that arrive in the busiest tenth of the
            trace's time, divided by the number that the engine can compute in this tenth. Above
            1, the queue of an engine without a cache grows, and waiting dominates the times to
            the first token.
    """

    tiers: Sequence[TierResult]
    writes_per_ref: float
    promotions_per_ref: float
    peak_load_no_cache: float


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


def simulate_cache(
    trace: Trace,
    config: KvtierConfig,
    *,
    chunk_bytes: int,
    model: TimeModel | None = None,
    progress: Progress | None = None,
) -> CacheResult:
    """Replay ``trace`` through the tiers of ``config``.

    The simulation uses no directories. With a :class:`StepModel`, the simulated engine computes
    in steps. :func:`simulate_engines` documents the parameters and errors.
    """
    run = simulate_engines(
        trace,
        config,
        [0] * trace.requests,
        chunk_bytes=chunk_bytes,
        model=model or default_time_model(config, trace),
        progress=progress,
    )
    (traffic,) = run.traffic
    results = _tier_results(config, traffic, trace, slot_nbytes(chunk_bytes))
    slower = results[1:]
    return CacheResult(
        **run.figures,
        tiers=results,
        writes_per_ref=sum(tier.chunks_written for tier in slower) / trace.refs,
        promotions_per_ref=sum(tier.chunks_promoted for tier in slower) / trace.refs,
        peak_load_no_cache=_peak_load(trace, run.figures["time_model"]),
    )


class BuiltEngine(NamedTuple, Generic[_Engine]):
    """A simulated engine, its manager, tiers, and client of the shared tier if there is one."""

    engine: _Engine
    manager: TieredOffloadingManager
    tiers: Sequence[TierState]
    shared: SharedClient | None


class Simulation(NamedTuple):
    """The result of :func:`simulate_engines`: the engines and their figures.

    Attributes:
        fleet: The engines.
        service: The service behind the shared tier; None without a shared tier.
        traffic: The figures of each engine's tiers. A shared tier has the service's figures.
        saved: Number of prompt tokens that each engine loaded.
        figures: The fields of a :class:`SimulationResult`.
    """

    fleet: Sequence[BuiltEngine[Any]]
    service: SharedCache | None
    traffic: Sequence[Sequence[TierTraffic]]
    saved: Sequence[int]
    figures: dict[str, Any]


def simulate_engines(  # noqa: PLR0913 - one keyword for each part
    trace: Trace,
    config: KvtierConfig,
    routes: Sequence[int],
    *,
    chunk_bytes: int,
    model: TimeModel,
    progress: Progress | None,
    engines: int = 1,
) -> Simulation:
    """Replay ``trace`` through engines with equal configurations and speeds.

    Args:
        trace: The trace.
        config: The configuration of every engine.
        routes: Index of each request's engine.
        chunk_bytes: Size in bytes of one chunk of the trace, summed over all ranks.
        model: The speeds of every engine.
        progress: Called at intervals with the share of finished requests, 0 to 1.
        engines: Number of engines; with a :class:`StepModel`, one.

    Raises:
        ConfigError: A tier is smaller than one chunk, or a policy is not installed.
        NoVictimError: An eviction policy picks too few victims.
    """
    begun = time.perf_counter()
    check_chunk_fits(config, chunk_bytes)
    slot_bytes = slot_nbytes(chunk_bytes)
    last = config.tiers[-1]
    service = SharedCache(last.capacity_bytes // slot_bytes) if last.is_shared else None

    def build(engine_type: type[_Engine]) -> BuiltEngine[_Engine]:
        return _build_engine(engine_type, trace, config, model, slot_bytes, service)

    fleet: Sequence[BuiltEngine[Any]]
    if isinstance(model, StepModel):
        fleet = [build(BatchingEngine)]
        served = fleet[0].engine.serve(_model_requests(trace))
    else:
        fleet = [build(SequentialEngine) for _ in range(engines)]
        arrivals = zip(routes, _model_requests(trace), strict=True)
        served = serve_fleet([built.engine for built in fleet], arrivals)
    waits, saved = _collect_waits(trace, fleet, routes, served, progress)
    if service is not None:
        service.end_all_puts()
    hits = sum(tier.counters.hits for built in fleet for tier in built.tiers)
    seconds = time.perf_counter() - begun
    figures = {
        "trace": trace.name,
        "trace_sha256": trace.sha256,
        "requests": trace.requests,
        "refs": trace.refs,
        "chunk_bytes": chunk_bytes,
        "chunk_tokens": trace.chunk_tokens,
        "load_path": config.transfer.load_path,
        "total_hit_ratio": hits / trace.refs,
        "prefix_hit_ratio": sum(saved) / max(int(trace.input_tokens.sum()), 1),
        "ttft_s": wait_quantiles(waits),
        "ttft_no_cache_s": wait_quantiles(_waits_without_cache(trace, model, routes, engines)),
        "time_model": model,
        "seconds": seconds,
        "refs_per_second": trace.refs / seconds,
    }
    traffic = [_tier_traffic(config, built, trace.refs) for built in fleet]
    return Simulation(fleet, service, traffic, saved, figures)


def _build_engine(
    engine_type: type[_Engine],
    trace: Trace,
    config: KvtierConfig,
    model: TimeModel,
    slot_bytes: int,
    service: SharedCache | None,
) -> BuiltEngine[_Engine]:
    """Build a simulated engine with empty local tiers.

    The load path of ``config`` is resolved, so it is not ``auto``. ``service`` is behind the
    shared tier, if there is one.
    """
    tiers = build_tiers(
        config,
        [
            # The manager's slots of a shared tier only note which chunks the tier has.
            tier.known_chunks
            if isinstance(tier, SharedTierConfig)
            else tier.capacity_bytes // slot_bytes
            for tier in config.tiers
        ],
    )
    slot_status = ReliableSlotStatus()
    manager = build_manager(
        config,
        tiers,
        slot_nbytes=slot_bytes,
        chunk_tokens=trace.chunk_tokens,
        slot_status=slot_status,
        record_events=False,
        track_reuse=False,
    )
    last = config.tiers[-1]
    shared = (
        None
        if service is None
        else SharedClient(service, last.name, gallops=last.kind in _GALLOPING)
    )
    engine = engine_type(
        manager,
        model=model,
        transfers=TransferModel(
            model, ram=config.tiers[0].name, slot_nbytes=slot_bytes, shared=shared
        ),
        slot_status=slot_status,
        chunk_tokens=trace.chunk_tokens,
        retain_s=config.placement.retain_s or 0.0,
    )
    return BuiltEngine(engine, manager, tiers, shared)


def _model_requests(trace: Trace) -> Iterator[ModelRequest]:
    """Yield the requests of ``trace`` in order of arrival."""
    key_of = chunk_keys(trace.distinct).__getitem__
    arrivals = trace.timestamps_s.tolist()
    tokens = trace.input_tokens.tolist()
    outputs = np.maximum(trace.output_tokens, 1).tolist()
    sessions = trace.session_names()
    for number, chain in enumerate(trace.chains()):
        # A chunk that occurs twice in a prompt is stored once.
        chunks = list(map(key_of, dict.fromkeys(chain)))
        yield ModelRequest(
            number,
            arrivals[number],
            tokens[number],
            chunks,
            session=sessions[number],
            output_tokens=outputs[number],
        )


def _collect_waits(
    trace: Trace,
    fleet: Sequence[BuiltEngine[Any]],
    routes: Sequence[int],
    served: Iterable[ModelRequest],
    progress: Progress | None,
) -> tuple[NDArray[np.float64], list[int]]:
    """Return each request's seconds to the first token, and the tokens each engine loaded."""
    waits = np.zeros(trace.requests)
    saved = [0] * len(fleet)
    for done, request in enumerate(served, start=1):
        at = routes[request.number]
        for error in fleet[at].manager.policy_errors:
            raise error
        waits[request.number] = request.first_token_s - request.arrival_s
        saved[at] += min(request.hits * trace.chunk_tokens, request.tokens)
        if progress is not None and not done % 256:
            progress(done / trace.requests)
    return waits, saved


def _peak_load(trace: Trace, model: TimeModel) -> float:
    """Return the load of the busiest window: arriving tokens / tokens the engine can compute.

    The busiest window ends with an arrival. The load of a trace without duration is 0.
    """
    window_s = trace.duration_s * _WINDOW
    if not window_s:
        return 0.0
    arrivals = trace.timestamps_s
    tokens = np.concatenate(([0], np.cumsum(trace.input_tokens)))
    begins = np.searchsorted(arrivals, arrivals - window_s, side="right")
    peak = int((tokens[1:] - tokens[begins]).max())
    return peak / (window_s * model.prefill_tokens_per_s)


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


def _tier_traffic(
    config: KvtierConfig, built: BuiltEngine[Any], refs: int
) -> list[TierTraffic]:
    """Return the figures of an engine's tiers after ``refs`` chunk references."""
    promoted = sum(tier.counters.promoted for tier in built.tiers)
    traffic = [
        TierTraffic(
            name=tier.name,
            kind=options.kind,
            eviction=options.eviction,
            capacity_chunks=tier.slots.capacity,
            hits=tier.counters.hits,
            hit_ratio=tier.counters.hits / refs,
            chunks_written=tier.counters.stored - (0 if tier.index else promoted),
            chunks_promoted=tier.counters.promoted,
            evictions=tier.counters.evicted,
        )
        for options, tier in zip(config.tiers, built.tiers, strict=True)
    ]
    if (shared := built.shared) is not None:
        traffic[-1] = replace(
            traffic[-1],
            eviction="lru",
            capacity_chunks=shared.cache.capacity,
            chunks_written=shared.traffic.chunks_written,
            evictions=shared.cache.evicted,
        )
    return traffic


def _tier_results(
    config: KvtierConfig, traffic: Sequence[TierTraffic], trace: Trace, slot_bytes: int
) -> list[TierResult]:
    results = []
    for index, (options, tier) in enumerate(zip(config.tiers, traffic, strict=True)):
        per_day = None
        if index and trace.duration_s:
            per_day = tier.chunks_written * slot_bytes / trace.duration_s * _DAY_S
        dwpd = None
        if per_day is not None and not options.is_shared:
            dwpd = per_day / options.capacity_bytes
        results.append(TierResult(**asdict(tier), bytes_written_per_day=per_day, dwpd=dwpd))
    return results


def wait_quantiles(waits: NDArray[np.float64]) -> dict[str, float]:
    """Return the quantiles ``p50``, ``p90`` and ``p99`` of ``waits``, in seconds."""
    levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: float(np.quantile(waits, share)) for name, share in levels.items()}
