"""A simulated engine that batches requests and computes in steps, in simulated time.

The number of tokens in a step decides its duration. Requests are looked up when a step is
scheduled, while the step has tokens left. A load begins after the step that planned the load.
The engine uses a finished load at the end of a later step. Prefill is chunked: a prompt's first
token comes with the last piece.

:class:`~kvtier.sim._model_engine.ModelEngine` has no steps. It is twice as fast, needs no
engine settings, and is for comparing policies. :class:`StepEngine` predicts times from known
step times; ``kvtier replay`` compares the prediction with real transfers.

Not modelled: the GPU's own prefix cache, its memory (so no preemptions), and the time of a
store to RAM, which ends within a step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.manager import LoadPlan, prompt_tokens
from kvtier.manager.hits import Prompt
from kvtier.policies.base import session_terms
from kvtier.sim._model_engine import Engine, ModelRequest
from kvtier.sim.time_model import TimeModel
from kvtier.types import Job, Purpose, TransferResult

__all__ = ["StepEngine", "StepModel"]


@dataclass(frozen=True, slots=True)
class StepModel(TimeModel):
    """Speeds of an engine that batches, and of its tiers.

    Attributes:
        step_tokens: Most tokens of a step; a generating request takes one token.
        step_s: Least time of a step that computes: the time to read weights and launch kernels.
        idle_s: Time of a step that computes nothing while requests wait.
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
        request: The request.
        computed: Tokens with KV in the engine.
        generated: Tokens generated.
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


@dataclass(frozen=True, slots=True)
class _PlannedLoad:
    served: _Served
    plan: LoadPlan
    chunks: int
    promoted_s: float
    """Time at which all chunks of the load are in RAM."""


