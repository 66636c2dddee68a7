"""The replay's engine: steps in real time, with both halves of the connector and no model.

A step has the calls of a real engine in their order. Where the model would compute, blocks are
filled with what they should hold and the rest of the time it would take is slept, so that the
tiers' threads have the machine they would have beside a GPU. Every block that was loaded is
compared, byte for byte, with what was stored under its name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.connector.pace import prompt_tokens
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import KvtierError
from kvtier.memory.paged import PagedMemory
from kvtier.replay._batching import Batch, Batcher
from kvtier.replay._requests import ReplayRequest

__all__ = ["Connector", "ReplayCounts", "ReplayEngine", "WrongBytesError"]

_IDLE_S = 0.001
_STALLED_S = 120.0
_DRAIN_S = 30.0


class WrongBytesError(KvtierError):
    """A load brought other bytes than were stored."""


@dataclass(slots=True)
class ReplayCounts:
    """What the engine did.

    Attributes:
        steps: Scheduling steps.
        computed_tokens: Tokens computed, generated ones included.
        loaded_tokens: Prompt tokens loaded.
        loaded_blocks: Blocks loaded, every one compared with what was stored.
        failed_loads: Loads that did not bring all bytes; their requests were computed.
        late_s: Seconds that steps took longer than the missing model would have.
    """

    steps: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Connector:
    """Both halves of a connector, and what is behind them.

    Attributes:
        cache: The cache, which is told how long steps take.
        scheduler: The scheduler half, which drives it.
        worker: The worker half, with the KV memory registered.
    """

    cache: CacheService
    scheduler: ConnectorScheduler
    worker: ConnectorWorker


class ReplayEngine:
    """Serves requests at their times.

    Args:
        connector: What it asks and tells.
        batcher: Decides what is computed.
        memory: The KV memory.
        block_tokens: Tokens of a block.
        tokens_per_s: Tokens computed per second.

    Attributes:
        counts: What it did so far.
    """

    def __init__(
        self,
        connector: Connector,
        batcher: Batcher,
        memory: PagedMemory,
        *,
        block_tokens: int,
        tokens_per_s: float,
    ) -> None:
        self._cache = connector.cache
        self._scheduler = connector.scheduler
        self._worker = connector.worker
        self._batcher = batcher
        self._memory = memory
        self._block_tokens = block_tokens
        self._tokens_per_s = tokens_per_s
        self._began_s = 0.0
        self._moved_s = 0.0
        self.counts = ReplayCounts()

    def serve(
        self, requests: Iterable[ReplayRequest], *, progress: Callable[[int], None]
    ) -> float:
        """Serve ``requests``, given in order of arrival; return the seconds it took.

        Args:
            requests: The requests; each says in the end when its first token was there.
            progress: Told how many arrived so far.

        Raises:
            WrongBytesError: A load brought other bytes than were stored.
            KvtierError: Nothing has moved for two minutes.
        """
        coming = deque(requests)
        arrived = 0
        self._began_s = self._moved_s = time.monotonic()
        while coming or not self._batcher.is_idle:
            now_s = self._now_s()
            while coming and coming[0].arrival_s <= now_s:
                self._batcher.add(coming.popleft())
                arrived += 1
                progress(arrived)
            if self._step() or (coming and self._batcher.is_idle):
                self._moved_s = time.monotonic()
            elif time.monotonic() - self._moved_s > _STALLED_S:
                raise KvtierError(f"the replay's engine has not moved for {_STALLED_S:.0f} s")
        seconds = self._now_s()
        self._drain()
        return seconds

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _step(self) -> bool:
        """Run one step; return whether it moved a request."""
        began_s = time.monotonic()
        self.counts.steps += 1
        batch = self._batcher.schedule()
        metadata = self._scheduler.build_connector_meta(batch)
        self._cache.computing(prompt_tokens(batch.num_scheduled_tokens.values()))
        self._worker.handle_preemptions(metadata)
        tokens = self._compute(batch)
        seconds = tokens / self._tokens_per_s if tokens else _IDLE_S
        time.sleep(max(began_s + seconds - time.monotonic(), 0.0))
        self._cache.computed()
        self._worker.start_load(metadata)
        self._worker.defer_stores(metadata)
        _, loaded = self._worker.get_finished(batch.finished_req_ids)
        output = self._worker.take_output()
        self._scheduler.update_connector_output(output)
        self._check(loaded - output.failed_requests)
        self.counts.failed_loads += len(output.failed_loads)
        self._batcher.loaded(sorted(loaded), output.failed_requests)
        self._batcher.computed(batch, self._now_s())
        if tokens:
            self.counts.late_s += max(time.monotonic() - began_s - seconds, 0.0)
        return bool(tokens or loaded)

    def _compute(self, batch: Batch) -> int:
        """Fill the blocks that this step computes; return its tokens."""
        blocks: list[int] = []
        seeds: list[int] = []
        for req_id, tokens in batch.num_scheduled_tokens.items():
            request = self._batcher.requests[req_id]
            first = request.num_computed_tokens // self._block_tokens
            last = (request.num_computed_tokens + tokens - 1) // self._block_tokens
            blocks.extend(request.blocks[first : last + 1])
            seeds.extend(request.seed(block) for block in range(first, last + 1))
        if blocks:
            self._memory.fill(blocks, seeds)
        total = sum(batch.num_scheduled_tokens.values())
        self.counts.computed_tokens += total
        return total

    def _check(self, req_ids: Iterable[str]) -> None:
        """Compare what was loaded with what was stored.

        Raises:
            WrongBytesError: They differ.
        """
        for req_id in req_ids:
            request = self._batcher.requests[req_id]
            count = request.loaded_tokens // self._block_tokens
            seeds = [request.seed(block) for block in range(count)]
            if not self._memory.holds(request.blocks[:count], seeds):
                raise WrongBytesError(
                    f"request {req_id}: a load brought other bytes than were stored; this is a "
                    "bug in kvtier"
                )
            self.counts.loaded_blocks += count
            self.counts.loaded_tokens += request.loaded_tokens

    def _drain(self) -> None:
        """Step until stores and demotions have ended, for a bounded time."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._scheduler.has_pending_work() and time.monotonic() < deadline_s:
            self._step()
