"""An engine in model time: what vLLM's scheduler asks of the manager, without the model.

Requests arrive at their timestamps. Those at the head of the queue are looked up; what lies in
a slower tier is promoted while others compute; what lies in RAM is copied to the GPU; the rest
of the prompt is computed, one request at a time, first come first served among those that are
ready. Then the request's first token is there, and its new chunks are offered to the manager.

Left out: decoding, the GPU's own prefix cache (so every hit is the tiers'), the time a store
takes to RAM, and prompts computed in pieces.
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
from kvtier.manager import LoadPlan, TieredOffloadingManager
from kvtier.manager.hits import Prompt
from kvtier.policies.base import session_terms
from kvtier.sim._slot_status import ReliableSlotStatus
from kvtier.sim.timing import TimeModel, TransferModel
from kvtier.types import Job, Purpose, TransferResult

__all__ = ["Engine", "ModelEngine", "ModelRequest"]

_TICK_S: Final = 0.01
_ASK_AFTER_STEPS: Final = 16
_PROMOTE: Final = Purpose.PROMOTE

_Model = TypeVar("_Model", bound=TimeModel)

_Event: TypeAlias = tuple[float, int, Callable[..., None], Any]
"""When, a number that keeps equal times in order, what happens, and to what."""


class ModelRequest:
    """One request of a trace.

    Attributes:
        number: Its place in the trace, which is its place in the queue.
        req_id: The same as the engine's name for it.
        arrival_s: When it arrived.
        tokens: Length of its prompt.
        keys: Its chunks, root to leaf.
        session: What it belongs to, empty if nobody says.
        output_tokens: Tokens it generates, if that is modelled.
        hits: Leading chunks that were loaded.
        first_token_s: When its first token was there.
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
    """Serves requests through a manager.

    Args:
        manager: The manager.
        model: What things take.
        transfers: When loads and storage jobs end.
        slot_status: The manager's; told what did not come up.
        chunk_tokens: Tokens of a chunk.
        retain_s: Seconds chunks are kept in RAM after a use.
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
        """Set up what this kind of engine keeps from step to step; the constructor calls it."""

    @abstractmethod
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        """Serve ``requests``, given in order of arrival; yield each when it is over."""

    def _retain(self, keys: Sequence[ChunkKey]) -> None:
        """Keep chunks that were used now, if any are to be kept."""
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
        # Whether a request that was put off may be answered now: chunks came up, room that was
        # kept for another is free, or it was put off in this very step. Patience that ends
        # says nothing, so they are asked now and then anyway.
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
                # Nothing is on its way, but a live engine would go on stepping.
                self._now_s += _TICK_S
                self._may_answer = True
                self._step()
            else:
                self._next()
            yield from self._take_over()

    def _next(self) -> None:
        """Let the next event happen."""
        self._now_s, _, happens, subject = heapq.heappop(self._events)
        happens(subject)
        self._step()

    def _take_over(self) -> list[ModelRequest]:
        """Return the requests that are over since the last call."""
        over, self._over = self._over, []
        return over

    def _at(self, time_s: float, happens: Callable[..., None], subject: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happens, subject))

    # -- a scheduling step ------------------------------------------------------------------

    def _step(self) -> None:
        """Do what the scheduler does in one step, and again while that lets requests start."""
        manager = self._manager
        self._steps += 1
        if not self._steps % _ASK_AFTER_STEPS:
            self._may_answer = True
            manager.take_cancels()  # what runs in model time is not worth dropping
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
        """Look up the requests that were put off; return whether one of them started."""
        answered = [request for request in self._deferred if self._look(request)]
        for request in answered:
            del self._deferred[request]
        return bool(answered)

    def _look(self, request: ModelRequest) -> bool:
        """Look ``request`` up, and load what it hits; return whether it need not wait."""
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
        if plan.wait_s:  # it also waits for what is still to come up
            done_s = max([done_s, *map(self._send, self._manager.take_jobs())])
            self._at(done_s, self._streamed, (request, plan))
        else:
            self._at(done_s, self._loaded, request)
        return True

    def _compute(self) -> None:
        """Begin computing the first request that is ready."""
        self._computing = True
        _, request = heapq.heappop(self._ready)
        # An engine computes at least the last token, whose logits it needs.
        left = max(request.tokens - request.hits * self._chunk_tokens, 1)
        seconds = left / self._model.prefill_tokens_per_s
        self._manager.record_prefill(left, seconds)
        self._at(self._now_s + seconds, self._computed, request)

    def _store(self) -> None:
        """Offer the new chunks of computed requests; one that finds no room comes again."""
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
        """Let ``job`` run; return when its outcome is known."""
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
        self._slot_status.note(job, result)
        self._may_answer = True

    def _streamed(self, load: tuple[ModelRequest, LoadPlan]) -> None:
        request, plan = load
        # What did not come up is computed, and all that follows it.
        request.hits = self._slot_status.lead(plan)
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
