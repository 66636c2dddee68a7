"""kvtier's connector and vLLM's offloading connector, asked the same by vLLM's own scheduler.

kvtier's answers and jobs are carried out. vLLM's are compared with them: how far each hit
reaches, which chunks are loaded into which blocks, and which chunks are offered for storing.
Both look chunks up in one cache. What differs on purpose has a reason that is counted; any
other difference fails the test.
"""

from __future__ import annotations

import enum
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.outputs import KVConnectorOutput

from kvtier.connector.figures import EngineStatistics
from kvtier.connector.protocols import RequestContext
from kvtier.connector.transfers import Transfers
from kvtier.keys import ChunkKey, group_of
from kvtier.manager import GroupReach, HitRules, LoadPlan, Prompt, StorePlan
from kvtier.types import Outcome
from tests.integration.engine_world import EngineWorld, NotesConnector
from tests.integration.scheduler_setup import Setup
from tests.unit.test_connector_metrics import engine

if TYPE_CHECKING:
    from pathlib import Path

DEFERRED_SHARE = 0.2
LOST_SHARE = 0.3


class Reason(enum.StrEnum):
    """What kvtier's scheduler side does otherwise; the page on the connector explains each."""

    ENDS_IN_BLOCK = "a hit ends inside a block"
    SHORT = "a hit is shorter than a chunk of the largest group"
    GONE = "a part of the chunk is gone"
    LAST_TOKEN = "the last token does not count"
    DROPPED = "vLLM drops a block of a window that was given out again, to whomever"
    NO_END = "no hit ends where the chunk would be read"
    COMPUTED_ANEW = "chunks are offered again after a failed load, a preemption or a reset"


