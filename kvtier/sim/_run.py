"""Runs a trace through one or several simulated engines.

All engines have the same configuration and speeds. Each engine has its own manager and local
tiers; a shared tier is one service. The events of all engines run in order of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from kvtier.build import build_manager, build_tiers
from kvtier.config import KvtierConfig, SharedTierConfig
from kvtier.manager import TieredOffloadingManager, TierState
from kvtier.sim._batching_engine import BatchingEngine, StepModel
from kvtier.sim._engine import Engine, ModelRequest, ReliableSlotStatus
from kvtier.sim._sequential_engine import SequentialEngine, serve_fleet
from kvtier.sim.shared_cache import SharedCache, SharedClient
from kvtier.sim.single import Progress, chunk_keys
from kvtier.sim.time_model import TimeModel, TransferModel
from kvtier.sim.traces import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Run", "run_engines"]

_Engine = TypeVar("_Engine", bound=Engine[Any])

_GALLOPING: Final = frozenset({"object", "shared_dir"})
"""Kinds of shared tiers that send a question in rounds; others ask about all keys at once."""


class BuiltEngine(NamedTuple, Generic[_Engine]):
    """A simulated engine, its manager, tiers, and client of the shared tier if there is one."""

    engine: _Engine
    manager: TieredOffloadingManager
    tiers: Sequence[TierState]
    shared: SharedClient | None


class Run(NamedTuple):
    """The engines after they served a trace.

    Attributes:
        service: The service behind the shared tier; None without a shared tier.
        waits_s: Seconds from each request's arrival to its first token.
        saved_tokens: Number of prompt tokens that each engine loaded.
    """

    engines: Sequence[BuiltEngine[Any]]
    service: SharedCache | None
    waits_s: NDArray[np.float64]
    saved_tokens: Sequence[int]


def run_engines(  # noqa: PLR0913 - one keyword for each part
    trace: Trace,
    config: KvtierConfig,
    routes: Sequence[int],
    *,
    engines: int,
    slot_bytes: int,
    model: TimeModel,
    progress: Progress | None,
) -> Run:
    """Serve ``trace`` with ``engines`` engines; ``routes`` has the engine of each request.

    ``progress`` is called at intervals with the share of finished requests, 0 to 1.
    """
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
    waits_s, saved_tokens = _collect_waits(trace, fleet, routes, served, progress)
    if service is not None:
        service.end_all_puts()
    return Run(fleet, service, waits_s, saved_tokens)


def _build_engine(
    engine_type: type[_Engine],
    trace: Trace,
    config: KvtierConfig,
    model: TimeModel,
    slot_bytes: int,
    service: SharedCache | None,
) -> BuiltEngine[_Engine]:
    """Build a simulated engine with empty local tiers.

    ``service`` is behind the shared tier, if there is one.
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
