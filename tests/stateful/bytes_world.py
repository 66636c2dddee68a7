"""Both halves of the connector around real bytes, in an engine that knows what they should be.

Manager, service, scheduler half, worker halves, transfer engines, routes and control block are
those of production. Threads, clocks and disks are played (:mod:`tests.stateful.stepping`,
:mod:`tests.stateful.moody_tier`): chance says who gets on, between any two of their turns and
in the middle of copies. So deadlines pass, processes die, requests end and caches are reset
whatever else is going on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvtier.connector.aggregate import OutputAggregator
from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.schedule.groups import CacheGroup, SchedulerOptions
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.connector.storage import Storage
from kvtier.connector.worker import ConnectorWorker, WorkerOptions
from kvtier.manager import ManagerLimits, TieredOffloadingManager, TierState
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.anonymous import open_anonymous
from kvtier.policies import (
    ChunkCopy,
    CopyState,
    LadderPlacement,
    PolicyContext,
    Promotion,
    build_eviction,
)
from kvtier.replay._batching import Batch, BatchLimits
from kvtier.replay._requests import ReplayRequest
from kvtier.testing.invariants import check_manager
from kvtier.transfer import BetweenTiers, EngineLimits, FromTier, Relay, ToTier, routes
from tests.stateful.aborting_engine import AbortingEngine
from tests.stateful.contents import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    STRIPE_NBYTES,
    Contents,
)
from tests.stateful.moody_tier import MoodyTier, digest
from tests.stateful.stepping import (
    SlowCopier,
    SlowTruth,
    Stage,
    SteppedEngine,
    SteppedPool,
)

if TYPE_CHECKING:
    import pytest

DOCUMENTS, LONGEST = 4, 5
REST_STEPS = 4000
PATIENCE_S = 600.0
"""Longer than anything hangs."""


class Moving(LadderPlacement):
    """Moves a chunk up in place of copying it."""

    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion(keep_source=False)


class Passing(LadderPlacement):
    """Lets what comes up go again once it is loaded."""

    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion(keep_source=True, stay=False)


@dataclass(eq=False, slots=True)
class Load:
    """A load that an engine waits for: what it is to bring, and how many ranks are done."""

    request: ReplayRequest
    epoch: int
    blocks: Sequence[int]
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Kv:
    """What a request has computed or loaded: of which epoch, and what each block holds."""

    epoch: int
    names: dict[int, int]


class BytesWorld:
    """One engine from its start to its end.

    Args:
        seed: Of all that is left to chance.
        patch: Lets the stage take over clocks and threads.
        calm: Whether nothing goes wrong, so that no load may fail.

    Attributes:
        checked_blocks: Blocks that were loaded, and compared with what they should hold.
    """

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, *, calm: bool = False) -> None:
        self._open = ExitStack()
        self.stage = stage = Stage(seed, calm=calm)
        stage.take_over(patch)
        self._draw = draw = stage.draw
        patch.setattr(SlowCopier, "failing", 0.0 if calm else draw.choice([0.0, 0.002]))
        patch.setattr(SteppedPool, "hanging", 0.0 if calm else draw.choice([0.0, 0.01]))
        self._ranks = ranks = draw.choice([1, 1, 2])
        self._blocks = draw.randint(16, 34)
        self._contents = Contents(ranks=ranks, blocks=self._blocks)
        capacities = [draw.randint(5, 14), *self._draw_some(4, 24, most=2)]
        self._geometry = self._shape(capacities)
        self._memory_file = self._make_memory_file()
        self._region = self._map_region()
        self._region.control = SlowTruth.beside(self._region, stage)
        self._disks = [
            MoodyTier(stage, f"disk{at}", slots, self._geometry.slot_nbytes)
            for at, slots in enumerate(capacities[1:])
        ]
        self._manager = self._make_manager(capacities)
        self._service = CacheService(
            self._make_storage(),
            tokens_per_chunk=BLOCK_TOKENS * BLOCKS_PER_CHUNK,
            retain_s=draw.choice([0.0, 0.0, 0.5]),
            close_timeout_s=PATIENCE_S,
        )
        self._scheduler = self._make_scheduler()
        limits = BatchLimits(self._blocks, BLOCK_TOKENS, step_tokens=24, requests=8)
        self._engine = AbortingEngine(self._scheduler, limits)
        self._workers = [self._make_worker(rank) for rank in range(ranks)]
        self._aggregator = OutputAggregator(ranks)
        self._lag = draw.choice([0, 0, 1])
        self._said: list[tuple[WorkerOutput, list[set[str]]]] = []
        self._loads: dict[str, Load] = {}
        self._kv: dict[str, Kv] = {}
        self._epoch = self._born = self._steps = self.checked_blocks = 0
        self._ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def run(self, steps: int) -> None:
        """Serve requests for so many steps, then let everything end."""
        turns = self._take_steps()
        while self._steps < steps:
            self.stage.act()
            if self.stage.chance(0.15):
                next(turns)
        self._end(turns)

    # -- building ------------------------------------------------------------------------------

    def _draw_some(self, least: int, greatest: int, *, most: int) -> list[int]:
        return [self._draw.randint(least, greatest) for _ in range(self._draw.randint(1, most))]

    def _shape(self, capacities: Sequence[int]) -> RegionGeometry:
        return RegionGeometry(
            slots=capacities[0],
            slot_nbytes=STRIPE_NBYTES * self._ranks,
            stripe_nbytes=STRIPE_NBYTES,
            stripes=self._ranks,
            ranks=self._ranks,
            relay_slots=4 if len(capacities) > 2 else 0,
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
        policies = ["lru", "hedged-lhd"]
        if not self.stage.calm:
            policies.append("prefix-lru")  # whose promises may not hold: it evicts leaves only
        eviction = draw.choice(policies)
        names = ["ram", *(disk.name for disk in self._disks)]
        tiers = [
            TierState(name, index, capacity, build_eviction(eviction, capacity=capacity))
            for index, (name, capacity) in enumerate(zip(names, capacities, strict=True))
        ]
        kind = draw.choice([LadderPlacement, LadderPlacement, Moving, Passing])
        through = kind is not Moving and draw.random() < 0.5
        return TieredOffloadingManager(
            tiers,
            placement=kind(tiers=len(tiers), write="through" if through else "evict"),
            limits=ManagerLimits(
                pin_budget=draw.randint(capacities[0] // 2, capacities[0]),
                reserve=draw.choice([0.0, 0.3]),
                queue=draw.randint(2, 16),
                batch=draw.choice([2, 256]),
                retained=draw.randint(0, 3),
                load_timeout_s=draw.choice([0.2, 2.0]),
                store_timeout_s=draw.choice([0.2, 4.0]),
                patience_lookups=20,
                patience_stores=3,
                streams=draw.random() < 0.7,
            ),
            truth=self._region.control,
            record_events=False,
        )

    def _make_storage(self) -> Storage:
        region, disks = self._region, self._disks
        ways: dict[tuple[str, str], routes.Route] = {}
        for disk in disks:
            ways["ram", disk.name] = ToTier(region, disk)
            ways[disk.name, "ram"] = FromTier(region, disk, region.control)
        if relay := self._geometry.relay:
            upper, lower = disks
            ways[upper.name, lower.name] = BetweenTiers(upper, lower, Relay(region, relay))
        slot_nbytes = self._geometry.slot_nbytes
        engine = SteppedEngine(
            self.stage,
            "storage",
            ways,
            chunk_nbytes=slot_nbytes,
            limits=EngineLimits(
                queued_bytes=self._draw.choice([6, 1000]) * slot_nbytes,
                running_bytes=self._draw.choice([2, 1000]) * slot_nbytes,
                breaker_failures=3,
                breaker_backoff_s=0.5,
            ),
            openers=[disk.aopen for disk in disks],
            closers=[disk.aclose for disk in disks],
        )
        pool = SteppedPool(self.stage, 1, name="kvtier-unused")
        return Storage(self._manager, engine, disks, pool, region, None, None)

    def _make_scheduler(self) -> ConnectorScheduler:
        return ConnectorScheduler(
            self._service,
            SchedulerOptions(
                groups=(CacheGroup(BLOCK_TOKENS),),
                tokens_per_hash=BLOCK_TOKENS,
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                ranks=self._ranks,
                shares_blocks=self._draw.random() < 0.5,
            ),
        )

    def _make_worker(self, rank: int) -> ConnectorWorker:
        tensors = self._contents.memories[rank].tensors
        worker = ConnectorWorker(
            self._map_region(),
            WorkerOptions(
                rank=rank,
                blocks=self._blocks,
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                groups=(tuple(tensors),),
                close_timeout_s=PATIENCE_S,
            ),
        )
        worker.register_kv_caches(tensors)
        return worker

    # -- steps of the engine; others get on where these yield ----------------------------------

    def _take_steps(self) -> Iterator[None]:
        while True:
            self._steps += 1
            yield from self._step()
            self._something_happens()
            self._check_tiers()
            check_manager(self._manager)

    def _step(self) -> Iterator[None]:
        batch = self._engine.schedule()
        metadata = self._scheduler.build_connector_meta(batch)
        for req_id in batch.preempted_req_ids:
            self._kv.pop(req_id, None)
        self._note_loads()
        yield
        for worker in self._workers:
            worker.handle_preemptions(metadata)
            yield
        self._check_blocks()
        self._compute(batch)
        yield
        outputs, loaded = [], []
        for worker in self._workers:
            worker.start_load(metadata)
            worker.defer_stores(metadata)
            yield
            loaded.append(worker.get_finished(batch.finished_req_ids)[1])
            outputs.append(worker.take_output())
            yield
        self._engine.computed(batch, self.stage.now_s)
        self._said.append((self._aggregator.aggregate(outputs), loaded))
        while len(self._said) > self._lag:
            self._hear(*self._said.pop(0))
        yield

    def _note_loads(self) -> None:
        for request in self._engine.loading:
            if request.request_id not in self._loads:
                blocks = request.blocks[: request.loaded_tokens // BLOCK_TOKENS]
                self._loads[request.request_id] = Load(request, self._epoch, blocks)

    def _compute(self, batch: Batch) -> None:
        """Fill the blocks of a step; who has KV of two epochs makes what no key may name."""
        for req_id, tokens in batch.num_scheduled_tokens.items():
            request = self._engine.requests[req_id]
            kv = self._kv.setdefault(req_id, Kv(self._epoch, {}))
            if kv.epoch != self._epoch:
                kv = self._kv[req_id] = Kv(-1, kv.names)
            start = request.num_computed_tokens
            for at in range(start // BLOCK_TOKENS, -(-(start + tokens) // BLOCK_TOKENS)):
                name = self._contents.name(request, at, self._epoch)
                kv.names[at] = name if kv.epoch == self._epoch else self._draw.getrandbits(60)
                self._contents.fill(request.blocks[at], kv.names[at])

    def _hear(self, output: WorkerOutput, loaded: Sequence[set[str]]) -> None:
        """Take what the workers said."""
        assert not (self.stage.calm and output.failed_loads), output.failed_loads
        self._scheduler.update_connector_output(output)
        for req_ids in loaded:
            for req_id in req_ids:
                self._loads[req_id].ranks += 1
        lost = {load.request_id: load.block_ids for load in output.failed_loads.values()}
        for req_id, load in list(self._loads.items()):
            if load.ranks == self._ranks:
                del self._loads[req_id]
                names = self._check_load(load, lost.get(req_id, frozenset()))
                if self._engine.ended(load.request, failed=req_id in lost):
                    self._kv[req_id] = Kv(load.epoch, names)

    # -- what happens in between ---------------------------------------------------------------

    def _something_happens(self) -> None:
        alive = list(self._engine.requests.values())
        if self._ending:
            for request in alive:
                self._engine.abort(request)
            return
        if len(alive) < 7 and self.stage.chance(0.5):
            self._arrive()
        if alive and self.stage.chance(0.06):
            self._engine.abort(self._draw.choice(alive))
        if not self.stage.calm and self.stage.chance(0.03):
            self._epoch += 1
            self._scheduler.reset_cache()

    def _arrive(self) -> None:
        self._born += 1
        document, chunks = self._draw.randrange(DOCUMENTS), self._draw.randint(1, LONGEST)
        hashes = [
            hashlib.blake2b(b"%d.%d" % (document, block), digest_size=32).digest()
            for block in range(chunks * BLOCKS_PER_CHUNK)
        ]
        request = ReplayRequest(
            request_id=str(self._born),
            arrival_s=0.0,
            num_prompt_tokens=len(hashes) * BLOCK_TOKENS + self._draw.randint(0, 3),
            output_tokens=self._draw.randint(1, 6),
            block_hashes=hashes,
        )
        self._contents.learn(request)
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
        self._come_to_rest(turns)
        self._check_rest()
        for worker in self._workers:
            worker.shutdown()
        self._service.shutdown()
        self._check_disks()

    def _come_to_rest(self, turns: Iterator[None]) -> None:
        began = self._steps
        while self._is_busy or self._steps < began + 3:  # in which the last ends are told
            assert self._steps < began + REST_STEPS, "it does not come to rest"
            for _ in range(5):
                self.stage.act()
            next(turns)

    @property
    def _is_busy(self) -> bool:
        if self._said or not self._engine.is_idle or self._manager.snapshot().jobs:
            return True
        return self._scheduler.has_pending_work()

    # -- what must hold ------------------------------------------------------------------------

    def _check_load(self, load: Load, lost: frozenset[int]) -> dict[int, int]:
        """Check every block that a load is said to have brought; return what they hold."""
        names: dict[int, int] = {}
        for at, block in enumerate(load.blocks):
            names[at] = self._contents.name(load.request, at, load.epoch)
            if block not in lost:
                self.checked_blocks += 1
                assert self._contents.holds(block, names[at]), (
                    f"block {at} of request {load.request.request_id} was not loaded right"
                )
        return names

    def _check_blocks(self) -> None:
        """Check what requests have, which nobody may have written to since."""
        alive = self._engine.requests
        self._kv = {req_id: kv for req_id, kv in self._kv.items() if req_id in alive}
        for req_id, kv in self._kv.items():
            blocks = alive[req_id].blocks
            for at, name in kv.names.items():
                assert self._contents.holds(blocks[at], name), (
                    f"block {at} of request {req_id} was written to"
                )

    def _check_tiers(self) -> None:
        """Check every slot that is a hit, byte by byte."""
        for tier in self._manager._ladder.tiers:
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
        for tier in self._manager._ladder.tiers:
            assert not tier.writing
            assert tier.slots.free + len(tier.copies) == tier.slots.capacity
        assert not self._service.statistics().internal_errors

    def _check_disks(self) -> None:
        """Check that a restart would find nothing that its key does not name."""
        for disk in self._disks:
            for key, payload, checksum in disk.held.values():
                if digest(key, memoryview(payload)) == checksum:
                    assert payload == self._contents.wanted(key, self._epoch)
