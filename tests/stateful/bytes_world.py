"""Both sides of the connector around real bytes, in an engine that knows what they should be.

Manager, service, scheduler side, worker sides, transfer engines, routes and control block are
those of production. The engine (:mod:`tests.stateful.paged_engine`) reuses blocks as vLLM's
does. Threads, clocks and disks are simulated (:mod:`tests.stateful.stepping`,
:mod:`tests.stateful.random_fault_tier`): random numbers choose who runs next, also in the
middle of a copy. So deadlines pass, processes die, requests end and caches are reset at any
moment.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from kvtier.connector.device import DeviceEngine
from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.protocols import RequestContext
from kvtier.connector.scheduler import NOTHING_TO_DO, ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.connector.storage import Storage
from kvtier.connector.worker import ConnectorWorker
from kvtier.keys import ChunkKey, make_key
from kvtier.manager import ManagerLimits, Reach, StorePlan, TieredOffloadingManager, TierState
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.slot_layout import RankShare
from kvtier.os.memory import open_anonymous
from kvtier.policies import (
    CopyState,
    TieredPlacement,
    build_eviction,
)
from kvtier.transfer import BetweenTiers, BounceBuffer, EngineLimits, FromTier, ToTier, routes
from tests.stateful.contents import BLOCK_NBYTES, Contents, block_name
from tests.stateful.paged_engine import (
    EngineLimits as BatchLimits,
)
from tests.stateful.paged_engine import (
    PagedEngine,
    PagedRequest,
    Phase,
    Work,
)
from tests.stateful.random_fault_tier import RandomFaultTier, digest
from tests.stateful.stepping import (
    SlowCopier,
    SlowTruth,
    Stage,
    SteppedEngine,
    SteppedPool,
)
from tests.support.invariants import check_manager

if TYPE_CHECKING:
    import pytest

HASH_TOKENS: Final = 4
DOCUMENTS, LONGEST = 4, 40
REST_STEPS = 4000
PATIENCE_S = 600.0
"""Longer than anything hangs."""
NO_EPOCH: Final = -1
"""Of KV that was computed partly before a reset, so that no key may name it."""

FULL = CacheGroup(4)
MODELS: Final = {
    "full": (FULL,),
    "full and window": (FULL, CacheGroup(4, 1, Reach.WINDOW, 9)),
    "windows": (CacheGroup(4, 0, Reach.WINDOW, 6), CacheGroup(8, 1, Reach.WINDOW, 14)),
    "full and local": (FULL, CacheGroup(4, 1, Reach.LOCAL, 12)),
    "full and state": (FULL, CacheGroup(8, 1, Reach.STATE, is_handed_over=True)),
    "full and kept state": (FULL, CacheGroup(8, 1, Reach.STATE)),
}
"""KV cache groups of the engines."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a step brought, before the scheduler knows of it."""

    work: Sequence[Work]
    output: WorkerOutput
    loaded: Sequence[set[str]]


class OfferLog:
    """A cache that notes which chunks of a request were offered for storing."""

    def __init__(self, cache: CacheService, world: BytesWorld) -> None:
        self._cache = cache
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool
    ) -> StorePlan | None:
        plan = self._cache.prepare_store(keys, req_id, is_last=is_last)
        self._world.note_offer(keys, req_id, was_taken=plan is not None)
        return plan

    def end_request(self, request: RequestContext) -> None:
        self._world.note_end(request.req_id)
        self._cache.end_request(request)


