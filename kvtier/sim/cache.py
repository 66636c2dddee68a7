"""Simulates all tiers: replays a trace through the manager of a live engine.

As in a live engine, :mod:`kvtier.connector.build` builds the manager from the YAML file. Time
is simulated: a time model decides when jobs end. No bytes move, and no transfer returns wrong
bytes. So the manager decides as in a live engine with the same traffic: requests arrive at
their timestamps, and wait for promotions and demotions in flight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.config import KvtierConfig, check_chunk_fits, resolve_load_path, slot_nbytes
from kvtier.connector.build import build_manager, build_tiers
from kvtier.manager import TieredOffloadingManager, TierState
from kvtier.sim._batching_engine import BatchingEngine, StepModel
from kvtier.sim._engine import Engine, ModelRequest, ReliableSlotStatus
from kvtier.sim._sequential_engine import SequentialEngine
from kvtier.sim.single import Progress, chunk_keys
from kvtier.sim.time_model import TimeModel, TransferModel, default_speed
from kvtier.sim.traces import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CacheResult",
    "StepModel",
    "TierResult",
    "TierTraffic",
    "default_time_model",
    "simulate_cache",
    "tier_traffic",
    "wait_quantiles",
]

_DAY_S = 86_400.0
_BUSY = 0.7
_WINDOW = 0.1
"""Length of the window in which the peak load is measured, as a share of the trace's time."""


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """The figures of one tier. The names of the fields are a stable interface.

    Attributes:
        name: The tier's name.
        kind: The tier's kind.
        eviction: The tier's eviction policy.
        capacity_chunks: Capacity in chunks.
        hits: Chunks loaded into the GPU from this tier, through RAM or directly.
        hit_ratio: ``hits`` as a share of all references.
        chunks_written: Chunks stored or demoted into the tier; promotions excluded.
        chunks_promoted: Chunks promoted from the tier to RAM.
        evictions: Chunks evicted from the tier.
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
        bytes_written_per_day: Bytes written per day at the trace's request rate; None for RAM
            or a trace without duration.
        dwpd: Drive writes per day for a drive as large as the tier; None if
            ``bytes_written_per_day`` is None.
    """

    bytes_written_per_day: float | None
    dwpd: float | None


@dataclass(frozen=True, slots=True)
class CacheResult:
    """The figures of all tiers on a trace. The names of the fields are a stable interface.

    Attributes:
        trace: The trace's name.
        trace_sha256: SHA-256 of the trace's file.
        requests: Requests served.
        refs: Chunk references.
        chunk_bytes: Bytes of a chunk, before rounding to whole pages.
        chunk_tokens: Tokens of a chunk.
        load_path: Path of loads from slower tiers: ``direct`` or ``staged``.
        tiers: One result per tier, fastest first.
        total_hit_ratio: Chunks loaded from any tier, as a share of all references.
        prefix_hit_ratio: Prompt tokens loaded from any tier, as a share of all prompt tokens.
        writes_per_ref: Chunks written to the slower tiers, per reference.
        promotions_per_ref: Chunks promoted, per reference.
        ttft_s: Time from arrival to the first token: ``p50``, ``p90``, ``p99``.
        ttft_no_cache_s: The same times for an engine that computes every prompt.
        peak_load_no_cache: Prompt tokens that arrive in the busiest tenth of the trace's time,
            divided by the tokens that the engine can compute in that time. Above 1, the queue
            of an engine without a cache grows, and its times are mostly waiting.
        time_model: The speeds used.
        seconds: Real time that the simulation took.
        refs_per_second: ``refs / seconds``.
    """

    trace: str
    trace_sha256: str
    requests: int
    refs: int
    chunk_bytes: int
    chunk_tokens: int
    load_path: str
    tiers: Sequence[TierResult]
    total_hit_ratio: float
    prefix_hit_ratio: float
    writes_per_ref: float
    promotions_per_ref: float
    ttft_s: dict[str, float]
    ttft_no_cache_s: dict[str, float]
    peak_load_no_cache: float
    time_model: TimeModel
    seconds: float
    refs_per_second: float


