"""A simulated engine that computes one request after the other.

The engine looks up the requests at the head of the queue. Chunks in a slower tier are promoted
while other requests compute, chunks in RAM are copied to the GPU, and the rest of the prompt is
computed, one request at a time in order of arrival. Then the request has its first token, and
its new chunks are offered to the manager.

This engine models neither decoding nor chunked prefill. The module of :class:`Engine` lists
what no simulated engine models.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from typing_extensions import override

from kvtier.sim._engine import Engine, ModelRequest, PlannedLoad
from kvtier.sim.time_model import TimeModel
from kvtier.types import Job, Purpose, TransferResult

__all__ = ["SequentialEngine"]

_TICK_S: Final = 0.01
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
        # Whether a deferred request may be answered now: chunks were promoted, reserved room is
        # free, or it was deferred in this step. No event tells that a request waited too long,
        # so deferred requests are also looked up every few steps.
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
        self._now_s = self._events[0][0]
        self._run_event()
        self._step()

    def _take_over(self) -> list[ModelRequest]:
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
        """Look up the requests at the head of the queue."""
        while self._queue and self._open < self._model.concurrency:
            request = self._queue.popleft()
            self._open += 1
            self._begin(request)
            if not self._start(request):
                self._deferred[request] = None
                self._may_answer = True

    def _ask_again(self) -> bool:
        """Look up the deferred requests; return whether one of them started."""
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
        """Begin to compute the first ready request."""
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
        if ended[0].purpose is Purpose.PROMOTE:
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
