"""Continuous batching over paged memory.

As in vLLM's scheduler, running requests come first, in order, and get blocks as they grow. If
no block is free, the last running request is preempted and begins again. Then requests with
finished loads start, in the order of planning. Then waiting requests are looked up and get
blocks, while there are tokens in the step and free blocks. Prefill is chunked to the step's
remaining tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.connector.protocols import AllocatedBlocks, Step
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.replay._requests import Phase, ReplayRequest

__all__ = ["Batch", "BatchLimits", "Batcher"]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a batch.

    Attributes:
        blocks: Blocks of the memory, block 0 included.
        block_tokens: Tokens of a block.
        step_tokens: Most tokens of a step.
        requests: Most requests that have blocks or are looked up.
    """

    blocks: int
    block_tokens: int
    step_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class _Block:
    block_id: int
    block_hash: object | None = None
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class _Blocks:
    blocks: Sequence[Sequence[_Block]]


@dataclass(slots=True)
class Batch:
    """The work of one step.

    Attributes:
        num_scheduled_tokens: Tokens to compute, by request.
        started: Requests that enter the batch, for the first time or after a preemption.
        preempted: Requests that lost their blocks in this step.
        allocated: New blocks, by request.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    allocated: set[int] = field(default_factory=set)

    def step(self) -> Step:
        """Return the step as the connector's scheduler side takes it."""
        return Step(
            self.num_scheduled_tokens,
            started=self.started,
            preempted=self.preempted,
            allocated=self.allocated,
        )


