"""vLLM's scheduler half and kvtier's, asked the same questions by vLLM's own scheduler.

The connector that vLLM's scheduler drives is a tee: each call goes to both halves, each half
has a cache of its own, both caches were built alike, and whatever the halves answer or do must
be equal. Where kvtier's half does something else on purpose, the reference's manager refuses
what kvtier's half did not offer, after it was told a reason that the tee could verify; what
was not offered without a reason fails the test.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvtier.connector.schedule.groups import CacheGroup, SchedulerOptions
from kvtier.vllm.manager import KVTierManager
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)

from kvtier.connector.context import RequestContext
from kvtier.connector.metadata import ConnectorMetadata, FailedLoad, WorkerOutput
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.keys import ChunkKey, group_of
from kvtier.manager import LoadPlan, Lookup, StorePlan
from kvtier.testing.stepped import SteppedCache

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

Call = tuple[Any, ...]


def brief(value: Any) -> Any:
    """Return ``value`` with keys short enough to read."""
    if isinstance(value, bytes):
        return f"{value[:2].hex()}/{group_of(value)}"
    if isinstance(value, list | tuple):
        return [brief(each) for each in value]
    return value


def assert_group_by_group(keys: Sequence[ChunkKey]) -> None:
    """Check what :func:`kvtier.keys.of_one_group` relies on."""
    runs = [group for group, _ in itertools.groupby(keys, group_of)]
    assert len(runs) == len(set(runs)), brief(keys)


class Reason(enum.StrEnum):
    """Why kvtier's half does something else; the page on the connector explains each."""

    GONE = "a part of the chunk is gone"
    LAST_TOKEN = "the last token does not count"
    OVERWRITTEN = "a block holds something else by now"
    SHARED = "a block went to another request as well"
    COMPUTED_ANEW = "what is computed after a failed load is offered"


