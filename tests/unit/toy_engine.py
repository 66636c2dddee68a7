"""As much of an engine as a connector's scheduler side sees; tests acknowledge for workers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.metadata import ConnectorMetadata, FailedLoad, TransferJob, WorkerOutput
from kvtier.connector.protocols import BoundaryState, Step
from kvtier.connector.scheduler import NOTHING_TO_DO, ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.keys import ChunkKey
from kvtier.manager import Reach, StorePlan
from tests.support.stepped import SteppedCache

TOKENS = 16
"""Tokens of a hash, and of a block unless a group says otherwise."""


@dataclass
class ToyRequest:
    """A request whose tokens are numbers."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    num_computed_tokens: int = 0
    over: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(TOKENS, len(self.tokens) + 1, TOKENS)
        return [hashlib.sha256(repr(self.tokens[:end]).encode()).digest() for end in ends]

    def is_finished(self) -> bool:
        return self.over


@dataclass(frozen=True)
class ToyBlock:
    block_id: int
    block_hash: object | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


@dataclass(frozen=True)
class ToyBlocks:
    blocks: Sequence[Sequence[ToyBlock]]


FULL = CacheGroup(TOKENS)


def window(tokens: int, *, per_block: int = TOKENS, index: int = 1) -> CacheGroup:
    """Return a group of sliding windows."""
    return CacheGroup(per_block, index, Reach.WINDOW, tokens)


class CountedCache:
    """A cache that counts what is called.

    Attributes:
        calls: How often each method was called.
        offers: Chunks of each store that was offered.
    """

    def __init__(self, cache: CacheService) -> None:
        self._cache = cache
        self.calls: Counter[str] = Counter()
        self.offers: list[int] = []

    @property
    def is_idle(self) -> bool:
        return self._cache.is_idle

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._cache, name)

    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool
    ) -> StorePlan | None:
        self.calls["prepare_store"] += 1
        self.offers.append(len(keys))
        return self._cache.prepare_store(keys, req_id, is_last=is_last)