class Batcher:
    """Allocates blocks and schedules requests.

    Args:
        connector: The connector's scheduler side.
        limits: Bounds of a batch.

    Attributes:
        requests: The unfinished requests, by id.
        preemptions: Preemptions so far.
    """

    def __init__(self, connector: ConnectorScheduler, limits: BatchLimits) -> None:
        self._connector = connector
        self._limits = limits
        self._free = deque(range(1, limits.blocks))
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
        self._allocated: set[int] = set()
        self._holding: dict[ReplayRequest, None] = {}
        self.requests: dict[str, ReplayRequest] = {}
        self.preemptions = 0

    @property
    def longest_prompt_tokens(self) -> int:
        """Length of the longest prompt that fits the memory with one generated token."""
        return (self._limits.blocks - 2) * self._limits.block_tokens

    def add(self, request: ReplayRequest) -> None:
        """Add a request that arrived."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self._connector.on_new_request(request)

    def schedule(self) -> Batch:
        """Schedule the next step."""
        batch = Batch()
        left = self._continue_running(batch, self._limits.step_tokens)
        if not batch.preempted:
            self._start_waiting(batch, self._start_ready(batch, left))
        batch.allocated, self._allocated = self._allocated, set()
        return batch

    def get_blocks(self, request_id: str) -> AllocatedBlocks:
        """Return the blocks of a request."""
        request = self.requests.get(request_id)
        blocks = request.blocks if request is not None else ()
        return _Blocks(([_Block(block) for block in blocks],))

    def computed(self, batch: Batch, now_s: float) -> None:
        """Record that a step was computed, as of ``now_s``."""
        for req_id, tokens in batch.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.generated += 1
            if request.first_token_s < 0:
                request.first_token_s = now_s
            if request.generated >= request.output_tokens:
                self._finish(request)

    def loaded(self, req_ids: Iterable[str], failed: Iterable[str]) -> None:
        """Record the requests with finished loads and the requests with incomplete loads."""
        lost = set(failed)
        for req_id in req_ids:
            request = self.requests[req_id]
            if req_id in lost:
                del self._holding[request]
                request.loaded_tokens = 0
                self._give_back(request)
                self._waiting.appendleft(request)
                continue
            request.phase = Phase.READY
            # The last token is always computed, for its logits.
            request.num_computed_tokens = min(request.loaded_tokens, request.num_tokens - 1)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.requests

    # -- internals -----------------------------------------------------------------------------

    def _continue_running(self, batch: Batch, left: int) -> int:
        """Schedule the running requests; return the step's remaining tokens."""
        for request in list(self._running):
            if request.phase is not Phase.RUNNING:
                continue  # An earlier request in this loop preempted this request.
            tokens = min(request.num_tokens - request.num_computed_tokens, left)
            if tokens <= 0:
                continue
            new = self._grow(request, tokens, batch)
            if new is None:
                continue
            batch.num_scheduled_tokens[request.request_id] = tokens
            left -= tokens
        return left

    def _grow(self, request: ReplayRequest, tokens: int, batch: Batch) -> list[int] | None:
        """Allocate blocks for ``tokens`` more tokens, preempting the last running requests."""
        missing = self._missing(request, request.num_computed_tokens + tokens)
        while missing > len(self._free):
            victim = self._running[-1]
            self._preempt(victim, batch)
            if victim is request:
                return None
        return self._take(request, missing)

    def _start_ready(self, batch: Batch, left: int) -> int:
        """Start the requests with finished loads; return the step's remaining tokens."""
        for request in [each for each in self._holding if each.phase is Phase.READY]:
            if left <= 0:
                break
            del self._holding[request]
            left -= self._start(request, batch, left)
        return left

    def _start_waiting(self, batch: Batch, left: int) -> None:
        """Look up, load or start waiting requests, first come first served."""
        put_off: list[ReplayRequest] = []
        while self._waiting and left > 0:
            taken = len(self._running) + len(self._holding) + len(put_off)
            if taken >= self._limits.requests:
                break
            request = self._waiting.popleft()
            tokens, _ = self._connector.get_num_new_matched_tokens(request, 0)
            if tokens is None:
                put_off.append(request)
                continue
            if self._missing(request, request.num_tokens) > len(self._free):
                self._waiting.appendleft(request)
                break
            if tokens:
                self._load(request, tokens)
                continue
            left -= self._start(request, batch, left)
        self._waiting.extendleft(reversed(put_off))

    def _load(self, request: ReplayRequest, tokens: int) -> None:
        self._take(request, self._missing(request, request.num_tokens))
        request.phase = Phase.LOADING
        request.loaded_tokens = tokens
        self._holding[request] = None
        blocks = self.get_blocks(request.request_id)
        self._connector.update_state_after_alloc(request, blocks, tokens)

    def _start(self, request: ReplayRequest, batch: Batch, left: int) -> int:
        """Add a request to the batch; return the number of its scheduled tokens."""
        self._take(request, self._missing(request, request.num_tokens))
        tokens = min(request.num_tokens - request.num_computed_tokens, left)
        request.phase = Phase.RUNNING
        self._running.append(request)
        batch.num_scheduled_tokens[request.request_id] = tokens
        batch.started.append(request.request_id)
        return tokens

    def _preempt(self, request: ReplayRequest, batch: Batch) -> None:
        self.preemptions += 1
        self._running.remove(request)
        self._give_back(request)
        self._waiting.appendleft(request)
        batch.preempted.append(request.request_id)

    def _finish(self, request: ReplayRequest) -> None:
        request.phase = Phase.OVER
        self._running.remove(request)
        self._connector.request_finished(request)
        self._free.extend(request.blocks)
        del self.requests[request.request_id]

    def _give_back(self, request: ReplayRequest) -> None:
        request.phase = Phase.WAITING
        request.num_computed_tokens = 0
        self._free.extend(request.blocks)
        request.blocks.clear()

    def _missing(self, request: ReplayRequest, tokens: int) -> int:
        """Return the number of blocks missing for ``tokens`` tokens."""
        return max(-(-tokens // self._limits.block_tokens) - len(request.blocks), 0)

    def _take(self, request: ReplayRequest, count: int) -> list[int]:
        new = [self._free.popleft() for _ in range(count)]
        request.blocks.extend(new)
        self._allocated.update(new)
        return new