class BytesWorld:
    """One engine from its start to its end.

    Args:
        seed: Of all that is left to chance.
        patch: Lets the stage take over clocks and threads.
        model: Which of :data:`MODELS`.
        calm: Whether nothing goes wrong, so that no load may fail.

    Attributes:
        checked_blocks: Blocks that were loaded, and compared with what they should hold.
    """

    def __init__(
        self, seed: int, patch: pytest.MonkeyPatch, *, model: str, calm: bool = False
    ) -> None:
        self._open = ExitStack()
        self.stage = stage = Stage(seed, calm=calm)
        stage.take_over(patch)
        self._draw = draw = stage.draw
        patch.setattr(SlowCopier, "failing", 0.0 if calm else draw.choice([0.0, 0.002]))
        patch.setattr(SteppedPool, "hanging", 0.0 if calm else draw.choice([0.0, 0.01]))
        self._ranks = ranks = draw.choice([1, 1, 2])
        self._options = options = self._draw_options(MODELS[model])
        self._layouts = build_layouts(options)
        self._blocks = draw.randint(30, 60)
        self._contents = Contents(ranks=ranks, blocks=self._blocks, layouts=self._layouts)
        self._build_cache()
        self._build_engine()
        self._workers = [self._make_worker(rank) for rank in range(ranks)]
        self._lag = draw.choice([0, 1])
        self._reports: list[Report] = []
        self._names: dict[int, int] = {}
        self._epochs: dict[PagedRequest, int] = {}
        self._load_epochs: dict[PagedRequest, int] = {}
        self._load_lost: dict[PagedRequest, set[int]] = {}
        self._offered: dict[PagedRequest, set[ChunkKey]] = {}
        self._loaded: dict[PagedRequest, int] = {}
        self._ended: list[str] = []
        self._seen: list[weakref.ref[PagedRequest]] = []
        self._epoch = self._born = self._steps = self.checked_blocks = 0
        self._ending = False

    def _build_cache(self) -> None:
        """Build tiers, memory, manager and service."""
        draw, stage, groups = self._draw, self.stage, len(self._layouts)
        capacities = [
            groups * slots for slots in [draw.randint(8, 20), *self._draw_some(8, 30, most=2)]
        ]
        self._geometry = self._shape(capacities)
        self._memory_file = self._make_memory_file()
        self._region = self._map_region()
        self._region.control = SlowTruth.beside(self._region, stage)
        self._disks = [
            RandomFaultTier(stage, f"disk{at}", slots, self._geometry.slot_nbytes)
            for at, slots in enumerate(capacities[1:])
        ]
        self._manager = self._make_manager(capacities)
        self._service = CacheService(
            self._make_storage(),
            tokens_per_chunk=self._layouts[0].tokens_per_chunk,
            retain_s=draw.choice([0.0, 0.0, 0.5]),
            close_timeout_s=PATIENCE_S,
        )

    def _build_engine(self) -> None:
        """Build the scheduler side, and an engine that asks it."""
        draw = self._draw
        log = cast("CacheService", OfferLog(self._service, self))
        self._scheduler = ConnectorScheduler(log, self._options)
        self._engine = PagedEngine(
            self._scheduler,
            self._options,
            BatchLimits(
                self._blocks,
                step_tokens=draw.choice([7, 24, 60]),
                requests=8,
                writes_first=draw.random() < 0.25,
                fails_requests=draw.random() < 0.3,
            ),
        )
        self._scheduler.tables = self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    @property
    def preemptions(self) -> int:
        """Requests that lost their blocks."""
        return self._engine.preemptions

    def run(self, steps: int) -> None:
        """Serve requests for so many steps, then let everything end."""
        turns = self._take_steps()
        while self._steps < steps:
            self.stage.act()
            if self.stage.chance(0.15):
                next(turns)
        self._end(turns)

    def note_offer(self, keys: Sequence[ChunkKey], req_id: str, *, was_taken: bool) -> None:
        """Check that what is offered for storing was, or is being, computed."""
        request = self._engine.requests[req_id]
        scheduled = self._engine.scheduled.get(req_id, 0)
        for key in keys:
            end = self._contents.end_tokens(key)
            assert end <= request.num_computed_tokens + scheduled, (
                f"request {req_id}: a chunk that ends at {end} is offered before it is computed"
            )
        if not was_taken:
            return
        offered = self._offered.setdefault(request, set())
        again = [key for key in keys if key in offered]
        assert not again or self._options.retention_tokens is not None, (
            f"request {req_id}: chunks that end at "
            f"{[self._contents.end_tokens(key) for key in again]} are offered twice"
        )
        offered.update(keys)

    def note_end(self, req_id: str) -> None:
        """Check that every chunk of full attention was accepted, refused for good or loaded."""
        request = self._engine.requests[req_id]
        offered = self._offered.pop(request, set())
        loaded_tokens = self._loaded.pop(request, 0)
        if request.load:
            return
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        limit = known if self._options.store_decode else request.num_prompt_tokens
        for layout in self._layouts:
            if layout.group.reach is not Reach.PREFIX:
                continue
            size, step = layout.tokens_per_chunk, layout.hashes_per_chunk
            missed = [
                end
                for end in range(size, min(limit, request.num_computed_tokens) + 1, size)
                if end > loaded_tokens
                and make_key(request.block_hashes[end // size * step - 1], layout.index)
                not in offered
            ]
            assert not missed, f"request {req_id}: chunks that end at {missed} are not offered"

    # -- building ------------------------------------------------------------------------------

    def _draw_options(self, groups: tuple[CacheGroup, ...]) -> SchedulerOptions:
        draw = self._draw
        has_states = any(each.reach is Reach.STATE for each in groups)
        return SchedulerOptions(
            groups=groups,
            tokens_per_hash=HASH_TOKENS,
            blocks_per_chunk=1 if has_states else draw.choice([1, 2]),
            ranks=self._ranks,
            store_decode=draw.random() < 0.6,
            retention_tokens=draw.choice([None, None, 0, 16]),
            shares_blocks=draw.random() < 0.5,
        )

    def _draw_some(self, least: int, greatest: int, *, most: int) -> list[int]:
        return [self._draw.randint(least, greatest) for _ in range(self._draw.randint(1, most))]

    def _shape(self, capacities: Sequence[int]) -> RegionGeometry:
        block_nbytes = BLOCK_NBYTES * self._ranks
        return RegionGeometry(
            slots=capacities[0],
            slot_nbytes=block_nbytes * self._options.blocks_per_chunk,
            block_nbytes=block_nbytes,
            ranks=self._ranks,
            bounce_slots=4 if len(capacities) > 2 else 0,
        )

    def _make_memory_file(self) -> int:
        descriptor = open_anonymous("kvtier-world")
        self._open.callback(os.close, descriptor)
        os.ftruncate(descriptor, self._geometry.nbytes)
        return descriptor

    def _map_region(self) -> HostRegion:
        region = HostRegion(self._geometry, self._memory_file)
        self._open.callback(region.close)
        return region

    def _make_manager(self, capacities: Sequence[int]) -> TieredOffloadingManager:
        draw = self._draw
        eviction = draw.choice(["lru", "lhd"])
        names = ["ram", *(disk.name for disk in self._disks)]
        self._tiers = tiers = [
            TierState(name, index, capacity, build_eviction(eviction, capacity=capacity))
            for index, (name, capacity) in enumerate(zip(names, capacities, strict=True))
        ]
        moves = draw.random() < 0.25
        through = not moves and draw.random() < 0.5
        return TieredOffloadingManager(
            tiers,
            placement=TieredPlacement(
                len(tiers),
                write="through" if through else "evict",
                promote="move" if moves else "copy",
            ),
            limits=ManagerLimits(
                pin_budget=draw.randint(capacities[0] // 2, capacities[0]),
                reserve=draw.choice([0.0, 0.3]),
                queue=draw.randint(2, 16),
                batch=draw.choice([2, 256]),
                retained=draw.randint(0, 3),
                load_timeout_s=draw.choice([0.2, 2.0]),
                store_timeout_s=draw.choice([0.2, 4.0]),
                max_queue_steps=20,
                max_store_refusals=3,
                direct_loads=draw.random() < 0.7,
            ),
            slot_status=self._region.control,
            record_events=False,
            groups=[layout.reach for layout in self._layouts],
            counting_group=self._options.counting_group,
        )

    def _make_storage(self) -> Storage:
        region, disks = self._region, self._disks
        ways: dict[tuple[str, str], routes.Route] = {}
        for disk in disks:
            ways["ram", disk.name] = ToTier(region, disk, region.control)
            ways[disk.name, "ram"] = FromTier(region, disk, region.control)
        if bounce := self._geometry.bounce_range:
            upper, lower = disks
            ways[upper.name, lower.name] = BetweenTiers(
                upper, lower, BounceBuffer(region, bounce)
            )
        slot_nbytes = self._geometry.slot_nbytes
        least = self._geometry.slots if self.stage.calm else 6
        engine = SteppedEngine(
            self.stage,
            "storage",
            ways,
            chunk_nbytes=slot_nbytes,
            limits=EngineLimits(
                # In production, never less than RAM holds.
                queued_bytes=self._draw.choice([least, 1000]) * slot_nbytes,
                running_bytes=self._draw.choice([2, 1000]) * slot_nbytes,
                breaker_failures=3,
                breaker_backoff_s=0.5,
            ),
            openers=[disk.aopen for disk in disks],
            closers=[disk.aclose for disk in disks],
        )
        pool = SteppedPool(self.stage, 1, name="kvtier-unused")
        return Storage(self._manager, engine, disks, [pool], region, None, None)

    def _make_worker(self, rank: int) -> ConnectorWorker:
        device = DeviceEngine(
            self._contents.kv[rank],
            self._map_region(),
            rank=rank,
            share=RankShare(rank, self._ranks),
            blocks_per_chunk=self._options.blocks_per_chunk,
            close_timeout_s=PATIENCE_S,
        )
        return ConnectorWorker(device, ram_name="ram")

    # -- steps of the engine; others get on where these yield ----------------------------------

    def _take_steps(self) -> Iterator[None]:
        while True:
            self._steps += 1
            yield from self._step()
            self._something_happens()
            self._check_tiers()
            check_manager(self._manager)

    def _step(self) -> Iterator[None]:
        step, work = self._engine.schedule()
        for req_id in step.preempted:
            self._epochs.pop(self._engine.requests[req_id], None)
            self._offered.pop(self._engine.requests[req_id], None)
        if step.only_generates and self._scheduler.pass_step():
            metadata = NOTHING_TO_DO
        else:
            metadata = self._scheduler.build_connector_meta(step)
        self._engine.scheduled_all(work)
        self._note_loads()
        yield
        for block in step.overwritten:
            self._write(block, self._draw.getrandbits(60))
        for worker in self._workers:
            worker.handle_preemptions(metadata)
            yield
        self._compute(work)
        yield
        outputs, loaded = [], []
        for worker in self._workers:
            worker.start_load(metadata)
            worker.defer_stores(metadata)
            yield
            loaded.append(worker.get_finished())
            outputs.append(worker.take_output() or WorkerOutput())
            yield
        self._reports.append(Report(work, reduce(WorkerOutput.aggregate, outputs), loaded))
        while len(self._reports) > self._lag:
            self._take_report(self._reports.pop(0))
        yield

    def _note_loads(self) -> None:
        for request in self._engine.requests.values():
            if request.load and request not in self._load_epochs:
                self._load_epochs[request] = self._epoch
                self._loaded[request] = request.num_computed_tokens

    def _write(self, block: int, name: int) -> None:
        self._names[block] = name
        self._contents.fill(block, name)

    def _compute(self, work: Sequence[Work]) -> None:
        """Fill the blocks of a step; KV of two epochs makes what no key may name."""
        for each in work:
            request, tokens = each.request, each.request.all_tokens
            if not each.start:
                self._epochs.pop(request, None)
            epoch = self._epochs.setdefault(request, self._epoch)
            self._check_blocks(each, epoch)  # some of them an earlier one of this step computed
            if epoch != self._epoch:
                epoch = self._epochs[request] = NO_EPOCH
            self._fill(each, tokens, epoch)
            if each.samples:
                request.sampled.append(_sample(tokens))

    def _fill(self, work: Work, tokens: Sequence[int], epoch: int) -> None:
        """Write the blocks that a step computes for a request."""
        for layout, table in zip(self._layouts, work.tables, strict=True):
            size = layout.group.tokens_per_block
            for at in range(work.start // size, -(-work.end // size)):
                known = tokens[: min((at + 1) * size, work.end)]
                name = block_name(layout.index, known, epoch)
                if epoch == NO_EPOCH:
                    name = self._draw.getrandbits(60)
                if not table[at].is_null:
                    self._write(table[at].block_id, name)

    def _take_report(self, report: Report) -> None:
        """Tell the scheduler what the workers did."""
        output = report.output
        assert not (self.stage.calm and output.failed_loads), output.failed_loads
        lost = {load.request_id: load.block_ids for load in output.failed_loads.values()}
        for request in self._engine.requests.values():
            if request.request_id in lost and request.load:
                self._load_lost.setdefault(request, set()).update(lost[request.request_id])
        self._engine.reported(report.work, output, report.loaded)
        for request, is_needed in self._engine.loads_ended(self._ranks):
            epoch = self._load_epochs.pop(request)
            self._check_load(request, epoch, self._load_lost.pop(request, set()))
            if is_needed and request.num_computed_tokens:
                self._epochs[request] = epoch
            if request.load_failed:
                self._loaded.pop(request, None)

    # -- what happens in between ---------------------------------------------------------------

    def _something_happens(self) -> None:
        alive = [each for each in self._engine.requests.values() if not each.is_finished()]
        if self._ending:
            for request in alive:
                self._engine.abort(request)
            return
        self._change_requests(alive)
        if self.stage.chance(0.01):
            self._engine.preempt_all()
        if not self.stage.calm and self.stage.chance(0.03):
            self._reset()

    def _change_requests(self, alive: Sequence[PagedRequest]) -> None:
        """Let requests arrive, end, and go on with the next part of their prompts."""
        if len(alive) < 7 and self.stage.chance(0.5):
            self._arrive()
        if alive and self.stage.chance(0.06):
            self._engine.abort(self._draw.choice(alive))
        for request in alive:
            if request.phase is Phase.PAUSED and self.stage.chance(0.3):
                self._engine.resume(request)

    def _reset(self) -> None:
        """Reset the cache, most often because the weights change."""
        if self._draw.random() < 0.5:
            self._engine.preempt_all()
            has_kv = self._engine.has_kv
        else:
            has_kv = self._options.shares_blocks
        if not (has_kv and self._options.shares_blocks):
            self._epoch += 1
        self._scheduler.reset_cache()
        self._offered.clear()
        self._loaded.clear()

    def _arrive(self) -> None:
        self._born += 1
        draw = self._draw
        document, length = draw.randrange(DOCUMENTS), draw.randint(3, LONGEST)
        # Most prompts share a document's beginning; some go their own way after it.
        tokens = [document * 1000 + at for at in range(length)]
        if draw.random() < 0.3:
            tokens[draw.randrange(length) :] = [self._born * 10_000]
        free = [name for name in self._ended if name not in self._engine.requests]
        name = draw.choice(free) if free and draw.random() < 0.2 else str(self._born)
        parts = [[-at for at in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 2))]
        request = PagedRequest(
            request_id=name,
            tokens=tokens,
            output_tokens=draw.randint(1, 14),
            hash_tokens=HASH_TOKENS,
            groups=len(self._layouts),
            parts=parts if draw.random() < 0.2 else [],
            skip_reading_prefix_cache=draw.random() < 0.05,
            shared_prefix_boundary=draw.choice([0, 0, length // 2]),
            learn=self._contents.learn,
        )
        self._ended.append(name)
        self._seen.append(weakref.ref(request))
        self._engine.add(request)

    def _end(self, turns: Iterator[None]) -> None:
        """Let nothing go wrong any more, and everything come to its end."""
        SlowCopier.failing = SteppedPool.hanging = 0.0
        for disk in self._disks:
            disk.calm_down()
        self._ending = True
        self._lag = 0
        self._come_to_rest(turns)
        self.stage.now_s += PATIENCE_S  # longer than anything is retained
        self._service.statistics()  # as once a second; the next step ends what is over
        self._come_to_rest(turns)
        self._check_rest()
        for worker in self._workers:
            worker.shutdown()
        self._service.shutdown()
        self._check_disks()

    def _come_to_rest(self, turns: Iterator[None]) -> None:
        began = self._steps
        while self._is_busy or self._steps < began + 3:  # in which the last results arrive
            assert self._steps < began + REST_STEPS, "it does not come to rest"
            for _ in range(5):
                self.stage.act()
            next(turns)

    @property
    def _is_busy(self) -> bool:
        if self._reports or self._engine.requests or self._manager.snapshot().jobs:
            return True
        return self._scheduler.has_pending_work()

    # -- what must hold ------------------------------------------------------------------------

    def _check_load(self, request: PagedRequest, epoch: int, lost: Collection[int]) -> None:
        """Check every block that a load is said to have brought."""
        for group, at, block in request.load:
            layout = self._layouts[group]
            end = (at + 1) * layout.group.tokens_per_block
            name = block_name(layout.index, request.tokens[:end], epoch)
            if block.block_id in lost:
                self._names.pop(block.block_id, None)
                continue
            self.checked_blocks += 1
            self._names[block.block_id] = name
            assert self._contents.holds(block.block_id, name), (
                f"block {at} of group {group} of request {request.request_id} was not loaded"
            )

    def _check_blocks(self, work: Work, epoch: int) -> None:
        """Check what a request reads in a step, which nobody may have written to since."""
        req_id, tokens = work.request.request_id, work.request.all_tokens
        for layout, table in zip(self._layouts, work.tables, strict=True):
            size = layout.group.tokens_per_block
            for at, block in enumerate(table[: work.start // size]):
                if block.is_null:
                    continue
                name = self._names[block.block_id]
                if epoch != NO_EPOCH:
                    wanted = block_name(layout.index, tokens[: (at + 1) * size], epoch)
                    assert name == wanted, (
                        f"block {at} of group {layout.index} of request {req_id} holds others"
                    )
                assert self._contents.holds(block.block_id, name), (
                    f"block {at} of group {layout.index} of request {req_id} was written to"
                )

    def _check_tiers(self) -> None:
        """Check every slot that is a hit, byte by byte."""
        for tier in self._tiers:
            for key, copy in tier.copies.items():
                if copy.state != CopyState.RESIDENT:
                    continue
                if tier.index:
                    held, payload, checksum = self._disks[tier.index - 1].held[copy.slot]
                    assert held == key, f"{copy} of {tier.name} is another chunk"
                    if digest(key, memoryview(payload)) != checksum:
                        continue  # the disk lost it, which whoever reads it will see
                else:
                    payload = bytes(self._region.slot(copy.slot))
                wanted = self._contents.wanted(key, self._epoch)
                assert payload == wanted, f"{copy} of {tier.name} has other bytes than its key"

    def _check_rest(self) -> None:
        """Check that nobody holds anything any more."""
        snapshot = self._manager.snapshot()
        assert (snapshot.requests, snapshot.granted, snapshot.retained) == (0, 0, 0)
        for tier in self._tiers:
            assert not tier.writing
            assert tier.slots.free + len(tier.copies) == tier.slots.capacity
        assert not self._service.statistics().internal_errors
        self._epochs.clear()
        gc.collect()
        assert not [ref for ref in self._seen if ref() is not None], "requests are remembered"

    def _check_disks(self) -> None:
        """Check that a restart would find nothing that its key does not name."""
        for disk in self._disks:
            for key, payload, checksum in disk.held.values():
                if digest(key, memoryview(payload)) == checksum:
                    assert payload == self._contents.wanted(key, self._epoch)


def _sample(tokens: Sequence[int]) -> int:
    """Return the token that follows on ``tokens``; equal prompts go on alike."""
    return hash(tuple(tokens)) % 97
