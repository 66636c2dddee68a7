"""The connector's scheduler side: decides which chunks are loaded and stored.

An engine's scheduler asks how much of a waiting request can be loaded, and reports which blocks
the request got. The scheduler then sends the step's jobs to the workers. The workers' results
come back through :meth:`ConnectorScheduler.update_connector_output`. Only the cache knows which
tier has a chunk.

Calls of one step:

1. :meth:`~ConnectorScheduler.get_num_new_matched_tokens` and
   :meth:`~ConnectorScheduler.update_state_after_alloc` for requests that are about to start.
2. :meth:`~ConnectorScheduler.build_connector_meta`.
3. The forward pass.
4. :meth:`~ConnectorScheduler.update_connector_output`; under async scheduling these
   results belong to an earlier step.
5. :meth:`~ConnectorScheduler.request_finished` for requests that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from kvtier.connector.groups import SchedulerOptions, build_layouts, ceil_div
from kvtier.connector.jobs import JobState, WorkerJobs
from kvtier.connector.metadata import (
    BlockSpec,
    ConnectorMetadata,
    SlotSpec,
    TransferJob,
    WorkerOutput,
)
from kvtier.connector.protocols import (
    AllocatedBlocks,
    Block,
    BlockTables,
    BoundaryState,
    EngineRequest,
    Step,
)
from kvtier.connector.requests import OfferQueue, TrackedRequest
from kvtier.connector.service import CacheService
from kvtier.connector.stores import StoreRules, computed_tokens
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.keys import ChunkKey, group_filter
from kvtier.logs import get_logger
from kvtier.manager import LoadPlan, Reach
from kvtier.types import JobId

__all__ = ["NOTHING_TO_DO", "ConnectorScheduler"]

logger = get_logger(__name__)

NOTHING_TO_DO: Final = ConnectorMetadata()
"""The metadata of a step that starts no job."""


class ConnectorScheduler:
    """Decides for one engine which chunks are loaded and stored. Not thread-safe.

    The scheduler's thread makes all calls. No method waits, except :meth:`reset_cache`.

    Args:
        cache: The cache. The caller reads the cache's figures and events, and shuts it down.
        options: The engine's settings.

    Attributes:
        tables: The engine's block tables; set before the first step.

    Raises:
        UnsupportedError: kvtier cannot store the engine's KV cache groups.
    """

    tables: BlockTables

    def __init__(self, cache: CacheService, options: SchedulerOptions) -> None:
        self._cache = cache
        self._options = options
        self._layouts = build_layouts(options)
        self._rules = StoreRules(options, self._layouts)
        # The engine recomputes the last prompt token. A full-prefix hit can be trimmed by one
        # token; a window or state hit cannot.
        reads_all = all(each.group.reach is Reach.PREFIX for each in self._layouts)
        self._recompute_tokens = 0 if reads_all else 1
        self._requests: dict[str, TrackedRequest] = {}
        self._offers = OfferQueue()
        self._jobs = WorkerJobs(options.ranks)
        self._load_jobs: dict[JobId, TransferJob] = {}
        self._store_jobs: dict[JobId, TransferJob] = {}
        self._loading: set[ChunkKey] = set()
        self._is_unannounced_logged = False

    # -- requests that wait --------------------------------------------------------------------

    def on_new_request(
        self,
        request: EngineRequest,
        *,
        name_chunk: Callable[[ChunkKey], ChunkKey] | None = None,
        may_store: Callable[[], bool] | None = None,
    ) -> None:
        """Start to track a request; replace an earlier request with the same id.

        Args:
            request: The request.
            name_chunk: Returns kvtier's key of a chunk; None to use the engine's key.
            may_store: Called before each store; returns whether the keys still describe the
                request's KV. None if they always do.
        """
        former = self._requests.get(request.request_id)
        if former is not None:
            self._forget(former)
        tracked = TrackedRequest(
            request, self._layouts, name_chunk=name_chunk, may_store=may_store
        )
        self._requests[request.request_id] = tracked
        self._cache.begin_request(tracked)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the engine's cached tokens.

        Args:
            request: A request that waits, for the first time or again. A request without a call
                of :meth:`on_new_request` gets a miss.
            num_computed_tokens: Number of the request's tokens in the engine's own cache.

        Returns:
            ``(tokens, is_async)``. ``tokens`` is None if the engine should ask again in the
            next step. ``is_async`` is true if ``tokens > 0``.
        """
        tracked = self._tracked(request)
        if tracked is None:
            return 0, False
        if tracked.jobs:
            return None, False  # its stores still read blocks that the request has lost
        tracked.extend_keys()
        tracked.offer_again()  # it has no blocks
        tracked.local_tokens = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        prompt = tracked.prompt(recompute_tokens=self._recompute_tokens)
        tokens = self._cache.lookup(tracked.req_id, prompt)
        if tokens and self._loading and self._meets_load(tracked, tokens):
            return None, False
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: EngineRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of this step's matched tokens into the request's blocks.

        Args:
            request: The request; it waits until the load is acknowledged.
            blocks: All blocks of the request.
            num_external_tokens: Number of tokens to load; with 0 the call has no effect.

        Raises:
            UnsupportedError: The blocks do not fit the matched tokens, or the request was not
                announced.
        """
        if num_external_tokens == 0:
            return
        tracked = self._tracked(request)
        if tracked is None:
            raise UnsupportedError(
                f"request {request.request_id}: the engine asks for {num_external_tokens} "
                "tokens and has not announced the request with on_new_request"
            )
        keys, targets = _plan_load(tracked, blocks, num_external_tokens)
        plan = self._cache.prepare_load(keys, tracked.req_id)
        tracked.load_sources = self._sources(keys, plan, num_external_tokens)
        job_id = self._jobs.add_load(tracked, keys, plan.load_id)
        slots = SlotSpec(
            tuple(plan.slots), tuple(plan.generations), wait_s=plan.wait_s, gds=plan.gds
        )
        self._load_jobs[job_id] = TransferJob(tracked.req_id, targets, slots)
        if self._options.shares_blocks:
            self._loading.update(keys)
        loaded_tokens = tracked.local_tokens + num_external_tokens
        tracked.offered_tokens = [loaded_tokens] * len(self._layouts)

    def load_sources(self, req_id: str) -> Mapping[int, int]:
        """Return how many tokens each tier provided to a request's last load, by tier index."""
        tracked = self._requests.get(req_id)
        return {} if tracked is None else tracked.load_sources

    # -- steps ---------------------------------------------------------------------------------

    def pass_step(self) -> bool:
        """End a step that only generates; return False instead if the step has work to do.

        In a step that only generates, each scheduled request computes one token, no request
        starts or is preempted, and no block is allocated. If the result is False, call
        :meth:`build_connector_meta`.
        """
        return not (
            self._load_jobs
            or self._store_jobs
            or self._jobs.to_flush
            or not self._cache.is_idle
            or not self._offers.pass_token()
        )

    def build_connector_meta(self, step: Step) -> ConnectorMetadata:
        """End a step in the cache, plan the step's stores and return the workers' jobs.

        Args:
            step: The engine's decisions.
        """
        if step.started or step.preempted:
            self._update_requests(step)
            self._cache.end_step(started=step.started, preempted=step.preempted)
        elif not self._cache.is_idle:
            self._cache.end_step(started=(), preempted=())
        if step.allocated:
            # Before this step's stores are planned, because they must not be flushed yet.
            self._jobs.flush_readers_of(step.allocated)
        self._offer_chunks(step)
        flush = self._jobs.take_flush()
        if not (self._load_jobs or self._store_jobs or flush):
            return NOTHING_TO_DO
        load_jobs, self._load_jobs = self._load_jobs, {}
        store_jobs, self._store_jobs = self._store_jobs, {}
        lost = self._jobs.readers_of(step.overwritten, flush) if step.overwritten else ()
        return ConnectorMetadata(load_jobs, store_jobs, flush, frozenset(lost))

    def update_connector_output(self, output: WorkerOutput) -> None:
        """Process the workers' results; a job ends when all ranks acknowledged it.

        Args:
            output: Results of all ranks, or of some ranks.
        """
        if output.transfers:
            self._cache.record_copies(output.transfers)
        for job_id, failed in output.failed_loads.items():
            self._jobs.fail(job_id, failed)
        for job_id, ranks in output.completed_jobs.items():
            job = self._jobs.acknowledge(job_id, ranks)
            if job is not None:
                self._complete(job)

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping while no request runs."""
        return bool(self._jobs) or self._cache.has_pending_work()

    # -- requests that end ---------------------------------------------------------------------

    def request_finished(self, request: EngineRequest) -> None:
        """Offer the last chunks of an ended request to the cache; then forget the request.

        The engine is about to free the request's blocks. Stores that read these blocks end
        before the blocks are overwritten.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            return
        self._store(tracked, 0)
        self._forget(tracked)

    # -- reset ---------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Make every chunk in every tier a miss; running requests offer their chunks again.

        Stores in flight end before the next forward pass. Acknowledgements of jobs in flight
        are ignored.

        Returns:
            Whether the reset is durable. If not, this engine serves no old chunks, but a
            restart may recover them: reset the cache again.

        Raises:
            KvtierError: This step has planned loads, and :meth:`build_connector_meta` was not
                called yet. After a reset, the requests of these loads would wait forever.
        """
        if self._load_jobs:
            raise KvtierError(
                "cannot reset the cache while planned loads await build_connector_meta"
            )
        self._jobs.abandon()
        self._loading.clear()
        for tracked in self._requests.values():
            tracked.offer_again()
            self._offers.add(tracked)
        return self._cache.reset_cache()

    # -- internals -----------------------------------------------------------------------------

    def _offer_chunks(self, step: Step) -> None:
        """Offer the chunks that the step completes."""
        scheduled_tokens = step.num_scheduled_tokens
        for req_id, states in step.states.items():
            if req_id in self._requests:
                self._store(self._requests[req_id], scheduled_tokens.get(req_id, 0), states)
        for tracked in self._offers.take_due(scheduled_tokens):
            scheduled = scheduled_tokens.get(tracked.req_id, 0)
            tokens = tracked.request.num_computed_tokens + scheduled
            if scheduled and tokens >= tracked.next_offer_tokens:
                self._store(tracked, scheduled)
            if tracked.has_blocks and tracked.next_offer_tokens < inf:
                self._offers.add(tracked, max(tracked.next_offer_tokens - tokens, 1))

    def _tracked(self, request: EngineRequest) -> TrackedRequest | None:
        """Return the state of a request; None if the engine has not announced the request.

        The keys of an unannounced request could lack the digest of the request's LoRA adapter.
        So such a request neither loads nor stores.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if tracked is not None:  # else this step would store the wrong request's blocks
            self._forget(tracked)
        if not self._is_unannounced_logged:
            self._is_unannounced_logged = True
            logger.warning(
                "the engine has not announced request %s, which loads and stores nothing; "
                "later ones are not logged",
                request.request_id,
            )
        return None

    def _forget(self, tracked: TrackedRequest) -> None:
        del self._requests[tracked.req_id]
        self._offers.remove(tracked)
        self._cache.end_request(tracked)

    def _meets_load(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Return whether a load in flight includes a chunk of the next ``tokens`` tokens."""
        local, end = tracked.local_tokens, tracked.local_tokens + tokens
        return any(
            not self._loading.isdisjoint(
                keys[local // layout.tokens_per_chunk : end // layout.tokens_per_chunk]
            )
            for layout, keys in zip(self._layouts, tracked.keys, strict=True)
        )

    def _sources(
        self,
        keys: Sequence[ChunkKey],
        plan: LoadPlan,
        external_tokens: int,
    ) -> dict[int, int]:
        """Return how many tokens each tier provides to a load, by tier index."""
        counted = self._options.counting_group
        layout = next(each for each in self._layouts if each.index == counted)
        is_counted = group_filter(counted)
        origins = [
            tier for key, tier in zip(keys, plan.origins, strict=True) if is_counted(key)
        ]
        sources: dict[int, int] = {}
        left = external_tokens
        for tier in reversed(origins):  # only the first chunk may be partial
            tokens = min(layout.tokens_per_chunk, left)
            sources[tier] = sources.get(tier, 0) + tokens
            left -= tokens
        if left and origins:  # a state stands for all tokens before it
            sources[origins[0]] += left
        return sources

    def _update_requests(self, step: Step) -> None:
        """Record which requests lost their blocks and which requests started."""
        for req_id in step.preempted:
            tracked = self._requests.get(req_id)
            if tracked is not None:
                tracked.has_blocks = False
        for req_id in step.started:
            tracked = self._requests.get(req_id)
            if tracked is None:
                continue
            if tracked.has_blocks and not self._options.continues_from_right_kv:
                tracked.store_limit = 0  # its streamed prompt was continued
            tracked.has_blocks = True
            tracked.next_offer_tokens = 0  # a continued prompt is longer now
            self._offers.add(tracked)

    def _store(
        self, tracked: TrackedRequest, scheduled: int, states: Sequence[BoundaryState] = ()
    ) -> None:
        """Offer a request's new chunks; begin a job for the accepted chunks."""
        tracked.extend_keys()
        tokens = computed_tokens(tracked.request, scheduled)
        table = self.tables.get_blocks(tracked.req_id)
        offer = self._rules.offer(tracked, tokens, table, states)
        if offer.keys and (tracked.may_store is None or tracked.may_store()):
            is_last = tracked.request.is_finished()
            plan = self._cache.prepare_store(offer.keys, tracked.req_id, is_last=is_last)
            if plan is None:
                logger.debug("request %s: no room for its chunks now", tracked.req_id)
                return
            if plan.keys:
                source = offer.source_of(plan.keys)
                job_id = self._jobs.add_store(tracked, plan.keys, source.block_ids)
                slots = SlotSpec(tuple(plan.slots), (plan.generation,) * len(plan.slots))
                self._store_jobs[job_id] = TransferJob(tracked.req_id, source, slots)
        tracked.offered_tokens = offer.ends
        tracked.next_offer_tokens = self._rules.next_offer_tokens(tracked)

    def _complete(self, job: JobState) -> None:
        """Report to the cache that a job ended in all ranks."""
        tracked = job.tracked
        if job.is_store:
            self._cache.complete_store(job.keys, tracked)
            return
        self._loading.difference_update(job.keys)
        failed_reads = job.failure.failed_reads if job.failure else {}
        self._cache.complete_load(job.keys, tracked, job.load_id, failed_reads=failed_reads)
        if job.failure:
            tracked.offer_again()  # the cache has dropped chunks that are now recomputed
            if self._requests.get(tracked.req_id) is tracked:
                self._offers.add(tracked)


def _plan_load(
    tracked: TrackedRequest, allocated: AllocatedBlocks, external_tokens: int
) -> tuple[list[ChunkKey], BlockSpec]:
    """Return the chunks to load for ``external_tokens`` tokens, and the chunks' blocks.

    In each group the load begins at the first new block. Earlier blocks are in the
    engine's own cache, or outside a sliding window.

    Raises:
        UnsupportedError: The engine's blocks do not fit the load.
    """
    end_tokens = tracked.local_tokens + external_tokens
    keys: list[ChunkKey] = []
    block_ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    for layout, group_keys in zip(tracked.layouts, tracked.keys, strict=True):
        tokens_per_block = layout.group.tokens_per_block
        blocks = allocated.blocks[layout.index]
        end = ceil_div(end_tokens, tokens_per_block)
        end_chunk = ceil_div(end_tokens, layout.tokens_per_chunk)
        if len(blocks) < end or len(group_keys) < end_chunk:
            raise UnsupportedError(
                f"request {tracked.req_id}: the engine asks for tokens {tracked.local_tokens} "
                f"to {end_tokens} of group {layout.index} and has {len(blocks)} blocks of "
                f"{tokens_per_block} tokens and {len(group_keys)} chunks for it"
            )
        first = _first_new(blocks, tracked.local_tokens // tokens_per_block, end)
        if first < end:
            keys += group_keys[first // layout.blocks_per_chunk : end_chunk]
            block_ids += [block.block_id for block in blocks[first:end]]
        sizes.append(end - first)
        firsts.append(first)
    return keys, BlockSpec(tuple(block_ids), tuple(sizes), tuple(firsts))


def _first_new(blocks: Sequence[Block], start: int, end: int) -> int:
    """Return the index of the first block without content, else ``end``."""
    for number in range(start, end):
        block = blocks[number]
        if not block.is_null and block.block_hash is None:
            return number
    return end