class Books:
    """A cache with room for everything, which loses a chunk now and then."""

    is_idle = False
    is_active = True

    def __init__(self, groups: Sequence[GroupReach], world: PairedWorld) -> None:
        self.service = self.slot_status = self
        self.offered: dict[str, set[ChunkKey]] = {}
        self._rules = HitRules(groups)
        self._world = world
        self._step = 0
        self._slots: dict[ChunkKey, int] = {}
        self._whole: dict[ChunkKey, int] = {}
        self._stored: set[int] = set()
        self._failed: set[int] = set()
        self._loads: dict[str, list[ChunkKey]] = {}
        self._planned = 0

    def tick(self) -> None:
        self._step += 1
        pinned = {key for keys in self._loads.values() for key in keys}
        free = [key for key in self._whole if key not in pinned]
        if free and self._world.draw.random() < LOST_SHARE:
            self._forget(self._world.draw.choice(free))

    def _forget(self, key: ChunkKey) -> None:
        self._whole.pop(key, None)
        self._slots.pop(key, None)

    # -- a cache -------------------------------------------------------------------------------

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._whole), len(keys))

    def has(self, key: ChunkKey) -> bool:
        return key in self._whole

    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        drawn = zlib.crc32(f"{self._world.seed}.{req_id}.{self._step}".encode()) % 100
        if drawn < 100 * DEFERRED_SHARE:
            return None
        return self._rules.longest(prompt, self) - prompt.local_tokens

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        self._loads[req_id] = list(keys)
        slots = [self._whole[key] for key in keys]
        return LoadPlan(slots, [1] * len(slots), [0] * len(slots))

    def complete_load(
        self,
        keys: Collection[ChunkKey],
        request: RequestContext,
        load_id: int | None = None,
        *,
        failed_reads: Mapping[int, Outcome] = MappingProxyType({}),
    ) -> None:
        for key in self._loads.pop(request.req_id):
            if self._whole.get(key) in self._failed:
                self._forget(key)

    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool
    ) -> StorePlan:
        self.offered.setdefault(req_id, set()).update(keys)
        new = [key for key in keys if key not in self._slots]
        slots = list(range(self._planned, self._planned + len(new)))
        self._planned += len(new)
        self._slots.update(zip(new, slots, strict=True))
        return StorePlan(new, slots, 1, [])

    def complete_store(self, keys: Collection[ChunkKey], request: RequestContext) -> None:
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None and slot in self._stored:
                self._whole[key] = slot
            else:
                self._slots.pop(key, None)

    def reset_cache(self) -> bool:
        self._slots.clear()
        self._whole.clear()
        self._loads.clear()
        return True

    def begin_request(self, request: object) -> None:
        pass

    def end_request(self, request: object) -> None:
        pass

    def end_step(self, *, started: Iterable[str], preempted: Iterable[str]) -> None:
        pass

    def has_pending_work(self) -> bool:
        return False

    def take_events(self) -> list[Any]:
        return []

    def take_transfers(self) -> Transfers:
        return Transfers()

    def record_copies(self, copies: Transfers) -> None:
        pass

    def take_load_waits(self) -> list[float]:
        return []

    def take_reuse_gaps(self) -> list[list[float]]:
        return []

    def statistics(self) -> EngineStatistics:
        return engine()

    def step_scheduled(self, tokens: int) -> None:
        pass

    def step_ended(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    # -- what workers say ----------------------------------------------------------------------

    def finish(self, slots: Sequence[int], *, stored: int | None = None) -> None:
        if stored is not None:
            self._stored.update(slots)

    def record_failed_loads(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self._failed.update(slots)


class ReferenceManager(OffloadingManager):
    """What vLLM's scheduler side drives: reads the same cache, and stores nothing."""

    def __init__(self, world: PairedWorld) -> None:
        self._world = world
        self.loads: dict[str, list[ChunkKey]] = {}

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._world.note_dropped()  # vLLM forgets it next

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if self._world.cache.has(key) else LookupResult.MISS

    @override
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        self.loads[req_context.req_id] = list(keys)
        return LoadStoreSpec()

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        pass

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        self._world.note_reference_offer(list(keys), req_context)
        return PrepareStoreOutput(keys_to_store=[], store_spec=LoadStoreSpec(), evicted_keys=[])

    @override
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        pass

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        pass

    @override
    def reset_cache(self) -> None:
        pass


class PairSpec(OffloadingSpec):
    """Builds the manager for vLLM's scheduler side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._world: PairedWorld = config.extra_config["world"]

    @override
    def get_manager(self) -> ReferenceManager:
        self._world.manager = ReferenceManager(self._world)
        return self._world.manager

    @override
    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class PairedConnector(NotesConnector):
    """Passes each of the scheduler's calls to both scheduler sides and compares them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.world: PairedWorld = extra["world"]
        self.reference = OffloadingConnector(
            vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
        )
        self.world.reference = self.reference.connector_scheduler
        self._loads: dict[int, int] = {}
        """vLLM's number of each of kvtier's loads."""

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.reference.bind_kv_cache_manager(kv_cache_manager)

    @override
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.reference.on_new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        ours = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if ours[0] is None:
            self.world.seen["waits"] += 1
            return ours
        theirs = self.reference.get_num_new_matched_tokens(request, num_computed_tokens)
        if theirs != ours:
            short = theirs[0] is not None and theirs[0] < self.world.setup.alignment_tokens
            self.world.reasons[Reason.SHORT if short else Reason.ENDS_IN_BLOCK] += 1
            if theirs[0] is None:  # a longer one meets a load
                assert self.world.has_windows, f"vLLM lets {request.request_id} wait"
                return ours
            end = num_computed_tokens + theirs[0]
            aligned = end % self.world.setup.alignment_tokens == 0
            assert short or not aligned, f"{ours} instead of {theirs}"
            assert ours[0] < theirs[0]
        return ours

    @override
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.reference.update_state_after_alloc(request, blocks, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        ours = super().build_connector_meta(scheduler_output)
        theirs = self.reference.build_connector_meta(scheduler_output)
        self.world.note_dropped()
        mine, others = (
            {job.request_id: (job_id, job) for job_id, job in ours.jobs.load_jobs.items()},
            {job.req_id: (job_id, job) for job_id, job in theirs.load_jobs.items()},
        )
        assert mine.keys() == others.keys()
        for req_id, (job_id, job) in mine.items():
            their_id, their_job = others[req_id]
            self._loads[job_id] = their_id
            keys = [
                self.world.known.key_in(slot, generation)
                for slot, generation in zip(job.slots.slots, job.slots.generations, strict=True)
            ]
            blocks = their_job.dst_spec
            assert keys == self.world.manager.loads[req_id]
            assert list(job.blocks.block_ids) == blocks.block_ids.tolist()
            assert list(job.blocks.group_sizes) == list(blocks.group_sizes)
            loaded = [at for at, size in enumerate(blocks.group_sizes) if size]
            assert [job.blocks.first_blocks[at] for at in loaded] == [
                blocks.block_indices[at] for at in loaded
            ]
        return ours

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        super().update_connector_output(connector_output)
        output = getattr(meta, "output", None)
        done = {} if output is None else output.completed_jobs
        ended = {self._loads[job_id]: 1 for job_id in done if job_id in self._loads}
        self.reference.update_connector_output(
            KVConnectorOutput(
                kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=ended)
            )
        )
        for req_id in () if output is None else output.failed_requests:
            self.world.computed_anew.add(req_id)

    @override
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        tables = self._tables.get_blocks(request.request_id).get_block_ids()
        self.world.last_tables[request.request_id] = tables
        ours = super().request_finished_all_groups(request, block_ids)
        assert ours == self.reference.request_finished_all_groups(request, block_ids)
        return ours

    @override
    def reset_cache(self) -> bool | None:
        self.reference.reset_cache()
        return super().reset_cache()


class PairedWorld(EngineWorld):
    """An engine whose connector is a :class:`PairedConnector`."""

    reference: Any
    manager: ReferenceManager

    def __init__(self, setup: Setup, model: Path, seed: int) -> None:
        self.reasons: Counter[Reason] = Counter()
        self.computed_anew: set[str] = set()
        """Requests that offer their chunks again."""
        self.most_computed: dict[str, int] = {}
        self.last_tables: dict[str, Sequence[list[int]]] = {}
        """Blocks of requests that ended."""
        self._dropped: set[tuple[str, ChunkKey]] = set()
        self._theirs: dict[str, dict[ChunkKey, Reason | None]] = {}
        super().__init__(setup, model, seed, connector=PairedConnector)

    @override
    def make_cache(self, groups: Sequence[GroupReach]) -> Books:
        return Books(groups, self)

    @override
    def reset(self) -> None:
        self.computed_anew.update(request.request_id for request in self.alive())
        super().reset()

    @override
    def step(self) -> None:
        super().step()
        for req_id, request in self.requests.items():
            computed = max(self.most_computed.get(req_id, 0), request.num_computed_tokens)
            self.most_computed[req_id] = computed
            if request.num_preemptions:
                self.computed_anew.add(req_id)

    @property
    def has_windows(self) -> bool:
        return any(window is not None for _, window in self.setup.groups)

    def note_reference_offer(self, keys: Sequence[ChunkKey], context: ReqContext) -> None:
        """Note what vLLM's scheduler side offers, and why kvtier's may not."""
        offers = self._theirs.setdefault(context.req_id, {})
        for key in keys:
            offers[key] = self._why_not_offered(key, context)

    def note_dropped(self) -> None:
        """Note which chunks vLLM's scheduler side no longer has whole blocks of."""
        for req_id, offered in self.cache.offered.items():
            if req_id in self.reference._req_status:
                missing = offered - self._theirs.get(req_id, {}).keys()
                self._dropped.update(
                    (req_id, key) for key in missing if 0 in self._their_blocks(req_id, key)
                )

    def _their_blocks(self, req_id: str, key: ChunkKey) -> list[int]:
        """Return the blocks that vLLM's scheduler side knows of a chunk."""
        config, state = self.reference.config, self.reference._req_status[req_id]
        number, group = next(
            (at, each)
            for at, each in enumerate(config.kv_group_configs)
            if each.group_idx == group_of(key)
        )
        last = self._end(req_id, key) // group.tokens_per_block
        blocks: list[int] = state.group_states[number].block_ids
        return blocks[last - config.blocks_per_chunk : last]

    def compare_offers(self) -> None:
        """Check that both scheduler sides offered the same chunks of every request."""
        for req_id in self.requests:
            ours = self.cache.offered.get(req_id, set())
            theirs = self._theirs.get(req_id, {})
            for key in theirs.keys() - ours:
                reason = theirs[key] or self._no_end(req_id, key)
                assert reason, f"{req_id}: kvtier did not offer {self._brief(req_id, key)}"
                self.reasons[reason] += 1
            for key in ours - theirs.keys():
                reason = Reason.COMPUTED_ANEW if req_id in self.computed_anew else None
                reason = reason or self._no_end(req_id, key) or self._ends_request(req_id, key)
                reason = Reason.DROPPED if (req_id, key) in self._dropped else reason
                assert reason, f"{req_id}: only kvtier offered {self._brief(req_id, key)}"
                self.reasons[reason] += 1

    def _no_end(self, req_id: str, key: ChunkKey) -> Reason | None:
        """Return a reason if no hit can end where a window's chunk would be read.

        Between the chunk's end and the last token that is stored there is no such token.
        """
        request, setup = self.requests[req_id], self.setup
        window = setup.groups[group_of(key)][1]
        if window is None:
            return None
        params = request.kv_transfer_params or {}
        stored = request.num_tokens - 1 if setup.store_decode else request.num_prompt_tokens
        stored = min(
            stored, params.get("max_offload_tokens", stored), self.most_computed[req_id]
        )
        end, step = self._end(req_id, key), setup.alignment_tokens
        ends = range(-(-end // step) * step, stored + 1, step)
        return None if any(map(self._may_end(request), ends)) else Reason.NO_END

    def _may_end(self, request: Any) -> Callable[[int], bool]:
        """Return whether a hit may end at a token, by vLLM's retention interval."""
        interval, step = self.setup.retention_tokens, self.setup.alignment_tokens
        prompt, shared = request.num_prompt_tokens, request.shared_prefix_boundary
        last = {(prompt - 1) // step * step, min(shared, prompt) // step * step}
        return lambda end: (
            interval is None
            or end in last
            or (interval > 0 and end <= prompt and end % interval == 0)
            or (self.setup.store_decode and end > prompt)
        )

    def _end(self, req_id: str, key: ChunkKey) -> int:
        """Return the token before which a chunk ends."""
        hashes: list[bytes] = self.requests[req_id].block_hashes
        return (hashes.index(key[:-4]) + 1) * self.setup.tokens_per_hash

    def _brief(self, req_id: str, key: ChunkKey) -> str:
        end = self._end(req_id, key)
        request = self.requests[req_id]
        return (
            f"what ends at token {end} in group {group_of(key)}; {request.status.name} with "
            f"{request.num_prompt_tokens} and {request.num_tokens} tokens"
        )

    def _why_not_offered(self, key: ChunkKey, context: ReqContext) -> Reason | None:
        request = self.requests[context.req_id]
        end, group = self._end(context.req_id, key), group_of(key)
        blocks = self._their_blocks(context.req_id, key)
        last = end // self.setup.groups[group][0]
        table = self._blocks_of(request, group)[last - len(blocks) : last]
        if 0 in blocks or 0 in table:
            return Reason.GONE
        if request.is_finished() and end > min(
            request.num_computed_tokens, request.num_tokens - 1
        ):
            return Reason.LAST_TOKEN
        return None

    def _ends_request(self, req_id: str, key: ChunkKey) -> Reason | None:
        """Return a reason if the chunk ends before the last token of a request that ended.

        All of it was computed, and vLLM offers it only sometimes.
        """
        request = self.requests[req_id]
        is_last = request.is_finished() and self._end(req_id, key) == request.num_tokens - 1
        return Reason.LAST_TOKEN if is_last else None

    def _blocks_of(self, request: Any, group: int) -> list[int]:
        if request.request_id in self.last_tables:
            return self.last_tables[request.request_id][group]
        tables = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return [block.block_id for block in tables[group]]