class SpiedService:
    """A cache service that writes down what it is asked and what it says."""

    def __init__(self, service: CacheService) -> None:
        self._service = service
        self._keys: dict[tuple[int, int], ChunkKey] = {}
        self.calls: list[Call] = []

    def keys_of(self, slots: Sequence[int], generations: Sequence[int]) -> list[ChunkKey]:
        """Return which chunks were planned into, or out of, these slots."""
        return [self._keys[place] for place in zip(slots, generations, strict=True)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def begin_request(self, request: RequestContext) -> None:
        self.calls.append(("begin", request.req_id))
        self._service.begin_request(request)

    def end_request(self, request: RequestContext) -> None:
        self.calls.append(("end", request.req_id))
        self._service.end_request(request)

    def lookup(self, key: ChunkKey, req_id: str) -> Lookup:
        answer = self._service.lookup(key, req_id)
        self.calls.append(("lookup", req_id, key, answer))
        return answer

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        assert_group_by_group(keys)
        plan = self._service.prepare_load(keys, req_id)
        self.calls.append(("load", req_id, list(keys), list(plan.slots)))
        self._keys.update(
            zip(zip(plan.slots, plan.generations, strict=True), keys, strict=True)
        )
        return plan

    def complete_load(self, req_id: str) -> None:
        self.calls.append(("loaded", req_id))
        self._service.complete_load(req_id)

    def prepare_store(self, keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
        assert_group_by_group(keys)
        plan = self._service.prepare_store(keys, req_id)
        accepted = None if plan is None else (list(plan.keys), list(plan.slots))
        if plan is not None:
            places = ((slot, plan.generation) for slot in plan.slots)
            self._keys.update(zip(places, plan.keys, strict=True))
        self.calls.append(("store", req_id, list(keys), accepted))
        return plan

    def complete_store(self, keys: Collection[ChunkKey], req_id: str) -> None:
        # vLLM hands over a set; the order of the books must not depend on it.
        self.calls.append(("stored", req_id, sorted(keys)))
        self._service.complete_store(sorted(keys), req_id)

    def end_step(self, *, started: Iterable[str], preempted: Iterable[str]) -> None:
        step = list(started), sorted(preempted)
        # Whether a cache at rest is told that a step is over makes no difference.
        if any(step) or not self._service.rests:
            self.calls.append(("step", *step))
        self._service.end_step(started=started, preempted=preempted)

    def reset_cache(self) -> bool:
        self.calls.append(("reset",))
        return self._service.reset_cache()


class ReferenceManager(KVTierManager):
    """kvtier's manager for vLLM's half; refuses what kvtier's had a reason not to offer."""

    def __init__(self, spied: SpiedService, excused: Excused) -> None:
        super().__init__(cast("CacheService", spied), persistent=False, report_metrics=False)
        self._excused = excused

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        params = req_context.kv_transfer_params or {}
        # The spec door cannot ask for this per request; kvtier's half can.
        whole = params.get("do_remote_decode") and self._excused.whole_prefix
        policy = OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy=policy)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        wanted = [key for key in keys if not self._excused(key, req_context)]
        if not wanted:
            return PrepareStoreOutput(
                keys_to_store=[], store_spec=LoadStoreSpec(), evicted_keys=[]
            )
        return super().prepare_store(wanted, req_context)


@dataclass
class Excused:
    """Says whether kvtier's half left a chunk out, and for which of its reasons."""

    whole_prefix: bool = True
    offered: dict[str, set[ChunkKey]] = field(default_factory=dict)
    reasons: Counter[Reason] = field(default_factory=Counter)
    why: Callable[[ChunkKey, ReqContext], Reason | None] = lambda key, context: None

    def __call__(self, key: ChunkKey, context: ReqContext) -> bool:
        if key in self.offered.get(context.req_id, ()):
            return False
        reason = self.why(key, context)
        assert reason, f"{context.req_id}: kvtier's half did not offer {brief(key)}"
        self.reasons[reason] += 1
        return True


class PairSpec(OffloadingSpec):
    """Builds both caches; the scheduler side of vLLM's connector gets the reference."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pair: Pair = config.extra_config["pair"]

    def get_manager(self) -> ReferenceManager:
        return ReferenceManager(self.pair.reference, self.pair.excused)

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class Pair:
    """Two caches built alike, and the half that drives the second."""

    def __init__(self, build: Callable[[], SteppedCache], options: SchedulerOptions) -> None:
        self.options = options
        self.caches = (build(), build())
        self.reference = SpiedService(self.caches[0].service)
        self.ours = SpiedService(self.caches[1].service)
        self.half = ConnectorScheduler(self.ours, options)
        self.excused = Excused()
        self.metadata: deque[ConnectorMetadata] = deque()
        self.failed: dict[int, FailedLoad] = {}
        self.seen: Counter[str] = Counter()

    def compare(self) -> None:
        """Check that both caches were asked the same and said the same since the last time."""
        theirs, ours = self.reference.calls, self.ours.calls
        for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            assert one == other, f"call {number}: vLLM {brief(one)}, kvtier {brief(other)}"
        assert len(theirs) == len(ours), (
            f"vLLM went on with {brief(theirs[len(ours) :])}, "
            f"kvtier with {brief(ours[len(theirs) :])}"
        )
        theirs.clear()
        ours.clear()

    def tick(self) -> None:
        for cache in self.caches:
            cache.tick()

    def finish(self, slots: Sequence[int], *, stored: int | None = None) -> None:
        for cache in self.caches:
            cache.finish(slots, stored=stored)

    def refuse(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        for cache in self.caches:
            cache.truth.refuse(slots, generations)

    def close(self) -> None:
        for cache in self.caches:
            assert cache.service.statistics().internal_errors == 0
            cache.service.shutdown()


class TeeConnector(OffloadingConnector):
    """Passes each of the scheduler's calls to both halves and compares what they say."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.pair: Pair = extra["pair"]
        self.pair.excused.why = self._why_not_offered
        self._step = 0
        self._given: dict[int, int] = {}
        self._got: dict[tuple[str, int], int] = {}

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.pair.half.on_new_request(request)
        self.pair.compare()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        theirs: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        ours = self.pair.half.get_num_new_matched_tokens(request, num_computed_tokens)
        self.pair.compare()
        assert theirs == ours
        self.pair.seen["waits"] += theirs[0] is None
        return theirs

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.pair.half.update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            for table in blocks.get_block_ids():
                self._given.update(dict.fromkeys(table, self._step))
        self.pair.compare()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        pair = self.pair
        self._note_blocks(scheduler_output)
        ours = pair.half.build_connector_meta(scheduler_output)
        pair.excused.offered = {
            call[1]: set(call[2]) for call in pair.ours.calls if call[0] == "store"
        }
        theirs = super().build_connector_meta(scheduler_output)
        pair.seen["stores refused"] += sum(
            call[0] == "store" and call[3] is None for call in pair.ours.calls
        )
        pair.compare()
        _compare_jobs(theirs.load_jobs, ours.load_jobs, loads=True)
        _compare_jobs(theirs.store_jobs, ours.store_jobs, loads=False)
        assert theirs.jobs_to_flush == ours.jobs_to_flush
        pair.metadata.append(ours)
        self._step += 1
        return theirs

    def _note_blocks(self, output: SchedulerOutput) -> None:
        for req_id, tables, _ in yield_req_data(output):
            for block in (block for table in tables or () for block in table):
                self._given[block] = self._got[req_id, block] = self._step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        jobs = meta.completed_jobs if isinstance(meta, OffloadingWorkerMetadata) else {}
        failed = {job_id: self.pair.failed[job_id] for job_id in jobs & self.pair.failed.keys()}
        waiting = {job_id: self.scheduler._jobs.get(job_id) for job_id in failed}
        super().update_connector_output(connector_output)
        for job_id, status in waiting.items():
            if status is not None and job_id not in self.scheduler._jobs:
                self._offer_anew(status.req_id)
        self.pair.half.update_connector_output(
            WorkerOutput(completed_jobs=jobs, failed_loads=failed)
        )
        self.pair.compare()
        self._compare_pending()

    def _offer_anew(self, req_id: str) -> None:
        """Have vLLM's half offer what is computed in place of what could not be loaded."""
        self.pair.excused.reasons[Reason.COMPUTED_ANEW] += 1
        status = self.scheduler._req_status.get(req_id)
        for group in () if status is None else status.group_states:
            group.next_stored_chunk_idx = 0

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        theirs = super().request_finished_all_groups(request, block_ids)
        ours = self.pair.half.request_finished_all_groups(request, block_ids)
        self.pair.compare()
        assert theirs == ours
        return theirs

    def take_events(self) -> Iterable[Any]:
        theirs = [
            (event.tier, list(event.keys), event.removed)
            for event in self.pair.reference.take_events()
        ]
        ours = [
            (event.tier, list(event.keys), event.removed)
            for event in self.pair.half.take_events()
        ]
        assert theirs == ours
        return ()

    def reset_cache(self) -> bool | None:
        answer: bool | None = super().reset_cache()
        self.pair.half.reset_cache()
        self.pair.compare()
        return answer

    def has_pending_push_work(self) -> bool:
        self._compare_pending()
        return self.pair.half.has_pending_work()

    def _compare_pending(self) -> None:
        assert super().has_pending_push_work() == self.pair.half.has_pending_work()

    # -- what kvtier's half leaves out on purpose ----------------------------------------------

    def _why_not_offered(self, key: ChunkKey, context: ReqContext) -> Reason | None:
        """Return which of the documented differences explains that ``key`` was not offered."""
        state = self.scheduler._req_status[context.req_id]
        number = next(
            at
            for at, config in enumerate(self.scheduler.config.kv_group_configs)
            if config.group_idx == group_of(key)
        )
        config = self.scheduler.config.kv_group_configs[number]
        end = context.get_offload_key_position(OffloadKey(key))
        last = end // config.tokens_per_block
        blocks = state.group_states[number].block_ids[
            last - self.scheduler.config.blocks_per_chunk : last
        ]
        if 0 in blocks:
            return Reason.GONE
        request = state.req
        if request.is_finished() and end > min(
            request.num_computed_tokens, request.num_tokens - 1
        ):
            return Reason.LAST_TOKEN
        if not self.holds(request, config.group_idx, blocks, end):
            return Reason.OVERWRITTEN
        if any(self._given[block] > self._got[request.request_id, block] for block in blocks):
            return Reason.SHARED
        return None

    def holds(self, request: Any, group: int, blocks: Sequence[int], end: int) -> bool:
        """Whether ``blocks`` hold, or get in this step, the tokens before ``end``.

        The world sets it: it knows what was written where.
        """
        raise NotImplementedError


def _compare_jobs(theirs: dict[int, Any], ours: Any, *, loads: bool) -> None:
    assert list(theirs) == list(ours)
    for job_id, job in theirs.items():
        slots, blocks = job.src_spec, job.dst_spec
        if not loads:
            slots, blocks = blocks, slots
        mine = ours[job_id]
        assert job.req_id == mine.request_id
        assert blocks.block_ids.tolist() == list(mine.blocks.block_ids)
        assert list(blocks.group_sizes) == list(mine.blocks.group_sizes)
        assert list(blocks.block_indices) == list(mine.blocks.first_blocks)
        assert slots.slots == list(mine.slots.slots)
        assert slots.generations == list(mine.slots.generations)


def options_of(
    groups: Sequence[tuple[int, int | None]],
    *,
    tokens_per_hash: int,
    blocks_per_chunk: int,
    ranks: int,
    store_decode: bool,
    retention_tokens: int | None,
) -> SchedulerOptions:
    """Return kvtier's options for groups of (tokens per block, window)."""
    return SchedulerOptions(
        groups=tuple(
            CacheGroup(tokens_per_block, window, index)
            for index, (tokens_per_block, window) in enumerate(groups)
        ),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=blocks_per_chunk,
        ranks=ranks,
        store_decode=store_decode,
        retention_tokens=retention_tokens,
    )