def default_time_model(config: KvtierConfig, trace: Trace) -> TimeModel:
    """Return the default time model for ``config`` and ``trace``.

    The tiers have the usual speed of their kind. The engine's speed is such that, without a
    cache, the engine would compute prompts during 70 % of the trace's time.
    """
    duration_s = max(trace.duration_s, 1e-3)
    return TimeModel(
        prefill_tokens_per_s=max(int(trace.input_tokens.sum()) / duration_s / _BUSY, 1.0),
        speeds={tier.name: default_speed(tier.kind) for tier in config.tiers},
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

    Args:
        trace: The trace.
        config: The configuration; its directories are not touched. ``load_path: auto`` means
            the same as with kvtier's connector.
        chunk_bytes: Bytes of one of the trace's chunks, over all ranks.
        model: The speeds; by default :func:`default_time_model`. A :class:`StepModel` selects
            an engine that computes in steps.
        progress: Called now and then with the finished share of the requests, 0 to 1.

    Raises:
        ConfigError: A tier holds less than one chunk, or a policy is not installed.
        NoVictimError: An eviction policy picks too few victims.
    """
    begun = time.perf_counter()
    config = resolve_load_path(config)
    check_chunk_fits(config, chunk_bytes)
    model = model or default_time_model(config, trace)
    slot_bytes = slot_nbytes(chunk_bytes)
    tiers = build_tiers(config, [tier.capacity_bytes // slot_bytes for tier in config.tiers])
    manager, engine = _make_engine(config, tiers, model, slot_bytes, trace.chunk_tokens)
    waits, saved = _serve(engine, manager, trace, progress)
    seconds = time.perf_counter() - begun
    results = _tier_results(config, tiers, trace, slot_bytes)
    slower = results[1:]
    return CacheResult(
        trace=trace.name,
        trace_sha256=trace.sha256,
        requests=trace.requests,
        refs=trace.refs,
        chunk_bytes=chunk_bytes,
        chunk_tokens=trace.chunk_tokens,
        load_path=config.transfer.load_path,
        tiers=results,
        total_hit_ratio=sum(tier.hits for tier in results) / trace.refs,
        prefix_hit_ratio=saved / max(int(trace.input_tokens.sum()), 1),
        writes_per_ref=sum(tier.chunks_written for tier in slower) / trace.refs,
        promotions_per_ref=sum(tier.chunks_promoted for tier in slower) / trace.refs,
        ttft_s=wait_quantiles(waits),
        ttft_no_cache_s=wait_quantiles(_waits_without_cache(trace, model)),
        peak_load_no_cache=_peak_load(trace, model),
        time_model=model,
        seconds=seconds,
        refs_per_second=trace.refs / seconds,
    )


def _requests(trace: Trace) -> Iterator[ModelRequest]:
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


def _make_engine(
    config: KvtierConfig,
    tiers: Sequence[TierState],
    model: TimeModel,
    slot_bytes: int,
    chunk_tokens: int,
) -> tuple[TieredOffloadingManager, Engine[Any]]:
    """Return a simulated engine and its manager."""
    slot_status = ReliableSlotStatus()
    manager = build_manager(
        config,
        tiers,
        slot_nbytes=slot_bytes,
        chunk_tokens=chunk_tokens,
        slot_status=slot_status,
        record_events=False,
        track_reuse=False,
    )
    engine_type: type[Engine[Any]] = (
        BatchingEngine if isinstance(model, StepModel) else SequentialEngine
    )
    return manager, engine_type(
        manager,
        model=model,
        transfers=TransferModel(model, ram=config.tiers[0].name, slot_nbytes=slot_bytes),
        slot_status=slot_status,
        chunk_tokens=chunk_tokens,
        retain_s=config.placement.retain_s or 0.0,
    )


def _serve(
    engine: Engine[Any],
    manager: TieredOffloadingManager,
    trace: Trace,
    progress: Progress | None,
) -> tuple[npt.NDArray[np.float64], int]:
    """Serve the requests of ``trace``.

    Returns:
        The time to the first token of each request, and the number of loaded tokens.
    """
    waits = np.zeros(trace.requests)
    saved = 0
    for done, request in enumerate(engine.serve(_requests(trace)), start=1):
        for error in manager.policy_errors:
            raise error
        waits[request.number] = request.first_token_s - request.arrival_s
        saved += min(request.hits * trace.chunk_tokens, request.tokens)
        if progress is not None and not done % 256:
            progress(done / trace.requests)
    return waits, saved


def _peak_load(trace: Trace, model: TimeModel) -> float:
    """Return the load of the busiest window: arriving tokens divided by computable tokens.

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


def _waits_without_cache(trace: Trace, model: TimeModel) -> NDArray[np.float64]:
    """Return each request's time to its first token if every prompt is computed."""
    services = np.maximum(trace.input_tokens, 1) / model.prefill_tokens_per_s
    waits = np.zeros(trace.requests)
    free_s = 0.0
    for number, (arrival, service) in enumerate(
        zip(trace.timestamps_s.tolist(), services.tolist(), strict=True)
    ):
        free_s = max(free_s, arrival) + service
        waits[number] = free_s - arrival
    return waits


def tier_traffic(
    config: KvtierConfig, tiers: Sequence[TierState], *, refs: int
) -> list[TierTraffic]:
    """Return the figures of a manager's tiers after ``refs`` chunk references."""
    promoted = sum(tier.counters.promoted for tier in tiers)
    return [
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
        for options, tier in zip(config.tiers, tiers, strict=True)
    ]


def _tier_results(
    config: KvtierConfig,
    tiers: Sequence[TierState],
    trace: Trace,
    slot_bytes: int,
) -> list[TierResult]:
    results = []
    replayed = tier_traffic(config, tiers, refs=trace.refs)
    for index, (options, tier) in enumerate(zip(config.tiers, replayed, strict=True)):
        per_day = None
        if index and trace.duration_s:
            per_day = tier.chunks_written * slot_bytes / trace.duration_s * _DAY_S
        dwpd = None if per_day is None else per_day / options.capacity_bytes
        results.append(TierResult(**asdict(tier), bytes_written_per_day=per_day, dwpd=dwpd))
    return results


def wait_quantiles(waits: NDArray[np.float64]) -> dict[str, float]:
    """Return the ``p50``, ``p90`` and ``p99`` of times to the first token, in seconds."""
    levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: float(np.quantile(waits, share)) for name, share in levels.items()}
