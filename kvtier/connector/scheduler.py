"""The connector's scheduler half: decides what is loaded and stored, and for whom.

An engine's scheduler asks it how much of a waiting request can be loaded, tells it which blocks
the request got, and takes along what the workers are to do in the step. The workers' answers
come back through :meth:`ConnectorScheduler.update_connector_output`. Where the bytes are, the
half does not know: it drives a :class:`~kvtier.connector.protocols.Cache`.

Sequence of one step: lookups and allocations of requests that are about to start;
:meth:`~ConnectorScheduler.build_connector_meta`; the forward pass;
:meth:`~ConnectorScheduler.update_connector_output`, which under async scheduling belongs to an
earlier step; :meth:`~ConnectorScheduler.request_finished` for requests that ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from kvtier.connector.metadata import ConnectorMetadata, SlotSpec, TransferJob, WorkerOutput
from kvtier.connector.protocols import AllocatedBlocks, Cache, EngineRequest, StepOutput
from kvtier.connector.report.statistics import EngineStatistics
from kvtier.connector.schedule.blocks import BlockTables
from kvtier.connector.schedule.groups import SchedulerOptions, build_layouts
from kvtier.connector.schedule.jobs import JobState, JobTable
from kvtier.connector.schedule.loads import plan_load
from kvtier.connector.schedule.lookup import Matcher
from kvtier.connector.schedule.stores import computed_tokens, make_offer
from kvtier.connector.schedule.tracking import TrackedRequest
from kvtier.connector.stats import ConnectorStats
from kvtier.errors import KvtierError
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.manager import ResidencyEvent
from kvtier.types import JobId

__all__ = ["ConnectorScheduler"]

logger = get_logger(__name__)


class ConnectorScheduler:
    """Drives a cache for one engine. Not thread-safe; the scheduler's thread calls it.

    No method waits, but for those of the cache that say so.

    A :class:`~kvtier.connector.report.reporter.StatisticsSource`: an exporter reads the half,
    and not its cache, which knows nothing of what workers copied.

    Args:
        cache: The cache; shut down with the half, and its figures are read by nobody else.
        options: How the engine is set up.

    Raises:
        UnsupportedError: The engine's KV cache groups are none kvtier can keep.
    """

    def __init__(self, cache: Cache, options: SchedulerOptions) -> None:
        self._cache = cache
        self._options = options
        self._layouts = build_layouts(options)
        self._matcher = Matcher(
            [layout.window_chunks for layout in self._layouts], cache.lookup
        )
        self._requests: dict[str, TrackedRequest] = {}
        self._tables = BlockTables()
        self._jobs = JobTable(options.ranks)
        self._load_jobs: dict[JobId, TransferJob] = {}
        # A reset leaves them: the cache waits until workers acknowledged what it gave slots to.
        self._store_jobs: dict[JobId, TransferJob] = {}
        self._loading: set[ChunkKey] = set()
        # Each of the two is taken by a reader of its own, and neither takes from the other.
        self._untold = ConnectorStats()
        self._unexported = ConnectorStats()

    # -- requests that wait --------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Start following a request, and no other one that had its id."""
        self._end_former(request)
        tracked = TrackedRequest(request, self._layouts)
        self._requests[request.request_id] = tracked
        self._cache.begin_request(tracked)

    def get_num_new_matched_tokens(
        self,
        request: EngineRequest,
        num_computed_tokens: int,
        max_num_new_tokens: int | None = None,
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those the engine has.

        What is resident where is the same afterwards.

        Args:
            request: A request that waits, for the first time or again.
            num_computed_tokens: Its tokens in the engine's own cache.
            max_num_new_tokens: Most tokens to load, None for any.

        Returns:
            The tokens, None to be asked again at the next step; and whether they are loaded
            while other requests run, which is always so when there are any.
        """
        tracked = self._track(request)
        tracked.forget_blocks()
        if tracked.jobs:
            # Its stores read blocks that are not its own any more: they end first.
            return None, False
        tracked.extend_keys()
        tracked.local_tokens = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._matcher.match(tracked, max_num_new_tokens, self._loading)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: EngineRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of tokens that were matched in this step, into the request's blocks.

        Args:
            request: The request; it waits until the load is acknowledged.
            blocks: All its blocks.
            num_external_tokens: Tokens to load; with 0 nothing is done.

        Raises:
            UnsupportedError: The blocks do not fit what was matched.
        """
        if num_external_tokens == 0:
            return
        tracked = self._track(request)
        for group in tracked.groups:
            table = blocks.blocks[group.layout.index]
            self._tables.allocated.update(
                block.block_id for block in table if not block.is_null
            )
        load = plan_load(tracked, blocks, num_external_tokens)
        plan = self._cache.prepare_load(load.keys, tracked.req_id)
        job_id = self._jobs.add_load(tracked, load.keys)
        slots = SlotSpec(tuple(plan.slots), tuple(plan.generations), wait_s=plan.wait_s)
        self._load_jobs[job_id] = TransferJob(tracked.req_id, load.blocks, slots)
        if self._options.shares_blocks:
            self._loading.update(load.keys)
        if not tracked.keeps_prefix:
            tracked.skip_loaded(num_external_tokens)

    # -- steps ---------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata:
        """Return what the workers are to do in this step.

        Args:
            step: What the engine decided; all requests it names are followed or have ended.
        """
        preempted = step.preempted_req_ids or ()
        self._tables.follow(step, self._requests)
        self._cache.end_step(
            started=[new.req_id for new in step.scheduled_new_reqs], preempted=preempted
        )
        for req_id in preempted:
            tracked = self._requests.get(req_id)
            if tracked is not None:
                self._jobs.flush(tracked.jobs)
        self._jobs.flush_reused(self._tables.allocated)
        ended = [req_id for req_id in step.finished_req_ids if self._is_over(req_id)]
        for req_id in chain(step.num_scheduled_tokens, ended):
            tracked = self._requests.get(req_id)
            if tracked is not None:
                self._store(tracked, step.num_scheduled_tokens.get(req_id, 0))
        for req_id in ended:
            self._end(req_id)
        load_jobs, self._load_jobs = self._load_jobs, {}
        store_jobs, self._store_jobs = self._store_jobs, {}
        self._tables.allocated.clear()
        return ConnectorMetadata(load_jobs, store_jobs, self._jobs.take_flush())

    def update_connector_output(self, output: WorkerOutput) -> None:
        """Take what the workers say into account; a job ends when all ranks say so.

        Args:
            output: Of all ranks together, or of some.
        """
        if output.expected_ranks:
            self._jobs.ranks = output.expected_ranks
        self._note_transfers(ConnectorStats(output.stats))
        for job_id in output.failed_loads:
            self._jobs.fail(job_id)
        for job_id, ranks in output.completed_jobs.items():
            job = self._jobs.acknowledge(job_id, ranks)
            if job is not None:
                self._complete(job)

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""
        return bool(self._jobs) or self._cache.has_pending_work()

    # -- requests that end ---------------------------------------------------------------------

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended and its blocks are about to be freed.

        Its last chunks are offered in the next step. Nothing has to be kept until then: a store
        whose blocks are given away ends before they are written. But a load that is under way
        goes on: blocks that it fills are to be freed when the workers said that it is over.

        Args:
            request: The request.
            block_ids: Its blocks, of an engine with one KV cache group.

        Returns:
            False: no store keeps the blocks from being freed; and None: there is nothing to
            tell its sender.
        """
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: EngineRequest,
        block_ids: Sequence[Sequence[int]],  # noqa: ARG002 - the engine's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do :meth:`request_finished` for an engine with several KV cache groups."""
        tracked = self._track(request)
        tracked.extend_keys()
        self._jobs.release_blocks(tracked.jobs)
        return False, None

    # -- figures, reset and shutdown -----------------------------------------------------------

    def take_events(self) -> Iterable[ResidencyEvent]:
        """Return residency changes, removals before the stores that use their room."""
        return self._cache.take_events()

    def get_stats(self) -> ConnectorStats | None:
        """Return what was copied since the last call, by workers and between tiers.

        Whoever calls :meth:`take_transfers` is told the same once more.
        """
        self._note_transfers(self._cache.take_transfers())
        return None if self._untold.is_empty() else self._untold.clone_and_reset()

    @property
    def is_active(self) -> bool:
        """Whether there is surely another step: a request runs, or work is pending."""
        return bool(self._jobs) or self._cache.is_active

    def statistics(self) -> EngineStatistics:
        """Return all figures of the cache now."""
        return self._cache.statistics()

    def take_load_waits(self) -> Sequence[float]:
        """Return the seconds that requests waited for a load, since the last call."""
        return self._cache.take_load_waits()

    def take_reuse_gaps(self) -> Sequence[Sequence[float]]:
        """Return, per tier, seconds from an eviction to being asked for the chunk again."""
        return self._cache.take_reuse_gaps()

    def take_transfers(self) -> ConnectorStats:
        """Return what was copied since the last call, by workers and between tiers.

        For an exporter; what :meth:`get_stats` returns does not depend on it.
        """
        self._note_transfers(self._cache.take_transfers())
        return self._unexported.clone_and_reset()

    def reset_cache(self) -> bool:
        """Make everything in every tier a miss; running requests offer their chunks again.

        Jobs in flight end before the next forward pass, and what they say is not listened to.

        Returns:
            Whether it is for good. If not, nothing old is served here, but a restart may bring
            back what a tier held: reset it again.

        Raises:
            KvtierError: A step was begun and not built: loads would be lost that requests wait
                for.
        """
        if self._load_jobs:
            raise KvtierError("reset between update_state_after_alloc and build_connector_meta")
        self._jobs.abandon()
        self._loading.clear()
        for tracked in list(self._requests.values()):
            tracked.offer_anew()
            if tracked.request.is_finished():
                self._end(tracked.req_id)
        return self._cache.reset_cache()

    def shutdown(self) -> None:
        """Shut the cache down. Idempotent."""
        self._cache.shutdown()

    # -- internals -----------------------------------------------------------------------------

    def _note_transfers(self, transfers: ConnectorStats) -> None:
        self._untold.aggregate(transfers)
        self._unexported.aggregate(transfers)

    def _track(self, request: EngineRequest) -> TrackedRequest:
        """Return what is remembered of a request, from now on if nothing was."""
        if request.request_id not in self._requests:
            self.on_new_request(request)
        return self._requests[request.request_id]

    def _end_former(self, request: EngineRequest) -> None:
        """End a request whose id is given to ``request`` before the step that tells its end.

        Its last chunks are offered now, while the cache still knows what it wished.
        """
        former = self._requests.get(request.request_id)
        if former is None:
            return
        if former.request.is_finished() and not former.ended:
            self._store(former, 0)
        self._end(former.req_id)
        self._requests.pop(former.req_id, None)

    def _is_over(self, req_id: str) -> bool:
        """Return whether the request that has this id now is the one that ended."""
        tracked = self._requests.get(req_id)
        return tracked is not None and tracked.request.is_finished()

    def _store(self, tracked: TrackedRequest, scheduled: int) -> None:
        """Offer a request's new chunks and begin a job for those the cache wants."""
        over = tracked.request.is_finished()
        store_decode = self._options.store_decode
        tokens = computed_tokens(tracked, scheduled, store_decode=store_decode)
        tracked.extend_keys()
        if not (over or tracked.completes_a_chunk(tokens)):
            return
        offer = make_offer(tracked, tokens, store_decode=store_decode)
        if not offer.keys:
            offer.settle()
            return
        plan = self._cache.prepare_store(offer.keys, tracked.req_id)
        if plan is None:
            logger.debug("request %s: no room for its chunks now", tracked.req_id)
            return
        offer.settle()
        if not plan.keys:
            return
        source = offer.source_of(plan.keys)
        job_id = self._jobs.add_store(
            tracked, plan.keys, lasting=source.lasting, passing=source.passing
        )
        slots = SlotSpec(tuple(plan.slots), (plan.generation,) * len(plan.slots))
        self._store_jobs[job_id] = TransferJob(tracked.req_id, source.blocks, slots)
        if over:
            if not self._tables.allocated.isdisjoint(source.lasting):
                self._jobs.flush((job_id,))
            self._jobs.release_blocks((job_id,))

    def _complete(self, job: JobState) -> None:
        """Tell the cache that a job ended in all ranks."""
        tracked = job.tracked
        if job.is_store:
            self._cache.complete_store(job.keys, tracked.req_id)
        else:
            self._loading.difference_update(job.keys)
            self._cache.complete_load(tracked.req_id)
            if job.failed:
                tracked.offer_anew()  # What is computed instead is not in the cache.
        self._forget_if_over(tracked)

    def _end(self, req_id: str) -> None:
        tracked = self._requests.get(req_id)
        if tracked is None:
            return
        if not tracked.ended:
            tracked.ended = True
            self._cache.end_request(tracked)
        self._forget_if_over(tracked)

    def _forget_if_over(self, tracked: TrackedRequest) -> None:
        if tracked.ended and not tracked.jobs:
            if self._requests.get(tracked.req_id) is tracked:  # not of a later one of its id
                del self._requests[tracked.req_id]
            tracked.clear()
