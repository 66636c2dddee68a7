"""A simulated engine that computes batches of requests step by step.

The duration of a step depends on its number of tokens. The engine looks up requests while it
schedules a step, until the step is full. A load starts after the step that planned the load.
The engine notices the end of the load at the end of a later step. Prefill is chunked: a
prompt is computed in several steps, and the last of them generates the first token.

A store to RAM ends within a step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.manager import prompt_tokens
from kvtier.sim._engine import Engine, ModelRequest, PlannedLoad
from kvtier.sim.time_model import TimeModel

__all__ = ["BatchingEngine", "StepModel"]


@dataclass(frozen=True, slots=True)
class StepModel(TimeModel):
    """Speeds of a batching engine and of its tiers.

    Attributes:
        step_tokens: Largest number of tokens in a step; a generating request takes one token.
        step_s: Shortest duration of a step with tokens: the time to read weights and launch
            kernels.
        idle_s: Duration of a step without tokens, while requests wait.
    """

    step_tokens: int = 2048
    step_s: float = 0.0
    idle_s: float = 0.001

    def seconds(self, tokens: int) -> float:
        """Return the duration of a step that computes ``tokens`` tokens."""
        return max(tokens / self.prefill_tokens_per_s, self.step_s) if tokens else self.idle_s


@dataclass(slots=True, eq=False)
class _Served:
    """A request and its progress.

    Attributes:
        computed: Number of tokens whose KV the engine has computed or loaded.
        generated: Number of tokens generated so far.
        next_chunk: Index of the first chunk that was not yet offered for storing.
    """

    request: ModelRequest
    computed: int = 0
    generated: int = 0
    next_chunk: int = 0

    @property
    def left(self) -> int:
        """Number of tokens to compute before the next token is generated."""
        return self.request.tokens + self.generated - self.computed


class BatchingEngine(Engine[StepModel]):
    """Computes all running requests together, step by step."""

    @override
    def _set_up(self) -> None:
        self._waiting: deque[_Served] = deque()
        self._running: list[_Served] = []
        self._planned: list[tuple[_Served, PlannedLoad]] = []
        self._loading: list[tuple[float, int, _Served, PlannedLoad]] = []
        self._ready: list[tuple[int, _Served]] = []
        self._stored: list[Sequence[ChunkKey]] = []
        self._final: list[Sequence[ChunkKey]] = []
        self._ended: list[_Served] = []

    @override
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        coming = deque(requests)
        while coming or self._is_busy or self._events or self._manager.has_work():
            if not self._is_busy and (coming or self._events):
                self._skip_idle_steps(coming)
            while coming and coming[0].arrival_s <= self._now_s:
                request = coming.popleft()
                self._begin(request)
                self._waiting.append(_Served(request))
            self._step()
            yield from (served.request for served in self._ended)

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has work for another step."""
        return bool(
            self._waiting
            or self._running
            or self._loading
            or self._ready
            or self._stored
            or self._final
        )

    def _skip_idle_steps(self, coming: Sequence[ModelRequest]) -> None:
        """Advance the clock to the next arrival or result, in whole idle steps."""
        times = [self._events[0][0]] if self._events else []
        if coming:
            times.append(coming[0].arrival_s)
        steps = math.ceil((min(times) - self._now_s) / self._model.idle_s)
        self._now_s += max(steps, 0) * self._model.idle_s

    # -- a step -----------------------------------------------------------------------------

    def _step(self) -> None:
        """Schedule a step, advance the clock by its duration, and apply the results."""
        self._ended = []
        self._take_results()
        batch = self._continue_running()
        started = self._start_waiting(batch)
        self._manager.end_step(started=started, now=self._now_s)
        self._run_jobs()
        self._manager.take_cancels()
        stored = self._store_computed(batch)
        seconds = self._model.seconds(sum(batch.values()))
        self._now_s += seconds
        self._manager.record_prefill(prompt_tokens(batch.values()), seconds)
        self._complete_stores()
        self._stored = stored
        self._begin_loads()
        self._end_loads()
        self._computed(batch)

    def _continue_running(self) -> dict[_Served, int]:
        """Schedule running requests in order; return each request's number of tokens."""
        batch: dict[_Served, int] = {}
        left = self._model.step_tokens
        for served in self._running:
            tokens = min(served.left, left)
            if tokens:
                batch[served] = tokens
                left -= tokens
        return batch

    def _start_waiting(self, batch: dict[_Served, int]) -> list[str]:
        """Start requests that are loaded or waiting; return the ids of these requests."""
        left = self._model.step_tokens - sum(batch.values())
        taken = len(self._running) + len(self._loading) + len(self._ready)
        put_off: list[_Served] = []
        started: list[str] = []

        def start(served: _Served) -> int:
            self._running.append(served)
            started.append(served.request.req_id)
            batch[served] = min(served.left, left)
            return batch[served]

        while self._ready and left:
            left -= start(heapq.heappop(self._ready)[1])
        while self._waiting and left and taken < self._model.concurrency:
            served = self._waiting.popleft()
            taken += 1
            if not self._begin_load(served):
                put_off.append(served)
            elif not served.request.hits:  # Otherwise the request is being loaded.
                left -= start(served)
        self._waiting.extendleft(reversed(put_off))
        return started

    def _begin_load(self, served: _Served) -> bool:
        """Look up a request and plan its load; return False if the request must wait."""
        if not self._look_up(served.request):
            return False
        if served.request.hits:
            self._planned.append((served, self._plan_load(served.request)))
        return True

    def _store_computed(self, batch: dict[_Served, int]) -> list[Sequence[ChunkKey]]:
        """Offer newly computed whole chunks to the manager; return the accepted chunks."""
        accepted, self._final = self._final, []
        for served, tokens in batch.items():
            request, computed = served.request, served.computed + tokens
            whole = computed // self._chunk_tokens
            end = len(request.keys) if computed >= request.tokens else whole
            accepted += self._store(served, end)
        return accepted

    def _store(self, served: _Served, end: int) -> Iterator[Sequence[ChunkKey]]:
        """Offer the manager the chunks before ``end``; yield the accepted chunks.

        If RAM has no free slots, a later call offers the chunks again.
        """
        keys = served.request.keys[served.next_chunk : end]
        if not keys:
            return
        self._take_results()
        accepted = self._offer(served.request, keys)
        if accepted is None:
            return
        served.next_chunk = end
        if accepted:
            yield accepted

    # -- the end of a step --------------------------------------------------------------

    def _complete_stores(self) -> None:
        for keys in self._stored:
            self._complete_store(keys)

    def _begin_loads(self) -> None:
        for served, load in self._planned:
            copied_s = self._transfers.load(served.request.hits, self._now_s)
            over_s = max(copied_s, load.promoted_s)
            heapq.heappush(self._loading, (over_s, next(self._order), served, load))
        self._planned = []

    def _end_loads(self) -> None:
        while self._loading and self._loading[0][0] <= self._now_s:
            _, number, served, load = heapq.heappop(self._loading)
            self._take_results()  # Promotions end before the load that needs them.
            request = served.request
            if self._end_load(load) < request.hits:
                request.hits = 0  # The request is looked up again, and misses.
                self._waiting.appendleft(served)
                continue
            heapq.heappush(self._ready, (number, served))
            served.next_chunk = request.hits
            served.computed = max(request.tokens - self._uncomputed(request), 0)

    def _computed(self, batch: dict[_Served, int]) -> None:
        for served, tokens in batch.items():
            served.computed += tokens
            if served.left:
                continue
            if not served.generated:
                served.request.first_token_s = self._now_s
            served.generated += 1
            if served.generated >= served.request.output_tokens:
                self._running.remove(served)
                self._final += self._store(served, len(served.request.keys))
                self._manager.end_request(served.request.req_id)
                self._ended.append(served)

    def _take_results(self) -> None:
        """Pass the results of ended jobs to the manager."""
        while self._events and self._events[0][0] <= self._now_s:
            self._run_event()
