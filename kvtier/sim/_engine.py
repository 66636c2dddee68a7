"""A simulated engine: calls the manager as vLLM's scheduler does, in simulated time.

:class:`Engine` has the rules of these calls: how a request is looked up, loaded and stored, and
how the results of storage jobs reach the manager. A derived class only decides the times of the
calls:

* :class:`~kvtier.sim._sequential_engine.SequentialEngine` computes one request after the other.
  This class needs few settings; use it to compare policies.
* :class:`~kvtier.sim._batching_engine.BatchingEngine` computes tokens of many requests in each
  step. This class predicts times if the duration of a step is known; ``kvtier replay`` compares
  this prediction with real transfers.

The model ignores the prefix cache in GPU memory, so every hit is in a tier. The model also
ignores the duration of stores to RAM. It ignores the size of GPU memory too, so there are no
preemptions.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from kvtier.keys import ChunkKey
from kvtier.manager import NO_SLOT, LoadPlan, Prompt, TieredOffloadingManager
from kvtier.policies.base import session_terms
from kvtier.sim.time_model import TimeModel, TransferModel
from kvtier.types import Job, Outcome, Purpose, TransferResult

__all__ = ["Engine", "ModelRequest", "PlannedLoad", "ReliableSlotStatus"]

_PROMOTE: Final = Purpose.PROMOTE

_Model = TypeVar("_Model", bound=TimeModel)

_Event: TypeAlias = tuple[float, int, Callable[..., None], Any]
"""A time, a number that orders events of equal time, a callback, and its argument."""


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One request of a trace. Its id is its number in the trace.

    Attributes:
        keys: The prompt's chunks, root to leaf.
        session: The request's session; an empty string if unknown.
        output_tokens: Number of tokens to generate. The sequential engine ignores this number.
        hits: Number of leading chunks that were loaded.
    """

    number: int
    arrival_s: float
    tokens: int
    keys: Sequence[ChunkKey]
    session: str = ""
    output_tokens: int = 1
    req_id: str = field(init=False)
    hits: int = field(default=0, init=False)
    first_token_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.req_id = str(self.number)


class PlannedLoad(NamedTuple):
    """A load of the leading ``request.hits`` chunks of a request.

    Attributes:
        promoted_s: Time at which all chunks of the load are in RAM, in seconds.
    """

    request: ModelRequest
    plan: LoadPlan
    promoted_s: float


