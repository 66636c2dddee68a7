"""The replay's engine, which runs steps in real time without a model.

The engine uses both sides of the connector.

A step makes the same calls as a real engine, in the same order. In place of a model, the engine
fills blocks with known bytes and sleeps for the rest of the step. During the sleep, the tiers'
threads can use the processor. Every loaded block is compared byte for byte with the stored
block.

In a real engine, the processor's work overlaps with the GPU's work. Here the work delays the
sleep, and a sleep ends slightly late. So a step counts from the planned end of the previous
step, which shortens the sleep. This compensates for delays of at most 50 ms. A machine with
longer delays is too slow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.protocols import Step
from kvtier.connector.scheduler import NOTHING_TO_DO
from kvtier.connector.service import CacheService
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import KvtierError
from kvtier.memory.paged import PagedMemory
from kvtier.replay._batching import Batcher
from kvtier.replay._requests import ReplayRequest
from kvtier.sim.cache import StepModel

__all__ = ["ReplayCounts", "ReplayEngine", "WrongBytesError"]

_STALLED_S = 120.0
_CATCH_UP_S = 0.05
_DRAIN_S = 30.0


class WrongBytesError(KvtierError):
    """A load returned bytes that differ from the stored bytes."""


@dataclass(slots=True)
class ReplayCounts:
    """Counters of the steps, tokens, blocks and failed loads of a replay.

    Attributes:
        steps: Number of scheduling steps.
        computed_tokens: Number of computed tokens, including generated ones.
        loaded_tokens: Number of loaded prompt tokens.
        loaded_blocks: Number of blocks that were loaded and compared with the stored bytes.
        failed_loads: Number of incomplete loads, after which the engine computed the prompts.
        late_s: Sum of the seconds by which computing steps exceeded the model's time.
    """

    steps: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_s: float = 0.0


class ReplayEngine:
    """Serves requests in real time, at their arrival times.

    Args:
        cache: The cache, which records the durations of steps.
        worker: The connector's worker side, with the KV memory registered.
        batcher: Schedules the steps, and has the connector's scheduler side.
        memory: The KV memory.
        model: Computes the duration of a step.

    Attributes:
        cache: The cache.
        batcher: Schedules the steps.
        counts: The counts so far.
    """

    def __init__(
        self,
        cache: CacheService,
        worker: ConnectorWorker,
        batcher: Batcher,
        memory: PagedMemory,
        model: StepModel,
    ) -> None:
        self.cache = cache
        self.batcher = batcher
        self._scheduler = batcher.connector
        self._worker = worker
        self._memory = memory
        self._model = model
        self._began_s = 0.0
        self._moved_s = 0.0
        self._due_s = 0.0
        self._behind_s = 0.0
        self._unchecked: list[tuple[ReplayRequest, list[int]]] = []
        self.counts = ReplayCounts()

    def serve(
        self, requests: Iterable[ReplayRequest], *, progress: Callable[[int], None]
    ) -> float:
        """Serve ``requests``, given in order of arrival; return the elapsed seconds.

        Args:
            requests: The requests. This method sets ``first_token_s`` of each request.
            progress: Called with the number of arrived requests.

        Raises:
            WrongBytesError: A load returned bytes that differ from the stored bytes.
            KvtierError: No request progressed for two minutes.
        """
        coming = deque(requests)
        arrived = 0
        self._began_s = self._moved_s = self._due_s = time.monotonic()
        while coming or not self.batcher.is_idle:
            now_s = self._now_s()
            while coming and coming[0].arrival_s <= now_s:
                self.batcher.add(coming.popleft())
                arrived += 1
                progress(arrived)
            if self._step() or (coming and self.batcher.is_idle):
                self._moved_s = time.monotonic()
            elif time.monotonic() - self._moved_s > _STALLED_S:
                raise KvtierError(f"the replay made no progress for {_STALLED_S:.0f} s")
        seconds = self._now_s()
        self._drain()
        return seconds

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _step(self) -> bool:
        """Run one step; return whether a request progressed."""
        self._due_s = max(self._due_s, time.monotonic() - _CATCH_UP_S)
        self.counts.steps += 1
        step = self.batcher.schedule()
        if step.only_generates and self._scheduler.pass_step():
            metadata = NOTHING_TO_DO
        else:
            metadata = self._scheduler.build_connector_meta(step)
        self.cache.step_scheduled(step.prompt_tokens)
        self._worker.handle_preemptions(metadata)
        # Compare loaded blocks before they are overwritten.
        self._check()
        tokens = self._compute(step)
        self._due_s += self._model.seconds(tokens)
        time.sleep(max(self._due_s - time.monotonic(), 0.0))
        self.cache.step_ended()
        self._worker.start_load(metadata)
        self._worker.defer_stores(metadata)
        loaded = self._worker.get_finished()
        output = self._worker.take_output() or WorkerOutput()
        self._scheduler.update_connector_output(output)
        self._record_loaded(loaded - output.failed_requests)
        self.counts.failed_loads += len(output.failed_loads)
        self.batcher.loaded(sorted(loaded, key=int), output.failed_requests)
        self.batcher.computed(step, self._now_s())
        behind_s = max(time.monotonic() - self._due_s, 0.0)
        if tokens:
            self.counts.late_s += max(behind_s - self._behind_s, 0.0)
        self._behind_s = behind_s
        return bool(tokens or loaded)

    def _compute(self, step: Step) -> int:
        """Fill the blocks that this step computes; return the number of computed tokens."""
        blocks: list[int] = []
        seeds: list[int] = []
        for req_id, tokens in step.num_scheduled_tokens.items():
            request = self.batcher.requests[req_id]
            first = request.num_computed_tokens // self.batcher.block_tokens
            last = (request.num_computed_tokens + tokens - 1) // self.batcher.block_tokens
            blocks.extend(request.blocks[first : last + 1])
            seeds.extend(request.seed(block) for block in range(first, last + 1))
        if blocks:
            self._memory.fill(blocks, seeds)
        total = sum(step.num_scheduled_tokens.values())
        self.counts.computed_tokens += total
        return total

    def _record_loaded(self, req_ids: Iterable[str]) -> None:
        """Record loaded blocks, for the comparison in the next step."""
        for req_id in req_ids:
            request = self.batcher.requests[req_id]
            count = request.loaded_tokens // self.batcher.block_tokens
            self._unchecked.append((request, request.blocks[:count]))
            self.counts.loaded_blocks += count
            self.counts.loaded_tokens += request.loaded_tokens

    def _check(self) -> None:
        """Check that the loaded blocks have the bytes that were stored.

        Raises:
            WrongBytesError: The bytes differ.
        """
        for request, blocks in self._unchecked:
            seeds = [request.seed(block) for block in range(len(blocks))]
            if not self._memory.holds(blocks, seeds):
                raise WrongBytesError(
                    f"request {request.request_id}: a load returned other bytes than were "
                    "stored; this is a bug in kvtier"
                )
        self._unchecked.clear()

    def _drain(self) -> None:
        """Run steps until stores and demotions have ended, for at most 30 s."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._scheduler.has_pending_work() and time.monotonic() < deadline_s:
            self._step()
