"""An engine's scheduler without a model, which reuses blocks as vLLM's does.

KV cache groups share one pool of blocks. Windows leave blocks behind, requests are preempted
when the pool is empty, ended requests free their blocks at once, and all of these are given
away in the next step. Under async scheduling (``lag`` 1) a step is planned before the output of
the one before it is known: the sampled token is missing, and a request that ended computes one
token too many.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.connector.groups import GroupLayout, SchedulerOptions, build_layouts, ceil_div
from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.protocols import BoundaryState, Step
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.manager import Reach

Learn = Callable[[Sequence[int], Sequence[bytes], int], None]
"""Takes tokens, the hashes of their blocks, and the tokens of a hash."""


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """For its turn; without blocks, or with those of the last part of a streamed prompt."""
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    PAUSED = "paused"
    """For the next part of its streamed prompt."""
    OVER = "over"


@dataclass(eq=False, slots=True)
class Block:
    """One block of the pool; names what it caches, and how many requests have it."""

    block_id: int
    is_null: bool = False
    block_hash: tuple[bytes, int] | None = None
    users: int = 0


NULL = Block(0, is_null=True)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A request's blocks, per group."""

    blocks: Sequence[Sequence[Block]]


@dataclass(eq=False)
class PagedRequest:
    """A request.

    Attributes:
        tokens: Those that the scheduler knows.
        parts: What follows of its streamed prompt.
        sampled: Tokens that were computed and not reported yet.
        in_flight: Steps that sample a token for it and were not reported yet.
        learn: Called with every new hash.
        attempt: Counts what made earlier steps' tokens void.
        load: Groups' blocks that are being loaded, and where they stand; empty for none.
        loaded_ranks: Ranks that ended the load.
        load_failed: Whether a rank could not load all of it.
    """

    request_id: str
    tokens: list[int]
    output_tokens: int
    hash_tokens: int
    groups: int
    learn: Learn
    parts: list[list[int]] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    phase: Phase = Phase.WAITING
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    tables: list[list[Block]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    in_flight: int = 0
    attempt: int = 0
    load: list[tuple[int, int, Block]] = field(default_factory=list)
    loaded_ranks: int = 0
    load_failed: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.tables = [[] for _ in range(self.groups)]
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        """What the worker knows."""
        return self.tokens + self.sampled

    def is_finished(self) -> bool:
        return self.phase is Phase.OVER

    def hash_blocks(self) -> None:
        """Add the hashes of blocks that became whole."""
        size = self.hash_tokens
        for end in range((len(self.block_hashes) + 1) * size, len(self.tokens) + 1, size):
            before = self.block_hashes[-1] if self.block_hashes else b""
            text = before + repr(self.tokens[end - size : end]).encode()
            self.block_hashes.append(hashlib.blake2b(text, digest_size=16).digest())
        self.learn(self.tokens, self.block_hashes, size)

    def continue_prompt(self) -> None:
        """Take the next part, as vLLM does: a token that was not computed is discarded."""
        kept = min(self.num_computed_tokens, len(self.tokens))
        del self.tokens[kept:]
        del self.block_hashes[kept // self.hash_tokens :]
        self.tokens += self.parts.pop(0)
        self.num_prompt_tokens = len(self.tokens)
        self.hash_blocks()
        self.phase = Phase.WAITING


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes of a request, and where."""

    request: PagedRequest
    attempt: int
    start: int
    end: int
    samples: bool
    tables: Sequence[Sequence[Block]]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How the engine is set up.

    Attributes:
        blocks: Of the pool, number 0 included.
        step_tokens: Most tokens of a step.
        requests: Most requests that run or are looked up.
        writes_first: Whether the worker clears new blocks before it flushes stores.
        fails_requests: Whether a request whose load failed ends with an error.
    """

    blocks: int
    step_tokens: int
    requests: int
    writes_first: bool = False
    fails_requests: bool = False


class PagedEngine:
    """Gives requests blocks and turns.

    Args:
        connector: Says what need not be computed.
        options: The KV cache groups, and whether requests share blocks.
        limits: Bounds.

    Attributes:
        requests: Those that did not end, and ended ones whose load has not.
        preemptions: Requests that lost their blocks so far.
        scheduled: Tokens that the current step computes, per request.
    """

    def __init__(
        self, connector: ConnectorScheduler, options: SchedulerOptions, limits: EngineLimits
    ) -> None:
        self._connector = connector
        self._layouts: Sequence[GroupLayout] = build_layouts(options)
        self._limits = limits
        self._shares = options.shares_blocks
        self._names_blocks = [each.reach for each in options.groups] == [Reach.PREFIX]
        self._alignment = math.lcm(*(each.tokens_per_block for each in options.groups))
        self._free = deque(Block(number) for number in range(1, limits.blocks))
        self._cached: dict[tuple[bytes, int], Block] = {}
        self._waiting: deque[PagedRequest] = deque()
        self._running: list[PagedRequest] = []
        self._allocated: set[int] = set()
        self._preempted: list[str] = []
        self._started: list[str] = []
        self.requests: dict[str, PagedRequest] = {}
        self.preemptions = 0
        self.scheduled: dict[str, int] = {}

    # -- what happens to requests --------------------------------------------------------------

    def add(self, request: PagedRequest) -> None:
        """Take a request that arrived."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self._connector.on_new_request(request)

    def abort(self, request: PagedRequest) -> None:
        """End a request, whatever it is doing."""
        self._finish(request)

    def preempt_all(self) -> None:
        """Take the blocks of all running requests away, and forget what blocks cache."""
        while self._running:
            self._preempt(self._running[-1])
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()

    @property
    def has_kv(self) -> bool:
        """Whether any request has KV, or blocks that are being loaded."""
        return any(each.load or each.num_computed_tokens for each in self.requests.values())

    def get_blocks(self, request_id: str) -> Blocks:
        """Return the blocks that a request has now."""
        request = self.requests.get(request_id)
        return Blocks(request.tables if request else [[] for _ in self._layouts])

    # -- steps ---------------------------------------------------------------------------------

    def schedule(self) -> tuple[Step, list[Work]]:
        """Decide what the next step computes."""
        self.scheduled = {}
        work: list[Work] = []
        left = self._limits.step_tokens
        preemptions = self.preemptions
        for request in list(self._running):
            if request.phase is Phase.RUNNING:
                left -= self._continue(request, left, work)
        if self.preemptions == preemptions:
            self._start_waiting(left, work)
        allocated, self._allocated = self._allocated, set()
        step = Step(
            self.scheduled,
            started=self._started,
            preempted=self._preempted,
            allocated=allocated,
            overwritten=allocated if self._limits.writes_first else frozenset(),
            states=self._states(work),
        )
        self._started, self._preempted = [], []
        return step, work

    def scheduled_all(self, work: Sequence[Work]) -> None:
        """Note that the step is on its way to the workers."""
        for each in work:
            each.request.num_computed_tokens = each.end
            each.request.in_flight += each.samples

    def reported(
        self, work: Sequence[Work], output: WorkerOutput, loaded: Iterable[set[str]]
    ) -> None:
        """Take into account what a step brought, in vLLM's order."""
        failed = self._note_failures(output)
        self._note_samples(work)
        if self._limits.fails_requests:
            for request in failed:
                if not request.is_finished():
                    self._finish(request)
        self._connector.update_connector_output(output)
        for rank in loaded:
            for req_id in rank:
                self.requests[req_id].loaded_ranks += 1

    def loads_ended(self, ranks: int) -> Iterator[tuple[PagedRequest, bool]]:
        """Yield requests whose load ended in all ranks, and whether they need it still."""
        for request in list(self.requests.values()):
            if not request.load or request.loaded_ranks < ranks:
                continue
            request.loaded_ranks = 0
            yield request, not request.is_finished()
            request.load = []
            if request.is_finished():
                del self.requests[request.request_id]
                self._free_blocks(request)
            else:
                request.phase = Phase.LOADED

    # -- internals -----------------------------------------------------------------------------

    def _continue(self, request: PagedRequest, left: int, work: list[Work]) -> int:
        known = request.num_tokens + request.in_flight
        tokens = self._cut(request, min(known - request.num_computed_tokens, left))
        if tokens <= 0:
            return 0
        end = request.num_computed_tokens + tokens
        self._leave_behind(request)
        while self._missing(request, end) > len(self._free):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        self._compute(request, end, work)
        return tokens

    def _start_waiting(self, left: int, work: list[Work]) -> None:
        put_off: list[PagedRequest] = []
        while self._waiting and left > 0:
            if len(self._running) + len(put_off) >= self._limits.requests:
                break
            request = self._waiting.popleft()
            is_ready = self._prepare(request)
            if is_ready is None:
                put_off.append(request)
            elif is_ready and self._start(request, left, work):
                left -= self.scheduled[request.request_id]
            else:
                self._waiting.appendleft(request)
                break
        self._waiting.extendleft(reversed(put_off))

    def _prepare(self, request: PagedRequest) -> bool | None:
        """Return whether a request has the blocks it starts with; None to ask again."""
        if request.phase is Phase.LOADED:
            self._take_load(request)
        if request.phase is Phase.WAITING and not request.num_computed_tokens:
            has_room = self._look_up(request)
            if not has_room:
                return has_room
        return None if request.phase is Phase.LOADING else True

    def _start(self, request: PagedRequest, left: int, work: list[Work]) -> bool:
        """Start a request, and return whether there was room."""
        wanted = min(request.num_tokens - request.num_computed_tokens, left)
        end = request.num_computed_tokens + self._cut(request, wanted)
        self._leave_behind(request)
        if self._missing(request, end) > len(self._free):
            return False
        request.phase = Phase.RUNNING
        self._running.append(request)
        self._started.append(request.request_id)
        self._compute(request, end, work)
        return True

    def _look_up(self, request: PagedRequest) -> bool | None:
        """Give a request the blocks of what is cached or can be loaded.

        Returns:
            Whether there was room; None to ask again.
        """
        local, found = self._find_local(request)
        external, _ = self._connector.get_num_new_matched_tokens(request, local)
        if external is None:
            return None
        end = local + external
        tables, fresh = self._plan_tables(found, end)
        kept = {block for table in tables for block in table if not block.is_null}
        idle = sum(not block.users for block in kept)
        # As vLLM, which makes sure that there is room for something to compute as well.
        if len(fresh) + idle + len(self._layouts) > len(self._free):
            return False
        for table in tables:
            for block in table:
                self._touch(block)
        request.tables = tables
        for number, at in fresh:
            tables[number][at] = self._take()
        self._connector.update_state_after_alloc(
            request, self.get_blocks(request.request_id), external
        )
        request.num_computed_tokens = end
        if external:
            request.phase = Phase.LOADING
            request.load = [(number, at, tables[number][at]) for number, at in fresh]
        return True

    def _plan_tables(
        self, found: Sequence[Sequence[Block]], end: int
    ) -> tuple[list[list[Block]], list[tuple[int, int]]]:
        """Return block tables for ``end`` tokens, and the places in them to be loaded."""
        tables: list[list[Block]] = []
        fresh: list[tuple[int, int]] = []
        for number, (layout, cached) in enumerate(zip(self._layouts, found, strict=True)):
            blocks = ceil_div(end, layout.group.tokens_per_block)
            first = self._first_needed(layout, end)
            table = [block if at >= first else NULL for at, block in enumerate(cached)]
            fresh += [(number, at) for at in range(max(len(table), first), blocks)]
            tables.append(table + [NULL] * (blocks - len(table)))
        return tables, fresh

    def _take_load(self, request: PagedRequest) -> None:
        """Let a request whose load ended go on with what arrived."""
        request.phase = Phase.WAITING
        if request.load_failed:
            request.load_failed = False
            if not request.num_computed_tokens:
                self._free_blocks(request)
                return
            # vLLM keeps the blocks behind the first one that failed: they are computed.
        self._cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def _note_samples(self, work: Sequence[Work]) -> None:
        for each in work:
            request = each.request
            if each.attempt != request.attempt or request.is_finished() or not each.samples:
                continue
            request.in_flight -= 1
            request.tokens.append(request.sampled.pop(0))
            request.hash_blocks()
            if request.num_tokens - request.num_prompt_tokens >= request.output_tokens:
                self._stop(request)

    def _note_failures(self, output: WorkerOutput) -> list[PagedRequest]:
        failed: list[PagedRequest] = []
        for load in output.failed_loads.values():
            request = self.requests[load.request_id]
            if request.phase is not Phase.LOADING:
                continue
            request.load_failed = True
            failed.append(request)
            if self._names_blocks:
                numbers = (
                    at
                    for at, block in enumerate(request.tables[0])
                    if block.block_id in load.block_ids
                )
                at = min(numbers, default=len(request.tables[0]))
                size = self._layouts[0].group.tokens_per_block
                request.num_computed_tokens = min(request.num_computed_tokens, at * size)
            else:
                request.num_computed_tokens = 0
        return failed

    def _compute(self, request: PagedRequest, end: int, work: list[Work]) -> None:
        for number, layout in enumerate(self._layouts):
            table = request.tables[number]
            missing = ceil_div(end, layout.group.tokens_per_block) - len(table)
            table.extend(self._take() for _ in range(missing))
        self._cache_blocks(request, min(end, request.num_tokens))
        start = request.num_computed_tokens
        samples = end == request.num_tokens + request.in_flight
        tables = [list(table) for table in request.tables]
        self.scheduled[request.request_id] = end - start
        work.append(Work(request, request.attempt, start, end, samples, tables))

    def _states(self, work: Sequence[Work]) -> dict[str, list[BoundaryState]]:
        """Return the recurrent states that a step computes at the ends of blocks."""
        states: dict[str, list[BoundaryState]] = {}
        for each in work:
            for number, layout in enumerate(self._layouts):
                size = layout.group.tokens_per_block
                if layout.group.is_handed_over and not each.end % size:
                    block = each.tables[number][each.end // size - 1]
                    state = BoundaryState(layout.index, block.block_id, each.end)
                    states.setdefault(each.request.request_id, []).append(state)
        return states

    def _cut(self, request: PagedRequest, tokens: int) -> int:
        """Return how many of ``tokens`` end no later than a recurrent state's block."""
        for layout in self._layouts:
            size = layout.group.tokens_per_block
            if layout.group.reach is Reach.STATE:
                tokens = min(tokens, size - request.num_computed_tokens % size)
        return tokens

    def _first_needed(self, layout: GroupLayout, end: int) -> int:
        """Return the number of the first block that is read after ``end`` tokens."""
        size = layout.group.tokens_per_block
        if layout.group.reach is Reach.STATE:
            return max(end - 1, 0) // size
        return max(layout.reach.first_token(end), 0) // size

    def _leave_behind(self, request: PagedRequest) -> None:
        """Free the blocks that windows do not need any more."""
        for layout, table in zip(self._layouts, request.tables, strict=True):
            first = self._first_needed(layout, request.num_computed_tokens)
            for at in range(min(first, len(table))):
                block, table[at] = table[at], NULL
                self._release(block)

    def _find_local(self, request: PagedRequest) -> tuple[int, list[list[Block]]]:
        """Return the longest prefix that blocks cache, and these blocks."""
        if self._shares and not request.skip_reading_prefix_cache:
            last = request.num_tokens - 1
            for end in range(last - last % self._alignment, 0, -self._alignment):
                found = [self._cached_until(request, layout, end) for layout in self._layouts]
                tables = [table for table in found if table is not None]
                if len(tables) == len(found):
                    return end, tables
        return 0, [[] for _ in self._layouts]

    def _cached_until(
        self, request: PagedRequest, layout: GroupLayout, end: int
    ) -> list[Block] | None:
        size = layout.group.tokens_per_block
        table = [NULL] * (end // size)
        for at in range(self._first_needed(layout, end), end // size):
            block_hash = request.block_hashes[(at + 1) * size // request.hash_tokens - 1]
            block = self._cached.get((block_hash, layout.index))
            if block is None:
                return None
            table[at] = block
        return table

    def _cache_blocks(self, request: PagedRequest, end: int) -> None:
        if not self._shares:
            return
        for layout, table in zip(self._layouts, request.tables, strict=True):
            size = layout.group.tokens_per_block
            for at, block in enumerate(table[: end // size]):
                if block.is_null or block.block_hash is not None:
                    continue
                block_hash = request.block_hashes[(at + 1) * size // request.hash_tokens - 1]
                if self._cached.setdefault((block_hash, layout.index), block) is block:
                    block.block_hash = (block_hash, layout.index)

    def _missing(self, request: PagedRequest, end: int) -> int:
        return sum(
            max(ceil_div(end, layout.group.tokens_per_block) - len(table), 0)
            for layout, table in zip(self._layouts, request.tables, strict=True)
        )

    def _take(self) -> Block:
        block = self._free.popleft()
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None
        block.users = 1
        self._allocated.add(block.block_id)
        return block

    def _touch(self, block: Block) -> None:
        if block.is_null:
            return
        if not block.users:
            self._free.remove(block)
        block.users += 1

    def _release(self, block: Block) -> None:
        if block.is_null:
            return
        block.users -= 1
        if not block.users:
            # What nobody can hit is given away first, as in vLLM.
            (self._free.append if block.block_hash else self._free.appendleft)(block)

    def _free_blocks(self, request: PagedRequest) -> None:
        for table in request.tables:
            for block in reversed(table):
                self._release(block)
        request.tables = [[] for _ in self._layouts]

    def _preempt(self, request: PagedRequest) -> None:
        self.preemptions += 1
        self._running.remove(request)
        self._free_blocks(request)
        self._void(request)
        request.num_computed_tokens = 0
        request.phase = Phase.WAITING
        self._waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _void(self, request: PagedRequest) -> None:
        """Drop what steps in flight sample for a request."""
        request.attempt += 1
        request.in_flight = 0
        request.sampled.clear()

    def _stop(self, request: PagedRequest) -> None:
        if not request.parts:
            self._finish(request)
            return
        self._running.remove(request)
        self._void(request)
        request.phase = Phase.PAUSED

    def resume(self, request: PagedRequest) -> None:
        """Continue a streamed prompt; no step of the request is in flight."""
        request.continue_prompt()
        self._waiting.append(request)

    def _finish(self, request: PagedRequest) -> None:
        phase, request.phase = request.phase, Phase.OVER
        if phase is Phase.RUNNING:
            self._running.remove(request)
        elif phase is not Phase.PAUSED:
            self._waiting.remove(request)
        self._void(request)
        self._connector.request_finished(request)
        if phase is not Phase.LOADING:
            del self.requests[request.request_id]
            self._free_blocks(request)