class StepEngine(Engine[StepModel]):
    """Computes all running requests together, step by step."""

    @override
    def _begin(self) -> None:
        self._results: list[tuple[float, int, Job, TransferResult]] = []
        self._waiting: deque[_Served] = deque()
        self._running: list[_Served] = []
        self._planned: list[_PlannedLoad] = []
        self._loading: list[tuple[float, int, _PlannedLoad]] = []
        self._ready: list[tuple[int, _Served]] = []
        self._stored: list[Sequence[ChunkKey]] = []
        self._final: list[Sequence[ChunkKey]] = []
        self._ended: list[_Served] = []

    @override
    def serve(self, requests: Iterable[ModelRequest]) -> Iterator[ModelRequest]:
        coming = deque(requests)
        while coming or self._is_busy or self._results or self._manager.has_work():
            if not self._is_busy and (coming or self._results):
                self._skip_idle_steps(coming)
            while coming and coming[0].arrival_s <= self._now_s:
                request = coming.popleft()
                self._manager.begin_request(request.req_id, session_terms(request.session))
                self._waiting.append(_Served(request))
            self._step()
            yield from (served.request for served in self._ended)

    @property
    def _is_busy(self) -> bool:
        """Whether there is work for another step."""
        return bool(
            self._waiting
            or self._running
            or self._loading
            or self._ready
            or self._stored
            or self._final
        )

    def _skip_idle_steps(self, coming: Sequence[ModelRequest]) -> None:
        """Advance the clock by whole idle steps, to the next arrival or result."""
        times = [self._results[0][0]] if self._results else []
        if coming:
            times.append(coming[0].arrival_s)
        steps = math.ceil((min(times) - self._now_s) / self._model.idle_s)
        self._now_s += max(steps, 0) * self._model.idle_s

    # -- a step -----------------------------------------------------------------------------

    def _step(self) -> None:
        """Schedule a step, advance the clock by its time, and apply the results."""
        self._ended = []
        self._take_results()
        batch = self._continue_running()
        started = self._start_waiting(batch)
        self._manager.end_step(started=started, now=self._now_s)
        self._send_jobs()
        self._manager.take_cancels()
        stored = self._offer(batch)
        seconds = self._model.seconds(sum(batch.values()))
        self._now_s += seconds
        self._manager.record_prefill(prompt_tokens(batch.values()), seconds)
        self._complete_stores()
        self._stored = stored
        self._begin_loads()
        self._end_loads()
        self._computed(batch)

    def _continue_running(self) -> dict[_Served, int]:
        """Schedule running requests, first come first served; return the tokens of each."""
        batch: dict[_Served, int] = {}
        left = self._model.step_tokens
        for served in self._running:
            tokens = min(served.left, left)
            if tokens:
                batch[served] = tokens
                left -= tokens
        return batch

    def _start_waiting(self, batch: dict[_Served, int]) -> list[str]:
        """Start loaded and waiting requests; return the ids of all requests that started."""
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
            if not self._look(served):
                put_off.append(served)
            elif not served.request.hits:  # Otherwise the request is being loaded.
                left -= start(served)
        self._waiting.extendleft(reversed(put_off))
        return started

    def _look(self, served: _Served) -> bool:
        """Look up a request and plan its load; return False if the request must wait."""
        request = served.request
        prompt = Prompt((request.keys,), 0, len(request.keys))
        hits = self._manager.lookup(request.req_id, prompt)
        if hits is None:
            return False
        request.hits = hits
        if hits:
            plan = self._manager.prepare_load(request.keys[:hits], request.req_id)
            promoted_s = self._send_jobs() if plan.wait_s else self._now_s
            self._planned.append(_PlannedLoad(served, plan, hits, promoted_s))
        return True

    def _offer(self, batch: dict[_Served, int]) -> list[Sequence[ChunkKey]]:
        """Ask the manager to store the chunks that are now complete; return accepted chunks."""
        accepted, self._final = self._final, []
        for served, tokens in batch.items():
            request, computed = served.request, served.computed + tokens
            whole = computed // self._chunk_tokens
            end = len(request.keys) if computed >= request.tokens else whole
            accepted += self._store(served, end)
        return accepted

    def _store(self, served: _Served, end: int) -> Iterator[Sequence[ChunkKey]]:
        """Ask the manager to store the chunks before ``end``; yield the accepted chunks.

        If RAM has no free slots, a later call asks again.
        """
        keys = served.request.keys[served.next_chunk : end]
        if not keys:
            return
        self._take_results()
        plan = self._manager.prepare_store(keys, served.request.req_id)
        if plan is None:
            return
        served.next_chunk = end
        if plan.keys:
            yield plan.keys

    # -- the end of a step --------------------------------------------------------------

    def _complete_stores(self) -> None:
        for keys in self._stored:
            self._manager.complete_store(keys)
            self._retain(keys)

    def _begin_loads(self) -> None:
        for load in self._planned:
            copied_s = self._transfers.load(load.chunks, self._now_s)
            over_s = max(copied_s, load.promoted_s)
            heapq.heappush(self._loading, (over_s, next(self._order), load))
        self._planned = []

    def _end_loads(self) -> None:
        while self._loading and self._loading[0][0] <= self._now_s:
            _, number, load = heapq.heappop(self._loading)
            self._take_results()  # Promotions end before the load that needs them.
            request = load.served.request
            self._retain(request.keys[: load.chunks])
            lead = (
                self._slot_status.count_loaded(load.plan) if load.plan.wait_s else load.chunks
            )
            self._manager.complete_load(request.req_id)
            if lead < load.chunks:
                request.hits = 0  # The request is looked up again, and misses.
                self._waiting.appendleft(load.served)
                continue
            heapq.heappush(self._ready, (number, load.served))
            load.served.next_chunk = load.chunks
            # An engine computes at least the last token, whose logits it needs.
            tokens = min(load.chunks * self._chunk_tokens, request.tokens - 1)
            load.served.computed = max(tokens, 0)

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

    # -- jobs -------------------------------------------------------------------------------

    def _send_jobs(self) -> float:
        """Run all planned jobs; return the time at which every job has its first result."""
        known_s = self._now_s
        for job in self._manager.take_jobs():
            results = self._transfers.run(job, self._now_s)
            for time_s, result in results:
                heapq.heappush(self._results, (time_s, next(self._order), job, result))
            known_s = max(known_s, results[0][0])
        return known_s

    def _take_results(self) -> None:
        """Pass the results of ended jobs to the manager."""
        while self._results and self._results[0][0] <= self._now_s:
            _, _, job, result = heapq.heappop(self._results)
            self._manager.apply(result)
            if job.purpose is Purpose.PROMOTE:
                self._slot_status.record(job, result)
