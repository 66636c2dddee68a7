"""Schedules the replay's requests: continuous batching over paged memory.

As in vLLM's scheduler, running requests come first, in order, and get blocks as they grow. If
no block is free, the last running request is preempted and starts again. Next, requests with
finished loads start, in the order in which the loads were planned. Then waiting requests are
looked up and get blocks, while the step has tokens left and blocks are free. A prompt with more
tokens than the step has left is computed in several steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.connector.protocols import AllocatedBlocks, Step
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.replay._requests import ReplayRequest

__all__ = ["Batcher"]


@dataclass(frozen=True, slots=True)
class _PagedBlock:
    block_id: int
    block_hash: object | None = None
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class _PagedBlocks:
    blocks: Sequence[Sequence[_PagedBlock]]


class Batcher:
    """Allocates blocks and schedules requests.

    Args:
        connector: The connector's scheduler side.
        blocks: Number of blocks of the memory, including block 0.
        block_tokens: Number of tokens of a block.
        step_tokens: Largest number of tokens in a step.
        concurrency: Largest number of requests that are running, loading or waiting for a
            deferred lookup.

    Attributes:
        connector: The connector's scheduler side.
        block_tokens: Number of tokens of a block.
        requests: The unfinished requests, by id.
        preemptions: Number of preemptions so far.
    """

    def __init__(
        self,
        connector: ConnectorScheduler,
        *,
        blocks: int,
        block_tokens: int,
        step_tokens: int,
        concurrency: int,
    ) -> None:
        self.connector = connector
        self.block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._concurrency = concurrency
        self._free = deque(range(1, blocks))
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
        self._loading: dict[ReplayRequest, bool] = {}
        """Requests with a planned load, in order. The value is True once the load has ended."""
        self._tokens: dict[str, int] = {}
        self._started: list[str] = []
        self._preempted: list[str] = []
        self._allocated: set[int] = set()
        self.requests: dict[str, ReplayRequest] = {}
        self.preemptions = 0

    def add(self, request: ReplayRequest) -> None:
        """Add a request at its arrival."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.connector.on_new_request(request)

    def schedule(self) -> Step:
        """Schedule the next step."""
        self._tokens, self._started, self._preempted = {}, [], []
        left = self._continue_running(self._step_tokens)
        if not self._preempted:
            self._start_waiting(self._start_loaded(left))
        allocated, self._allocated = self._allocated, set()
        return Step(
            self._tokens,
            started=self._started,
            preempted=self._preempted,
            allocated=allocated,
        )

    def get_blocks(self, request_id: str) -> AllocatedBlocks:
        """Return the blocks of a request."""
        request = self.requests.get(request_id)
        blocks = request.blocks if request is not None else ()
        return _PagedBlocks(([_PagedBlock(block) for block in blocks],))

    def computed(self, step: Step, now_s: float) -> None:
        """Record that ``step`` was computed at time ``now_s``."""
        for req_id, tokens in step.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.generated += 1
            if request.first_token_s < 0:
                request.first_token_s = now_s
            if request.is_finished():
                self._finish(request)

    def loaded(self, req_ids: Iterable[str], failed: Iterable[str]) -> None:
        """Record the end of the loads of ``req_ids``; requests in ``failed`` start again."""
        lost = set(failed)
        for req_id in req_ids:
            request = self.requests[req_id]
            if req_id in lost:
                del self._loading[request]
                request.loaded_tokens = 0
                self._begin_again(request)
                continue
            self._loading[request] = True
            # The last token is always computed, for its logits.
            request.num_computed_tokens = min(request.loaded_tokens, request.num_tokens - 1)

    @property
    def is_idle(self) -> bool:
        """Whether all requests are finished."""
        return not self.requests

    # -- internals -----------------------------------------------------------------------------

    def _continue_running(self, left: int) -> int:
        """Schedule the running requests; return the unused token budget."""
        number = 0
        while number < len(self._running):  # it shrinks from its end by preemptions
            request = self._running[number]
            number += 1
            tokens = min(request.num_tokens - request.num_computed_tokens, left)
            if tokens > 0 and self._grow(request, request.num_computed_tokens + tokens):
                self._tokens[request.request_id] = tokens
                left -= tokens
        return left

    def _grow(self, request: ReplayRequest, tokens: int) -> bool:
        """Allocate blocks for ``tokens`` tokens; preempt the last requests if needed.

        Returns:
            False if the request itself was preempted.
        """
        missing = self._missing(request, tokens)
        while missing > len(self._free):
            victim = self._running.pop()
            self.preemptions += 1
            self._preempted.append(victim.request_id)
            self._begin_again(victim)
            if victim is request:
                return False
        self._take(request, missing)
        return True

    def _start_loaded(self, left: int) -> int:
        """Start the requests with finished loads; return the unused token budget."""
        for request in [each for each, has_ended in self._loading.items() if has_ended]:
            if left <= 0:
                break
            del self._loading[request]
            left -= self._start(request, left)
        return left

    def _start_waiting(self, left: int) -> None:
        """Look up, load or start waiting requests, first come first served."""
        put_off: list[ReplayRequest] = []
        while self._waiting and left > 0:
            taken = len(self._running) + len(self._loading) + len(put_off)
            if taken >= self._concurrency:
                break
            request = self._waiting.popleft()
            tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
            if tokens is None:
                put_off.append(request)
                continue
            if self._missing(request, request.num_tokens) > len(self._free):
                self._waiting.appendleft(request)
                break
            self._take(request, self._missing(request, request.num_tokens))
            if tokens:
                request.loaded_tokens = tokens
                self._loading[request] = False
                blocks = self.get_blocks(request.request_id)
                self.connector.update_state_after_alloc(request, blocks, tokens)
            else:
                left -= self._start(request, left)
        self._waiting.extendleft(reversed(put_off))

    def _start(self, request: ReplayRequest, left: int) -> int:
        """Start a request that has all its blocks; return the number of tokens to compute."""
        tokens = min(request.num_tokens - request.num_computed_tokens, left)
        self._running.append(request)
        self._tokens[request.request_id] = tokens
        self._started.append(request.request_id)
        return tokens

    def _begin_again(self, request: ReplayRequest) -> None:
        """Free the blocks of a request, and put the request first in the waiting queue."""
        request.num_computed_tokens = 0
        self._free.extend(request.blocks)
        request.blocks.clear()
        self._waiting.appendleft(request)

    def _finish(self, request: ReplayRequest) -> None:
        self._running.remove(request)
        self.connector.request_finished(request)
        self._free.extend(request.blocks)
        del self.requests[request.request_id]

    def _missing(self, request: ReplayRequest, tokens: int) -> int:
        """Return the number of blocks that a request lacks for ``tokens`` tokens."""
        return max(-(-tokens // self.block_tokens) - len(request.blocks), 0)

    def _take(self, request: ReplayRequest, count: int) -> None:
        new = [self._free.popleft() for _ in range(count)]
        request.blocks.extend(new)
        self._allocated.update(new)
