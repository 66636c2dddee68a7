"""A simulated engine: makes the calls of vLLM's scheduler, in simulated time, without an LLM.

Requests arrive at their timestamps. The engine looks up the requests at the head of the queue.
Chunks in a slower tier are promoted while other requests compute, chunks in RAM are copied to
the GPU, and the rest of the prompt is computed, one request at a time in order of arrival. Then
the request has its first token, and its new chunks are offered to the manager.

Not modelled: decoding, the GPU's own prefix cache (so every hit is in a tier), the time of a
store to RAM, and chunked prefill.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Final, Generic, TypeAlias, TypeVar

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.manager import NO_SLOT, LoadPlan, TieredOffloadingManager
from kvtier.manager.hits import Prompt
from kvtier.policies.base import session_terms
from kvtier.sim.time_model import TimeModel, TransferModel
from kvtier.types import Job, Outcome, Purpose, TransferResult

__all__ = ["Engine", "ModelEngine", "ModelRequest", "ReliableSlotStatus"]

_TICK_S: Final = 0.01
_ASK_AFTER_STEPS: Final = 16
_PROMOTE: Final = Purpose.PROMOTE

_Model = TypeVar("_Model", bound=TimeModel)

_Event: TypeAlias = tuple[float, int, Callable[..., None], Any]
"""A time, a number that keeps equal times in order, a callback, and its argument."""


class ModelRequest:
    """One request of a trace.

    Attributes:
        number: Position of the request in the trace and in the queue.
        req_id: The request's id, which is ``number`` as text.
        arrival_s: Time of the arrival.
        tokens: Length of the prompt.
        keys: The prompt's chunks, root to leaf.
        session: The request's session; an empty string if unknown.
        output_tokens: Tokens to generate; only :class:`StepEngine` models them.
        hits: Leading chunks that were loaded.
        first_token_s: Time of the first token.
    """

    __slots__ = (
        "arrival_s",
        "first_token_s",
        "hits",
        "keys",
        "number",
        "output_tokens",
        "req_id",
        "session",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        arrival_s: float,
        tokens: int,
        keys: Sequence[ChunkKey],
        *,
        session: str = "",
        output_tokens: int = 1,
    ) -> None:
        self.number = number
        self.req_id = str(number)
        self.arrival_s = arrival_s
        self.tokens = tokens
        self.keys = keys
        self.session = session
        self.output_tokens = output_tokens
        self.hits = 0
        self.first_token_s = 0.0


class Engine(ABC, Generic[_Model]):
    """A simulated engine, which serves requests through a manager.

    Args:
        manager: The manager.
        model: Speeds of the engine and the tiers.
        transfers: Decides when loads and storage jobs end.
        slot_status: The manager's slot status, in which the engine records failed promotions.
        chunk_tokens: Tokens of a chunk.
        retain_s: Seconds for which chunks are retained in RAM after a use.
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
        self._order = count()
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Set up the state of a derived class. The constructor calls this."""

    @abstractmethod
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        """Serve ``requests``, in order of arrival; yield each finished request."""

    def _retain(self, keys: Sequence[ChunkKey]) -> None:
        """Retain the chunks just used, if retention is configured."""
        if self._retain_s:
            self._manager.retain(keys, self._now_s + self._retain_s)


class ModelEngine(Engine[TimeModel]):
    """Computes one request after the other."""

    @override
    def _begin(self) -> None:
        self._events: list[_Event] = []
        self._queue: deque[ModelRequest] = deque()
        self._deferred: dict[ModelRequest, None] = {}
        self._ready: list[tuple[int, ModelRequest]] = []
        self._unstored: list[ModelRequest] = []
        self._over: list[ModelRequest] = []
        self._open = 0
        self._computing = False
        # Whether a deferred request may be answered now: chunks were promoted, reserved room is
        # free, or it was deferred in this step. The end of a wait raises no event, so deferred
        # requests are also looked up every few steps.
        self._may_answer = False
        self._steps = 0
        self._started: list[str] = []

    @override
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        events = self._events
        for request in requests:
            arrival_s = request.arrival_s
            while events and events[0][0] <= arrival_s:
                self._next()
            self._now_s = max(self._now_s, arrival_s)
            self._queue.append(request)
            self._step()
            if self._over:
                yield from self._take_over()
        while self._events or self._deferred or self._unstored:
            if not self._events:
                # No event is due, but a live engine would continue to step.
                self._now_s += _TICK_S
                self._may_answer = True
                self._step()
            else:
                self._next()
            yield from self._take_over()

    def _next(self) -> None:
        """Run the next event."""
        self._now_s, _, happens, subject = heapq.heappop(self._events)
        happens(subject)
        self._step()

    def _take_over(self) -> list[ModelRequest]:
        """Return the requests that finished since the last call."""
        over, self._over = self._over, []
        return over

    def _at(self, time_s: float, happens: Callable[..., None], subject: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happens, subject))

    # -- a scheduling step ------------------------------------------------------------------

    def _step(self) -> None:
        """Run scheduling steps until no more requests start."""
        manager = self._manager
        self._steps += 1
        if not self._steps % _ASK_AFTER_STEPS:
            self._may_answer = True
            manager.take_cancels()  # jobs in model time cannot be cancelled
        if self._queue and self._open < self._model.concurrency:
            self._admit()
        while True:
            if self._unstored:
                self._store()
            if self._ready and not self._computing:
                self._compute()
            manager.end_step(started=self._started, now=self._now_s)
            self._started.clear()
            for job in manager.take_jobs():
                self._send(job)
            may_answer, self._may_answer = self._may_answer, False
            if not (may_answer and self._deferred and self._ask_again()):
                return

    def _admit(self) -> None:
        """Look up the requests at the head of the queue."""
        while self._queue and self._open < self._model.concurrency:
            request = self._queue.popleft()
            self._open += 1
            terms = session_terms(request.session)
            self._manager.begin_request(request.req_id, terms)
            if not self._look(request):
                self._deferred[request] = None
                self._may_answer = True

    def _ask_again(self) -> bool:
        """Look up the deferred requests; return whether one of them started."""
        answered = [request for request in self._deferred if self._look(request)]
        for request in answered:
            del self._deferred[request]
        return bool(answered)

    def _look(self, request: ModelRequest) -> bool:
        """Look up ``request`` and load its hits; return False if ``request`` must wait."""
        prompt = Prompt((request.keys,), 0, len(request.keys))
        hits = self._manager.lookup(request.req_id, prompt)
        if hits is None:
            return False
        self._may_answer = True
        request.hits = hits
        self._started.append(request.req_id)
        if not hits:
            heapq.heappush(self._ready, (request.number, request))
            return True
        loaded = request.keys[:hits]
        plan = self._manager.prepare_load(loaded, request.req_id)
        self._retain(loaded)
        done_s = self._transfers.load(hits, self._now_s)
        if plan.wait_s:  # the load also waits for promotions
            done_s = max([done_s, *map(self._send, self._manager.take_jobs())])
            self._at(done_s, self._streamed, (request, plan))
        else:
            self._at(done_s, self._loaded, request)
        return True

    def _compute(self) -> None:
        """Begin to compute the first ready request."""
        self._computing = True
        _, request = heapq.heappop(self._ready)
        # An engine computes at least the last token, whose logits it needs.
        left = max(request.tokens - request.hits * self._chunk_tokens, 1)
        seconds = left / self._model.prefill_tokens_per_s
        self._manager.record_prefill(left, seconds)
        self._at(self._now_s + seconds, self._computed, request)

    def _store(self) -> None:
        """Store the new chunks of computed requests; retry later if RAM has no free slots."""
        refused = []
        for request in self._unstored:
            plan = self._manager.prepare_store(request.keys[request.hits :], request.req_id)
            if plan is None:
                refused.append(request)
                continue
            if plan.keys:
                self._manager.complete_store(plan.keys)
                self._retain(plan.keys)
            self._manager.end_request(request.req_id)
        self._unstored = refused

    # -- events -----------------------------------------------------------------------------

    def _send(self, job: Job) -> float:
        """Run ``job``; return the time of its first result."""
        results = self._transfers.run(job, self._now_s)
        promoting = job.purpose is _PROMOTE
        for time_s, result in results:
            if promoting:
                self._at(time_s, self._promoted, (job, result))
            else:
                self._at(time_s, self._manager.apply, result)
        return results[0][0]

    def _promoted(self, outcome: tuple[Job, TransferResult]) -> None:
        job, result = outcome
        self._manager.apply(result)
        self._slot_status.record(job, result)
        self._may_answer = True

    def _streamed(self, load: tuple[ModelRequest, LoadPlan]) -> None:
        request, plan = load
        # The prompt is computed from the first chunk that was not promoted.
        request.hits = self._slot_status.count_loaded(plan)
        self._loaded(request)

    def _loaded(self, request: ModelRequest) -> None:
        self._manager.complete_load(request.req_id)
        heapq.heappush(self._ready, (request.number, request))

    def _computed(self, request: ModelRequest) -> None:
        self._computing = False
        self._open -= 1
        request.first_token_s = self._now_s
        self._unstored.append(request)
        self._over.append(request)


class ReliableSlotStatus:
    """Slot status without a worker: a load fails only for chunks whose promotion failed."""

    def __init__(self) -> None:
        self._lost: set[tuple[int, int]] = set()

    def record(self, job: Job, result: TransferResult) -> None:
        """Record which destination slots of the promotion ``job`` did not get their chunks."""
        if result.outcomes.count(Outcome.DONE) == len(result.outcomes):
            return
        places = zip(job.destination_slots, job.payload, result.outcomes, strict=True)
        self._lost.update(
            (slot, generation)
            for slot, generation, outcome in places
            if outcome is not Outcome.DONE
        )

    def count_loaded(self, plan: LoadPlan) -> int:
        """Return the number of chunks of ``plan`` before the first that was not loaded."""
        if not self._lost and NO_SLOT not in plan.slots:
            return len(plan.slots)
        loaded = self.loaded(plan.slots, plan.generations)
        for at, (slot, is_loaded) in enumerate(zip(plan.slots, loaded, strict=True)):
            if slot == NO_SLOT or not is_loaded:
                return at
        return len(loaded)

    def issue(self, slots: Sequence[int]) -> None:
        """Do nothing, because no worker gets a job."""

    def clear_generations(self, slots: Sequence[int]) -> None:
        """Do nothing, because no worker reads the generation of a slot."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:  # noqa: ARG002 - the manager passes these arguments
        """Return True for each slot, because every store succeeds."""
        return [True] * len(slots)

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot False if the promotion of its generation failed, else True."""
        if not self._lost:
            return [True] * len(slots)
        return [place not in self._lost for place in zip(slots, generations, strict=True)]

    def clear_failed_loads(self, slots: Sequence[int]) -> None:
        """Forget the failed promotions into ``slots``."""
        self._lost = {place for place in self._lost if place[0] not in slots}

    def all_acknowledged(self, slots: Sequence[int]) -> list[bool]:
        """Return True for each slot, because no worker is busy."""
        return [True] * len(slots)
