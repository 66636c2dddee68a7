"""A simulated engine that computes one request after the other.

The engine looks up the first requests in the queue. While another request computes, the chunks
in slower tiers are promoted and the chunks in RAM are copied to the GPU. Then the engine
computes the rest of the prompt, one request at a time in order of arrival. The request then has
its first token, and the engine offers the new chunks to the manager.

This engine models neither decoding nor chunked prefill. The module docstring of :class:`Engine`
lists the limits of all simulated engines.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

from typing_extensions import override

from kvtier.sim._engine import Engine, ModelRequest, PlannedLoad
from kvtier.sim.time_model import TimeModel
from kvtier.types import Job, Purpose, TransferResult

__all__ = ["SequentialEngine", "serve_fleet"]

_TICK_S: Final = 0.01
_AWAITED: Final = (Purpose.PROMOTE, Purpose.QUESTION)
_ASK_AFTER_STEPS: Final = 16


class SequentialEngine(Engine[TimeModel]):
    """Computes one request after the other."""

    @override
    def _set_up(self) -> None:
        self._queue: deque[ModelRequest] = deque()
        self._deferred: dict[ModelRequest, None] = {}
        self._ready: list[tuple[int, ModelRequest]] = []
        self._unstored: list[ModelRequest] = []
        self._over: list[ModelRequest] = []
        self._open = 0
        self._computing = False
        # Whether a deferred request may be answered now: chunks were promoted, a question was
        # answered, reserved room is free, or it was deferred in this step. No event tells that
        # a request waited too long, so deferred requests are also looked up every few steps.
        self._may_answer = False
        self._steps = 0
        self._started: list[str] = []

    @override
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        return serve_fleet((self,), zip(repeat(0), requests))

    @property
    def next_s(self) -> float:
        """Time of the next event or step; infinite if there is none."""
        if self._events:
            return self._events[0][0]
        # No event is due, but a live engine would continue to step.
        return self._now_s + _TICK_S if self._deferred or self._unstored else math.inf

    def advance(self) -> None:
        """Run the next event, or a step if no event is due."""
        self._now_s = self.next_s
        if self._events:
            self._run_event()
        else:
            self._may_answer = True
        self._step()

    def receive(self, request: ModelRequest) -> None:
        """Queue ``request``, which arrives now. The caller has run all earlier events."""
        self._now_s = max(self._now_s, request.arrival_s)
        self._queue.append(request)
        self._step()

    def take_over(self) -> list[ModelRequest]:
        """Return the requests that finished since the last call."""
        over, self._over = self._over, []
        return over

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
            self._run_jobs()
            may_answer, self._may_answer = self._may_answer, False
            if not (may_answer and self._deferred and self._ask_again()):
                return

    def _admit(self) -> None:
        """Start or defer the first requests in the queue, up to the allowed concurrency."""
        while self._queue and self._open < self._model.concurrency:
            request = self._queue.popleft()
            self._open += 1
            self._begin(request)
            if not self._start(request):
                self._deferred[request] = None
                self._may_answer = True

    def _ask_again(self) -> bool:
        """Look up the deferred requests; return whether any request started."""
        answered = [request for request in self._deferred if self._start(request)]
        for request in answered:
            del self._deferred[request]
        return bool(answered)

    def _start(self, request: ModelRequest) -> bool:
        """Look up ``request`` and load its hits; return False if ``request`` must wait."""
        if not self._look_up(request):
            return False
        self._may_answer = True
        self._started.append(request.req_id)
        if request.hits:
            load = self._plan_load(request)
            copied_s = self._transfers.load(request.hits, self._now_s)
            self._at(max(copied_s, load.promoted_s), self._loaded, load)
        else:
            heapq.heappush(self._ready, (request.number, request))
        return True

    def _compute(self) -> None:
        """Start computing the first ready request."""
        self._computing = True
        _, request = heapq.heappop(self._ready)
        left = self._uncomputed(request)
        seconds = left / self._model.prefill_tokens_per_s
        self._manager.record_prefill(left, seconds)
        self._at(self._now_s + seconds, self._computed, request)

    def _store(self) -> None:
        """Store the new chunks of computed requests; retry later if RAM has no free slots."""
        refused = []
        for request in self._unstored:
            keys = self._offer(request, request.keys[request.hits :])
            if keys is None:
                refused.append(request)
                continue
            if keys:
                self._complete_store(keys)
            self._manager.end_request(request.req_id)
        self._unstored = refused

    # -- events -----------------------------------------------------------------------------

    @override
    def _apply(self, ended: tuple[Job, TransferResult]) -> None:
        super()._apply(ended)
        if ended[0].purpose in _AWAITED:
            self._may_answer = True

    def _loaded(self, load: PlannedLoad) -> None:
        request = load.request
        # The prompt is computed from the first chunk that was not loaded.
        request.hits = self._end_load(load)
        heapq.heappush(self._ready, (request.number, request))

    def _computed(self, request: ModelRequest) -> None:
        self._computing = False
        self._open -= 1
        request.first_token_s = self._now_s
        self._unstored.append(request)
        self._over.append(request)


def serve_fleet(
    engines: Sequence[SequentialEngine], arrivals: Iterable[tuple[int, ModelRequest]]
) -> Iterator[ModelRequest]:
    """Serve requests with several engines; yield each request when it finishes.

    All events run in order of time. ``arrivals`` are in order too, each with its engine's
    index.
    """
    due: list[tuple[float, int]] = []  # an entry is void if its engine's next time changed

    def schedule(number: int) -> list[ModelRequest]:
        if (next_s := engines[number].next_s) < math.inf:
            heapq.heappush(due, (next_s, number))
        return engines[number].take_over()

    def run_until(time_s: float) -> Iterator[ModelRequest]:
        while due and due[0][0] <= time_s:
            next_s, number = heapq.heappop(due)
            if next_s == engines[number].next_s:
                engines[number].advance()
                yield from schedule(number)

    for chosen, request in arrivals:
        yield from run_until(request.arrival_s)
        engines[chosen].receive(request)
        yield from schedule(chosen)
    yield from run_until(math.inf)
