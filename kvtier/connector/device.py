"""Runs the jobs of one rank: copies between the rank's KV blocks and RAM slots.

Two entry points for vLLM use this module: the connector's worker side and the worker of the
offloading spec. These entry points receive jobs and report failures in different ways.

**Order of stores and loads.** On a GPU, stores have their own thread and streams, and loads
have others. So a load does not wait for a store, or for the computation before the store. The
protocol orders a store and a load that use the same slot or block:

* A load reads a slot after the store that fills it. The load waits for the slot's generation,
  which the store sets after its copy has ended. The scheduler side plans the load only when all
  ranks have set the generation.
* A store overwrites a slot after the loads that read it. The loads pin the slot's chunk until
  every rank has acknowledged the loads. After a reset, the slot is quarantined until then. A
  rank acknowledges a job after the job's copy has ended.
* A load overwrites a block after the stores that read it. The blocks that a request gets for a
  load are among the step's allocated blocks. So the stores that read these blocks are flushed:
  the model thread waits for the stores (:meth:`DeviceEngine.wait`) before it starts the
  step's loads. A store that outlasts this wait is retracted, so its chunks are never loaded.
* A store reads a block after the load that fills it. The request runs only when every rank has
  acknowledged the load, and the request's stores are planned later.

``tests/stateful/test_bytes_in_any_order.py`` runs both threads in random order, block by block.
On a CPU one thread runs stores and loads, because a second thread would take a processor from
the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvtier.connector.deadline import Deadline
from kvtier.errors import ClosedError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory.copiers import open_copier
from kvtier.memory.copy_plan import plan_copy
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import use_one_torch_thread
from kvtier.os.iopool import IoPool
from kvtier.transfer import EngineLimits, TransferEngine
from kvtier.transfer.device import (
    BlockStore,
    DeviceLoadRoute,
    DeviceStoreRoute,
    LoadPayload,
    StorePayload,
)
from kvtier.transfer.gds_route import GdsLoadRoute
from kvtier.transfer.routes import Route
from kvtier.types import GdsReads, Job, JobId, Outcome, Purpose, TransferResult

if TYPE_CHECKING:
    from kvtier.memory import HostRegion
    from kvtier.memory.copy import KVBlocks
    from kvtier.memory.copy_plan import BlockCopyPlan, Indices
    from kvtier.memory.gds_staging import GdsStaging

__all__ = ["DeviceEngine", "blocks_not_loaded"]

logger = get_logger(__name__)

_COPY_TIMEOUT_S: Final = 60.0
"""Seconds after which a copy counts as failed; a copy normally takes milliseconds."""
_POOLS_S: Final = 1.0
"""Seconds reserved for ending the copying threads after the transfer engine has closed."""
_GDS: Final = "gds"
"""Source tier of a load job that reads some chunks from an NVMe tier."""
_UNBOUNDED: Final = 1 << 62
_NO_LIMITS: Final = EngineLimits(
    queued_bytes=_UNBOUNDED, running_bytes=_UNBOUNDED, breaker_failures=_UNBOUNDED
)
"""Limits of a queue that accepts every job, because an engine cannot handle a refused job."""


class DeviceEngine:
    """Runs one rank's copies between KV blocks and RAM slots.

    Stores are held until :meth:`begin_stores`, after a forward pass, and then start together as
    one job. A model on a CPU needs all processors during the pass, and a single job interrupts
    the model only once.

    The model thread calls all methods. Only the ``wait`` methods and :meth:`close` block.

    Args:
        kv: The rank's KV memory.
        region: The RAM tier; closed with this object.
        rank: This rank.
        share: The rank's part of every slot.
        blocks_per_chunk: Number of blocks of a chunk.
        close_timeout_s: Largest number of seconds that :meth:`close` may take.
        gds: Reads chunks from an NVMe tier into blocks; closed with this object. None if GDS
            reads are not used.

    Raises:
        UnsupportedError: The KV memory does not fit the region's slots.
        KvtierError: A thread does not start. After any error ``region`` and ``gds`` are still
            open.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        kv: KVBlocks,
        region: HostRegion,
        *,
        rank: int,
        share: RankShare,
        blocks_per_chunk: int,
        close_timeout_s: float,
        gds: GdsStaging | None = None,
    ) -> None:
        self._region = region
        if share.parts == 1:  # otherwise other ranks use most of the pages
            region.map_pages()
        self._blocks_per_chunk = blocks_per_chunk
        self._close_timeout_s = close_timeout_s
        self._chunk_nbytes = region.geometry.block_nbytes * blocks_per_chunk // share.parts
        self._rank = rank
        self._gds = gds
        self._control = region.control
        with ExitStack() as opened:
            self._copier = open_copier(
                kv, region, share=share, blocks_per_chunk=blocks_per_chunk
            )
            opened.callback(self._copier.close)
            if self._copier.is_pageable:
                self._control.report_pageable(rank)
            names = ["store", "load"] if self._copier.is_concurrent else ["copy"]
            if gds is not None:
                names.insert(0, "gds")
            self._pools: list[IoPool] = []
            for name in names:
                pool = IoPool(1, name=f"kvtier-{name}-{rank}", prepare=use_one_torch_thread)
                opened.callback(pool.close, timeout_s=close_timeout_s)
                self._pools.append(pool)
            self._engine = self._open_engine()
            opened.pop_all()
        if gds is not None:
            self._control.report_gds(rank, gds.part)
        self._held: list[BlockStore] = []
        self._stores: dict[JobId, list[BlockStore]] = {}
        self._carriers: dict[JobId, JobId] = {}
        self._retracted: set[JobId] = set()
        self._ended: list[TransferResult] = []

    def _open_engine(self) -> TransferEngine:
        """Return a new transfer engine that runs the copies."""
        rank, control, gds = self._rank, self._control, self._gds
        reader, store, load = self._pools[0], self._pools[gds is not None], self._pools[-1]
        hasher = None if gds is None else gds.store_hasher
        loads = DeviceLoadRoute(self._copier, control, rank=rank, pool=load)
        routes: dict[tuple[str, str], Route] = {
            ("gpu", "ram"): DeviceStoreRoute(
                self._copier, control, rank=rank, pool=store, hasher=hasher
            ),
            ("ram", "gpu"): loads,
        }
        self._waiting: list[DeviceLoadRoute | GdsLoadRoute] = [loads]
        if gds is not None:
            reads = GdsLoadRoute(gds, loads, control, rank=rank, reader=reader, pool=load)
            routes[_GDS, "gpu"] = reads
            self._waiting.append(reads)
        name = f"device-{rank}"
        return TransferEngine(name, routes, chunk_nbytes=self._chunk_nbytes, limits=_NO_LIMITS)

    def plan(
        self,
        block_ids: Sequence[int] | Indices,
        group_sizes: Sequence[int],
        first_blocks: Sequence[int],
        slots: Sequence[int],
    ) -> BlockCopyPlan:
        """Return the plan for copies between the blocks ``block_ids`` and ``slots``.

        The sequences must not change before the copies end.

        Args:
            block_ids: Block numbers, group after group.
            group_sizes: Number of blocks of each group.
            first_blocks: For each group, the index within the request of the first block.
            slots: Slots of the chunks, group after group.

        Raises:
            UnsupportedError: Blocks and slots do not match.
        """
        return plan_copy(
            block_ids, group_sizes, first_blocks, slots, blocks_per_chunk=self._blocks_per_chunk
        )

    def store(self, job_id: JobId, plan: BlockCopyPlan, generations: Sequence[int]) -> None:
        """Queue a copy from blocks to slots.

        The copy starts at the next call of :meth:`begin_stores`, :meth:`load` or a waiting
        method, after the work that is in the engine's stream then.

        Args:
            job_id: Unique among the jobs of this rank.
            plan: The copies.
            generations: The generation that the store gives each slot.
        """
        self._held.append(BlockStore(job_id, plan, generations))

    def begin_stores(self, awaited: Collection[JobId] = ()) -> None:
        """Start all held stores: the ``awaited`` stores as one job, the others as another."""
        if not self._held:
            return
        held, self._held = self._held, []
        for wanted in (True, False):
            stores = [store for store in held if (store.job_id in awaited) is wanted]
            if stores:
                self._carry(stores)

    def load(
        self,
        job_id: JobId,
        plan: BlockCopyPlan,
        generations: Sequence[int],
        *,
        wait_s: float = 0.0,
        gds: GdsReads | None = None,
    ) -> None:
        """Start a copy from slots to blocks; it runs after the work now in the engine's stream.

        Args:
            job_id: Unique among the jobs of this rank.
            plan: The copies.
            generations: The generation that each slot must have.
            wait_s: Longest time to wait for the slots to get these generations, and for reads
                of ``gds``.
            gds: The chunks to read from an NVMe tier. For each of these chunks, the plan has a
                negative number instead of a slot.

        Raises:
            UnsupportedError: This rank has no GDS reads.
        """
        self.begin_stores()
        if gds is not None and self._gds is None:
            raise UnsupportedError("this rank cannot read chunks from an NVMe tier")
        payload = LoadPayload(plan, self._copier.mark(), generations, wait_s, gds)
        timeout_s = _COPY_TIMEOUT_S + wait_s
        job = _job(job_id, Purpose.LOAD, plan.slots, payload, timeout_s)
        self._engine.submit(job if gds is None else job._replace(source=_GDS))

    # -- results -------------------------------------------------------------------------------

    def fail(
        self,
        job_id: JobId,
        purpose: Purpose,
        slots: Sequence[int],
        generations: Sequence[int],
        error: Exception,
    ) -> None:
        """Record that a job could not be started; :meth:`poll` then returns it as failed.

        Args:
            job_id: A job that :meth:`poll` has not returned.
            purpose: Whether the job was a store or a load.
            slots: The job's slots.
            generations: The generations of these slots.
            error: The error.
        """
        self._release_slots(purpose, slots, generations, failed=True)
        outcomes = [Outcome.FAILED] * len(slots)
        text = f"{type(error).__name__}: {error}"
        destination = "ram" if purpose is Purpose.STORE else "gpu"
        self._ended.append(
            TransferResult(job_id, outcomes, error=text, destination=destination)
        )

    @property
    def idle(self) -> bool:
        """Whether every job ended."""
        return self._engine.idle and not self._held and not self._ended

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in order; ``destination`` is ram or gpu."""
        ended, self._ended = self._ended, []
        for result in self._engine.poll():
            if result.settled:
                ended += self._results(result)
        return ended

    def retract(self, job_ids: Iterable[JobId]) -> None:
        """Make the stores ``job_ids`` fail, because blocks changed before the stores ended.

        Stores that :meth:`poll` has already returned are ignored.
        """
        known = self._carriers.keys() | {store.job_id for store in self._held}
        self._retracted |= known.intersection(job_ids)

    def wait(self, job_ids: Collection[JobId]) -> bool:
        """Wait for the jobs ``job_ids`` before the engine overwrites their blocks.

        Unknown ids are ignored. A store that does not end in time is retracted: the store is
        acknowledged later, but its chunks never count as complete.

        Returns:
            Whether every job ended. If not, a copy may still read the blocks.
        """
        self.begin_stores(frozenset(job_ids))
        carriers = {self._carriers.get(job_id, job_id) for job_id in job_ids}
        if self._engine.wait(carriers, timeout_s=_COPY_TIMEOUT_S):
            return True
        logger.error("stores %s did not end in %.0f s", sorted(job_ids), _COPY_TIMEOUT_S)
        self.retract(job_ids)
        return False

    def wait_for_stores(self) -> bool:
        """Wait until no store reads blocks, or until the time limit.

        Returns:
            Whether the blocks may be freed. If not, a store may still read them.
        """
        return self.wait({*self._carriers, *(store.job_id for store in self._held)})

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until :meth:`poll` has a result, or no job is left.

        Returns:
            False when ``timeout_s`` passed first.
        """
        self.begin_stores()
        return bool(self._ended) or self._engine.wait_any(timeout_s=timeout_s)

    def close(self) -> None:
        """Wait for running copies and release the memory. Idempotent.

        Loads that wait for chunks fail at once. The memory is freed only if copies end in time.
        If one part fails to close, the other parts are closed too.
        """
        self.begin_stores()
        for route in self._waiting:
            route.wait_no_more()
        timeout_s = self._close_timeout_s
        deadline = Deadline(timeout_s)
        self._engine.close(timeout_s=deadline.share_s(_POOLS_S))
        copies_ended = [pool.close(timeout_s=deadline.left_s()) for pool in self._pools]
        if not all(copies_ended):
            logger.error("copies did not end in %.0f s: their memory is not freed", timeout_s)
            return
        with ExitStack() as parts:  # the last callback runs first
            parts.callback(self._region.close)
            parts.callback(self._copier.close)
            if self._gds is not None:
                parts.callback(self._gds.close)

    def _release_slots(
        self,
        purpose: Purpose,
        slots: Sequence[int],
        generations: Sequence[int],
        *,
        failed: bool,
    ) -> None:
        """Record in the control block that a job on ``slots`` ended, and which loads failed."""
        held = [slot for slot, generation in zip(slots, generations, strict=True) if generation]
        if failed and purpose is Purpose.LOAD:
            self._control.record_failed_loads(self._rank, held, list(filter(None, generations)))
        self._control.acknowledge(self._rank, held)

    def _carry(self, stores: list[BlockStore]) -> None:
        """Submit several stores as one job, which gets the id of the first store."""
        slots: list[int] = []
        for store in stores:
            slots += store.plan.slots
        # Draft layers write blocks after the store was queued, so the fence is taken now.
        payload = StorePayload(stores, self._copier.mark())
        carrier = _job(stores[0].job_id, Purpose.STORE, slots, payload, _COPY_TIMEOUT_S)
        try:
            self._engine.submit(carrier)
        except ClosedError as error:
            for store in stores:
                self.fail(
                    store.job_id, Purpose.STORE, store.plan.slots, store.generations, error
                )
            return
        self._stores[carrier.job_id] = stores
        for store in stores:
            self._carriers[store.job_id] = carrier.job_id

    def _results(self, result: TransferResult) -> Iterator[TransferResult]:
        """Yield the result of each store or load in a job of the transfer engine."""
        stores = self._stores.pop(result.job_id, None)
        if stores is None:
            yield self._part(result, result.job_id, result.outcomes)
            return
        at = 0
        for store in stores:
            del self._carriers[store.job_id]
            outcomes = result.outcomes[at : at + len(store.plan.slots)]
            at += len(outcomes)
            if store.job_id in self._retracted:
                self._retracted.discard(store.job_id)
                self._control.retract(self._rank, store.plan.slots, store.generations)
                outcomes = [Outcome.OVERWRITTEN] * len(outcomes)
            yield self._part(result, store.job_id, outcomes)

    def _part(
        self, result: TransferResult, job_id: JobId, outcomes: Sequence[Outcome]
    ) -> TransferResult:
        """Return the result of job ``job_id``, which ``result`` covers."""
        done = outcomes.count(Outcome.DONE)
        return result._replace(
            job_id=job_id,
            outcomes=outcomes,
            nbytes=done * self._chunk_nbytes,
            seconds=result.seconds * len(outcomes) / max(len(result.outcomes), 1),
            error="" if done == len(outcomes) else result.error,
        )


def _job(
    job_id: JobId, purpose: Purpose, slots: Sequence[int], payload: object, timeout_s: float
) -> Job:
    """Return a job of the transfer engine that copies between the device and RAM slots."""
    stores = purpose is Purpose.STORE
    return Job(
        job_id=job_id,
        purpose=purpose,
        source="gpu" if stores else "ram",
        destination="ram" if stores else "gpu",
        keys=(),
        source_slots=slots,
        destination_slots=slots,
        timeout_s=timeout_s,
        payload=payload,
    )


def blocks_not_loaded(plan: BlockCopyPlan, outcomes: Sequence[Outcome]) -> frozenset[int]:
    """Return the blocks of the chunks that were not copied."""
    missing = {
        slot
        for slot, outcome in zip(plan.slots, outcomes, strict=True)
        if outcome is not Outcome.DONE
    }
    return frozenset(
        int(block)
        for copy in plan.groups
        for block, slot in zip(copy.blocks, copy.slots, strict=True)
        if int(slot) in missing
    )
