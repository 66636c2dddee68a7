"""As much of an engine as a connector's scheduler half sees, with workers played by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.connector.schedule.groups import CacheGroup, SchedulerOptions

from kvtier.connector.metadata import ConnectorMetadata, FailedLoad, TransferJob, WorkerOutput
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.keys import ChunkKey, counting_group
from kvtier.manager import StorePlan
from kvtier.testing.stepped import SteppedCache

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


@dataclass(frozen=True)
class ToyNew:
    req_id: str
    block_ids: Sequence[Sequence[int]]


@dataclass
class ToyCached:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[Sequence[Sequence[int]] | None] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class ToyStep:
    scheduled_new_reqs: list[ToyNew] = field(default_factory=list)
    scheduled_cached_reqs: ToyCached = field(default_factory=ToyCached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


class ToyEngine:
    """Calls a scheduler half as an engine does; blocks are numbered as they are given out.

    Args:
        *groups: Tokens per block and window of each KV cache group.
        slots: Chunks of each tier.
        slowest_steps: Most steps of a copy between tiers.
        **options: Further :class:`SchedulerOptions`.
    """

    def __init__(
        self,
        *groups: tuple[int, int | None],
        slots: Sequence[int] = (64,),
        slowest_steps: int = 0,
        **options: Any,
    ) -> None:
        self.groups = groups or ((TOKENS, None),)
        self.cache = SteppedCache(
            *slots,
            slowest_steps=slowest_steps,
            counting_group=counting_group(
                {number: window is None for number, (_, window) in enumerate(self.groups)}
            ),
        )
        self.options = SchedulerOptions(
            groups=tuple(
                CacheGroup(tokens, window, index)
                for index, (tokens, window) in enumerate(self.groups)
            ),
            tokens_per_hash=TOKENS,
            **options,
        )
        self.half = ConnectorScheduler(self.cache.service, self.options)
        self.tables: dict[str, list[list[int]]] = {}
        self._next = ToyStep()
        self._requests: dict[str, ToyRequest] = {}
        self._known: set[str] = set()
        self._jobs: dict[int, tuple[TransferJob, bool]] = {}
        self._blocks = 0

    # -- requests ------------------------------------------------------------------------------

    def arrive(self, name: str, prompt: int | Sequence[int], **more: Any) -> ToyRequest:
        """Let a request come, of these tokens or of so many sevens."""
        tokens = [7] * prompt if isinstance(prompt, int) else list(prompt)
        request = ToyRequest(name, tokens, len(tokens), **more)
        self._requests[name] = request
        self.half.on_new_request(request)
        return request

    def match(self, request: ToyRequest, local: int = 0) -> int | None:
        """Ask how many tokens can be loaded after the ``local`` ones."""
        tokens, later = self.half.get_num_new_matched_tokens(request, local)
        assert later == bool(tokens)
        return tokens

    def load(self, request: ToyRequest, external: int, local: int = 0) -> None:
        """Give the request blocks for both, and have the half load the ``external`` tokens."""
        end = local + external
        tables = []
        for tokens, window in self.groups:
            gone = 0 if window is None else max(0, end - window + 1) // tokens
            table = [ToyBlock(0)] * gone
            table += [ToyBlock(self.take()) for _ in range(-(-end // tokens) - gone)]
            for at in range(gone, local // tokens):
                table[at] = ToyBlock(table[at].block_id, "computed")
            tables.append(table)
        self.tables[request.request_id] = [[at.block_id for at in table] for table in tables]
        self.half.update_state_after_alloc(request, ToyBlocks(tables), external)
        request.num_computed_tokens = end

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
        resumed: bool = False,
    ) -> None:
        """Compute ``count`` tokens of the request, or the rest, in the next step.

        Args:
            request: The request.
            count: How many tokens.
            blocks: The new blocks, per group; by default new ones, as many as it takes.
            resumed: Whether it had been preempted.
        """
        name = request.request_id
        count = request.num_tokens - request.num_computed_tokens if count is None else count
        end = request.num_computed_tokens + count
        table = self.tables.setdefault(name, [[] for _ in self.groups])
        new = blocks or [
            [self.take() for _ in range(-(-end // tokens) - len(had))]
            for (tokens, _), had in zip(self.groups, table, strict=True)
        ]
        first = name not in self._known
        loaded = first and any(table)
        told = [[*had, *more] for had, more in zip(table, new, strict=True)] if loaded else new
        for had, more in zip(table, new, strict=True):
            had.extend(more)
        self._next.num_scheduled_tokens[name] = count
        if first:
            self._known.add(name)
            self._next.scheduled_new_reqs.append(ToyNew(name, told))
            return
        cached = self._next.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.new_block_ids.append(new if any(new) else None)
        if resumed:
            cached.resumed_req_ids.add(name)

    def forget(self, name: str) -> None:
        """Tell the half of the request as of a new one when it is scheduled next."""
        self._known.discard(name)

    def finish(self, request: ToyRequest) -> None:
        """End the request; the half hears of it at once and with the next step."""
        request.over = True
        table = self.tables.get(request.request_id, [])
        assert self.half.request_finished_all_groups(request, table) == (False, None)
        self._next.finished_req_ids.add(request.request_id)

    # -- steps and workers ---------------------------------------------------------------------

    def step(self, preempted: Sequence[str] = ()) -> ConnectorMetadata:
        """Build what was put together since the last step, and compute its tokens."""
        step, self._next = self._next, ToyStep()
        step.preempted_req_ids = set(preempted) or None
        metadata = self.half.build_connector_meta(step)
        for name, count in step.num_scheduled_tokens.items():
            self._requests[name].num_computed_tokens += count
        for name in preempted:
            if name in self._requests:
                self._requests[name].num_computed_tokens = 0
                del self.tables[name]
        self._jobs.update((at, (job, False)) for at, job in metadata.load_jobs.items())
        self._jobs.update((at, (job, True)) for at, job in metadata.store_jobs.items())
        self.cache.tick()
        return metadata

    def acknowledge(self, *job_ids: int, ranks: int = 1, works: bool = True) -> None:
        """Let so many ranks say that jobs ended; without ids, all jobs."""
        ended = job_ids or tuple(self._jobs)
        failed = {}
        for job_id in ended:
            job, is_store = self._jobs.pop(job_id, (None, False))
            if job is None:
                continue  # The control block has it already.
            slots, generations = job.slots.slots, job.slots.generations
            if not works and not is_store:
                failed[job_id] = FailedLoad(job.request_id, frozenset(job.blocks.block_ids))
                self.cache.truth.refuse(slots, generations)
            self.cache.finish(slots, stored=generations[0] if is_store and works else None)
        self.half.update_connector_output(
            WorkerOutput(completed_jobs=dict.fromkeys(ended, ranks), failed_loads=failed)
        )

    def is_idle(self) -> bool:
        """Whether nothing is left to do but to hear what happened."""
        list(self.half.take_events())
        return not self.half.has_pending_work()

    def fill(self, name: str, prompt: int | Sequence[int]) -> None:
        """Serve a request from its arrival to its end, and store what it computes."""
        request = self.arrive(name, prompt)
        self.schedule(request)
        self.step()
        self.acknowledge()
        self.finish(request)
        self.step()
        self.acknowledge()


class Offers:
    """Counts the chunks of each offer to an engine's cache."""

    def __init__(self, engine: ToyEngine) -> None:
        self.sizes: list[int] = []
        prepare = engine.cache.bench.manager.prepare_store

        def noted(keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
            self.sizes.append(len(keys))
            return prepare(keys, req_id)

        engine.cache.bench.manager.prepare_store = noted  # type: ignore[method-assign]