class Engine(ABC, Generic[_Model]):
    """A simulated engine, which serves requests through a manager.

    Args:
        manager: The manager.
        model: Speeds of the engine and the tiers.
        transfers: Computes when loads and storage jobs end.
        slot_status: The manager's slot status, in which the engine records failed promotions.
        chunk_tokens: Number of tokens of a chunk.
        retain_s: Seconds during which chunks are retained in RAM after a use.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        *,
        model: _Model,
        transfers: TransferModel,
        slot_status: ReliableSlotStatus,
        chunk_tokens: int,
        retain_s: float = 0.0,
    ) -> None:
        self._manager = manager
        self._model = model
        self._transfers = transfers
        self._slot_status = slot_status
        self._chunk_tokens = chunk_tokens
        self._retain_s = retain_s
        self._now_s = 0.0
        self._events: list[_Event] = []
        self._order = count()
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Initialize a derived class. The constructor calls this method."""

    @abstractmethod
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        """Serve ``requests``, in order of arrival; yield each finished request."""

    # -- requests ---------------------------------------------------------------------------

    def _begin(self, request: ModelRequest) -> None:
        """Announce ``request`` to the manager."""
        self._manager.begin_request(request.req_id, session_terms(request.session))

    def _look_up(self, request: ModelRequest) -> bool:
        """Look up ``request`` and set its hits; return False if ``request`` must wait."""
        prompt = Prompt((request.keys,), 0, len(request.keys))
        hits = self._manager.lookup(request.req_id, prompt)
        if hits is None:
            return False
        request.hits = hits
        return True

    def _plan_load(self, request: ModelRequest) -> PlannedLoad:
        """Plan the load of the request's hits, and run the promotions that the load needs."""
        plan = self._manager.prepare_load(request.keys[: request.hits], request.req_id)
        promoted_s = self._run_jobs() if plan.wait_s else self._now_s
        return PlannedLoad(request, plan, promoted_s)

    def _end_load(self, load: PlannedLoad) -> int:
        """Complete ``load``; return the number of chunks loaded before the first failure."""
        request, plan, _ = load
        # As in a live engine: before the manager unpins the chunks.
        self._retain(request.keys[: request.hits])
        chunks = self._slot_status.count_loaded(plan) if plan.wait_s else request.hits
        self._manager.complete_load(request.req_id, plan.load_id)
        return chunks

    def _uncomputed(self, request: ModelRequest) -> int:
        """Return the number of prompt tokens to compute after the request's hits.

        An engine computes at least the last token, because it needs this token's logits.
        """
        return max(request.tokens - request.hits * self._chunk_tokens, 1)

    def _offer(
        self, request: ModelRequest, keys: Sequence[ChunkKey]
    ) -> Sequence[ChunkKey] | None:
        """Offer ``keys``; return the keys to store, or None if RAM has too few free slots."""
        plan = self._manager.prepare_store(keys, request.req_id)
        return None if plan is None else plan.keys

    def _complete_store(self, keys: Sequence[ChunkKey]) -> None:
        self._manager.complete_store(keys)
        self._retain(keys)

    def _retain(self, keys: Sequence[ChunkKey]) -> None:
        """Retain the chunks that were just used, if retention is configured."""
        if self._retain_s:
            self._manager.retain(keys, self._now_s + self._retain_s)

    # -- jobs and events --------------------------------------------------------------------

    def _run_jobs(self) -> float:
        """Start all planned jobs; return the time by which every job has a result."""
        known_s = self._now_s
        for job in self._manager.take_jobs():
            results = self._transfers.run(job, self._now_s)
            for time_s, result in results:
                self._at(time_s, self._apply, (job, result))
            known_s = max(known_s, results[0][0])
        return known_s

    def _apply(self, ended: tuple[Job, TransferResult]) -> None:
        """Pass a result to the manager, and record failed promotions."""
        job, result = ended
        self._manager.apply(result)
        if job.purpose is _PROMOTE:
            self._slot_status.record(job, result)

    def _at(self, time_s: float, happens: Callable[..., None], subject: object) -> None:
        """Queue the event that calls ``happens(subject)`` at ``time_s``."""
        heapq.heappush(self._events, (time_s, next(self._order), happens, subject))

    def _run_event(self) -> None:
        """Run the first event of the queue."""
        _, _, happens, subject = heapq.heappop(self._events)
        happens(subject)


class ReliableSlotStatus:
    """The slot status of a simulated engine: loads fail only after failed promotions."""

    def __init__(self) -> None:
        self._lost: set[tuple[int, int]] = set()

    def record(self, job: Job, result: TransferResult) -> None:
        """Record the destination slots of chunks that the promotion ``job`` did not copy."""
        if result.outcomes.count(Outcome.DONE) == len(result.outcomes):
            return
        places = zip(job.destination_slots, job.payload, result.outcomes, strict=True)
        self._lost.update(
            (slot, generation)
            for slot, generation, outcome in places
            if outcome is not Outcome.DONE
        )

    def count_loaded(self, plan: LoadPlan) -> int:
        """Return the number of chunks of ``plan`` before the first one that failed to load."""
        if not self._lost and NO_SLOT not in plan.slots:
            return len(plan.slots)
        loaded = self.loaded(plan.slots, plan.generations)
        for at, (slot, is_loaded) in enumerate(zip(plan.slots, loaded, strict=True)):
            if slot == NO_SLOT or not is_loaded:
                return at
        return len(loaded)

    def issue(self, slots: Sequence[int]) -> None:
        """Do nothing, because there are no workers."""

    def clear_generations(self, slots: Sequence[int]) -> None:
        """Do nothing, because there are no workers that read generations."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:  # noqa: ARG002 - the manager passes these arguments
        """Return True for each slot, because every store succeeds."""
        return [True] * len(slots)

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether the promotion to this generation succeeded."""
        if not self._lost:
            return [True] * len(slots)
        return [place not in self._lost for place in zip(slots, generations, strict=True)]

    def clear_failed_loads(self, slots: Sequence[int]) -> None:
        """Forget the failed promotions into ``slots``."""
        self._lost = {place for place in self._lost if place[0] not in slots}

    def all_acknowledged(self, slots: Sequence[int]) -> list[bool]:
        """Return True for each slot, because there are no workers to wait for."""
        return [True] * len(slots)