class ToyEngine:
    """Calls a scheduler side as an engine does; blocks are numbered as they are given out.

    Args:
        *groups: The KV cache groups.
        slots: Chunks of each tier.
        slowest_steps: Most steps of a copy between tiers.
        **options: Further :class:`SchedulerOptions`.

    Attributes:
        cache: The cache, of which the test ends the copies between tiers.
        counted: The same, as the scheduler side calls it.
        connector: The scheduler side.
        tables: Blocks of each request, per group.
    """

    def __init__(
        self,
        *groups: CacheGroup,
        slots: Sequence[int] = (64,),
        slowest_steps: int = 0,
        **options: Any,
    ) -> None:
        self.groups = groups or (FULL,)
        self.options = SchedulerOptions(groups=self.groups, tokens_per_hash=TOKENS, **options)
        self.cache = SteppedCache(
            *slots,
            slowest_steps=slowest_steps,
            counting_group=self.options.counting_group,
            groups=[layout.reach for layout in build_layouts(self.options)],
        )
        self.counted = CountedCache(self.cache.service)
        self.connector = ConnectorScheduler(cast("CacheService", self.counted), self.options)
        self.connector.tables = self
        self.tables: dict[str, list[list[int]]] = {}
        self._scheduled: dict[str, int] = {}
        self._started: list[str] = []
        self._allocated: set[int] = set()
        self._requests: dict[str, ToyRequest] = {}
        self._running: set[str] = set()
        self._jobs: dict[int, tuple[TransferJob, bool]] = {}
        self._blocks = 0

    def get_blocks(self, request_id: str) -> ToyBlocks:
        """Return the blocks that a request has now."""
        self.counted.calls["get_blocks"] += 1
        tables = self.tables.get(request_id) or [[] for _ in self.groups]
        return ToyBlocks([[ToyBlock(block) for block in table] for table in tables])

    # -- requests ------------------------------------------------------------------------------

    def arrive(self, name: str, prompt: int | Sequence[int], **more: Any) -> ToyRequest:
        """Add a request of these tokens, or of so many sevens."""
        tokens = [7] * prompt if isinstance(prompt, int) else list(prompt)
        request = ToyRequest(name, tokens, len(tokens), **more)
        self.adopt(request)
        return request

    def adopt(self, request: ToyRequest, **terms: Any) -> None:
        """Add a request on these terms."""
        self.add_unannounced(request)
        self.connector.on_new_request(request, **terms)

    def add_unannounced(self, request: ToyRequest) -> None:
        """Add a request without a call of ``on_new_request``."""
        self._requests[request.request_id] = request

    def forget(self, request: ToyRequest) -> None:
        """Schedule the request as a new one next time, as when its prompt is continued."""
        self._running.discard(request.request_id)

    def match(self, request: ToyRequest, local: int = 0) -> int | None:
        """Return how many tokens can be loaded after the ``local`` ones."""
        tokens, later = self.connector.get_num_new_matched_tokens(request, local)
        assert later == bool(tokens)
        return tokens

    def load(self, request: ToyRequest, external: int, local: int = 0) -> None:
        """Give the request blocks for both, and load the ``external`` tokens."""
        end = local + external
        tables = []
        for group in self.groups:
            tokens = group.tokens_per_block
            reads_all = group.reach is Reach.PREFIX
            gone = 0 if reads_all else max(0, end - group.window_tokens + 1) // tokens
            table = [ToyBlock(0)] * gone
            table += [ToyBlock(self.take()) for _ in range(-(-end // tokens) - gone)]
            for at in range(gone, local // tokens):
                table[at] = ToyBlock(table[at].block_id, "computed")
            tables.append(table)
        self.tables[request.request_id] = [[at.block_id for at in table] for table in tables]
        self._note_given(tables)
        self.connector.update_state_after_alloc(request, ToyBlocks(tables), external)
        request.num_computed_tokens = end

    def give_again(self, count: int) -> None:
        """Give the last ``count`` blocks away once more."""
        self._blocks -= count

    def take(self) -> int:
        """Return a block nobody had."""
        self._blocks += 1
        return self._blocks

    def schedule(
        self,
        request: ToyRequest,
        count: int | None = None,
        *,
        blocks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Compute ``count`` tokens of the request, or the rest, in the next step.

        Args:
            request: The request.
            count: How many tokens.
            blocks: The new blocks, per group; by default new ones, as many as it takes.
        """
        name = request.request_id
        count = request.num_tokens - request.num_computed_tokens if count is None else count
        end = request.num_computed_tokens + count
        tables = self.tables.setdefault(name, [[] for _ in self.groups])
        new = blocks or [
            [self.take() for _ in range(-(-end // group.tokens_per_block) - len(table))]
            for group, table in zip(self.groups, tables, strict=True)
        ]
        for table, more in zip(tables, new, strict=True):
            table.extend(more)
        self._allocated.update(block for more in new for block in more)
        self._scheduled[name] = count
        if name not in self._running:
            self._running.add(name)
            self._started.append(name)

    def finish(self, request: ToyRequest) -> None:
        """End the request."""
        request.over = True
        self.connector.request_finished(request)
        self._running.discard(request.request_id)
        self.tables.pop(request.request_id, None)

    def _note_given(self, tables: Sequence[Sequence[ToyBlock]]) -> None:
        self._allocated.update(
            block.block_id for table in tables for block in table if not block.is_null
        )

    # -- steps and workers ---------------------------------------------------------------------

    def step(
        self,
        preempted: Sequence[str] = (),
        overwritten: Collection[int] = (),
        states: Mapping[str, Sequence[BoundaryState]] | None = None,
    ) -> ConnectorMetadata:
        """Build what was put together since the last step, and compute its tokens."""
        for name in preempted:
            if name in self._requests:
                self._requests[name].num_computed_tokens = 0
                self.tables.pop(name, None)
            self._running.discard(name)
        step = Step(
            self._scheduled,
            started=self._started,
            preempted=preempted,
            allocated=self._allocated,
            overwritten=frozenset(overwritten),
            states=states or {},
        )
        self._scheduled, self._started, self._allocated = {}, [], set()
        if step.only_generates and self.connector.pass_step():
            metadata = NOTHING_TO_DO
        else:
            metadata = self.connector.build_connector_meta(step)
        for name, count in step.num_scheduled_tokens.items():
            self._requests[name].num_computed_tokens += count
        self._jobs.update((at, (job, False)) for at, job in metadata.load_jobs.items())
        self._jobs.update((at, (job, True)) for at, job in metadata.store_jobs.items())
        self.cache.tick()
        return metadata

    def acknowledge(self, *job_ids: int, ranks: int = 1, works: bool = True) -> None:
        """Have so many ranks report the end of jobs; without ids, of all jobs."""
        ended = job_ids or tuple(self._jobs)
        failed = {}
        for job_id in ended:
            job, is_store = self._jobs.pop(job_id, (None, False))
            if job is None:
                continue  # The control block has it already.
            slots, generations = job.slots.slots, job.slots.generations
            if not works and not is_store:
                failed[job_id] = FailedLoad(job.request_id, frozenset(job.blocks.block_ids))
                self.cache.slot_status.record_failed_loads(slots, generations)
            self.cache.finish(slots, stored=generations[0] if is_store and works else None)
        self.connector.update_connector_output(
            WorkerOutput(completed_jobs=dict.fromkeys(ended, ranks), failed_loads=failed)
        )

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        list(self.cache.service.take_events())
        return not self.connector.has_pending_work()

    def fill(self, name: str, prompt: int | Sequence[int]) -> None:
        """Serve a request from its arrival to its end, and store what it computes."""
        request = self.arrive(name, prompt)
        self.schedule(request)
        self.step()
        self.acknowledge()
        self.finish(request)
        self.step()
        self.acknowledge()
