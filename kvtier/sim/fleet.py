"""Simulates a fleet: several engines, each with local tiers, and one shared tier.

All engines have the same configuration and speeds. Each engine has its own manager, which
queries the shared tier like a live engine's manager. The events of all engines run in order of
time. Without a shared tier, the simulation shows the hits in local tiers for a routing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, takewhile
from typing import Final

import numpy as np

from kvtier.config import KvtierConfig, slot_nbytes
from kvtier.sim.cache import (
    Simulation,
    SimulationResult,
    TierTraffic,
    default_time_model,
    simulate_engines,
)
from kvtier.sim.shared_cache import Meter, SharedCache, SharedTraffic
from kvtier.sim.single import BELADY, Progress, simulate_single
from kvtier.sim.time_model import TimeModel
from kvtier.sim.traces import Trace

__all__ = [
    "ROUTINGS",
    "EngineResult",
    "FleetResult",
    "Rate",
    "SharedResult",
    "simulate_fleet",
]

_ENOUGH: Final = 0.5
"""A known prefix must have at least this share of the prompt's chunks."""


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
class FleetResult(SimulationResult):
    """The figures of a fleet on a trace. The names of the fields are a stable interface.

    Attributes:
        routing: The rule by which requests were sent to engines.
        tiers: One result per tier, fastest first. Each result is a sum over the engines, but a
            shared tier counts once.
        hit_tokens: Number of tokens of whole chunks loaded from each tier, by the tier's name.
        engines: One result per engine.
        shared: The figures of the shared tier; None without a shared tier.
    """

    routing: str
    tiers: Sequence[TierTraffic]
    hit_tokens: Mapping[str, int]
    engines: Sequence[EngineResult]
    shared: SharedResult | None


def simulate_fleet(  # noqa: PLR0913 - one keyword for each part
    trace: Trace,
    config: KvtierConfig,
    *,
    engines: int,
    routing: str,
    chunk_bytes: int,
    model: TimeModel | None = None,
    progress: Progress | None = None,
) -> FleetResult:
    """Replay ``trace`` through several engines with the tiers of ``config``.

    ``routing`` is one of :data:`ROUTINGS`. :func:`~kvtier.sim.cache.simulate_engines` documents
    the other parameters and the errors.
    """
    routes = ROUTINGS[routing](trace, engines)
    run = simulate_engines(
        trace,
        config,
        routes,
        chunk_bytes=chunk_bytes,
        model=model or default_time_model(config, trace, engines=engines),
        progress=progress,
        engines=engines,
    )
    tiers = [
        _sum(parts, trace.refs, is_shared=options.is_shared)
        for options, *parts in zip(config.tiers, *run.traffic, strict=True)
    ]
    shared = None
    if run.service is not None:
        clients = [built.shared.traffic for built in run.fleet if built.shared is not None]
        shared = _shared_result(trace, run.service, clients, slot_nbytes(chunk_bytes))
    return FleetResult(
        **run.figures,
        routing=routing,
        tiers=tiers,
        hit_tokens={tier.name: tier.hits * trace.chunk_tokens for tier in tiers},
        engines=_engine_results(trace, run, routes),
        shared=shared,
    )


# -- routing -----------------------------------------------------------------------------------


def _by_turns(trace: Trace, engines: int) -> list[int]:
    """Return the engine of each request; the engines get requests in turn."""
    return [number % engines for number in range(trace.requests)]


def _by_prefix(trace: Trace, engines: int) -> list[int]:
    """Return for each request the engine that last received its longest known prefix.

    If this prefix is shorter than half of the prompt, the next engine in turn gets the request.
    So a system prompt that all requests share does not send all requests to one engine.
    """
    turns = cycle(range(engines))
    last: dict[int, int] = {}
    routes = []
    for chain in trace.chains():
        lead = sum(1 for _ in takewhile(last.__contains__, chain))
        known = lead and lead >= len(chain) * _ENOUGH
        engine = last[chain[lead - 1]] if known else next(turns)
        last.update(dict.fromkeys(chain, engine))
        routes.append(engine)
    return routes


ROUTINGS: Final[Mapping[str, Callable[[Trace, int], list[int]]]] = {
    "round-robin": _by_turns,
    "prefix": _by_prefix,
}
"""Routing rules, by name. A rule is a function that returns each request's engine."""


# -- results -----------------------------------------------------------------------------------


def _sum(parts: Sequence[TierTraffic], refs: int, *, is_shared: bool) -> TierTraffic:
    """Return one tier's figures, summed over all engines."""
    first = parts[0]
    hits = sum(part.hits for part in parts)
    sums = replace(
        first,
        hits=hits,
        hit_ratio=hits / refs,
        chunks_written=sum(part.chunks_written for part in parts),
        chunks_promoted=sum(part.chunks_promoted for part in parts),
    )
    if is_shared:  # each part has the capacity and the evictions of the one service
        return sums
    return replace(
        sums,
        capacity_chunks=sum(part.capacity_chunks for part in parts),
        evictions=sum(part.evictions for part in parts),
    )


def _engine_results(trace: Trace, run: Simulation, routes: Sequence[int]) -> list[EngineResult]:
    requests = np.bincount(routes, minlength=len(run.fleet)).tolist()
    tokens = np.bincount(routes, trace.input_tokens, minlength=len(run.fleet)).tolist()
    return [
        EngineResult(
            requests=requests[at],
            prompt_tokens=int(tokens[at]),
            saved_tokens=run.saved[at],
            hit_tokens={
                tier.name: tier.counters.hits * trace.chunk_tokens for tier in built.tiers
            },
            shared=None if built.shared is None else built.shared.traffic,
        )
        for at, built in enumerate(run.fleet)
    ]


def _shared_result(
    trace: Trace, service: SharedCache, traffic: Sequence[SharedTraffic], slot_bytes: int
) -> SharedResult:
    """Return the figures of the shared tier, computed from the figures of all engines."""

    def rate(meter: Meter, unit: int = 1) -> Rate:
        mean = meter.total * unit / trace.duration_s if trace.duration_s else None
        return Rate(mean, meter.peak_per_s(trace.duration_s) * unit)

    best = simulate_single(trace, policy=BELADY, capacity=service.capacity)
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
