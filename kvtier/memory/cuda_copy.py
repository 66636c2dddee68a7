"""Copies between KV blocks on a CUDA device and RAM slots.

A job's blocks consist of many *fragments*: ranges that are contiguous both in KV memory and in
a slot (:mod:`kvtier.memory.fragments`). One torch call per fragment would take longer than the
copy itself, so one call queues many fragments. The method of copying is chosen at start
(:mod:`kvtier.memory.cuda_choice`).

**Order.** Stores have their own streams, and loads have others. So a load waits neither for
stores nor for the fences of stores. On each stream, a job's copies begin after the job's fence:
the point that the compute stream had reached when the job was submitted. Before a thread starts
a job, the thread waits for the last copy of the previous job. So a stream never has work of two
jobs. A store and a load may run in any order; :mod:`kvtier.connector.device` explains why this
is correct.

**Planning.** A job is planned and queued gradually, so that the GPU copies some fragments while
the next are planned.

**Torch as a fallback.** Batches of copies need page-locked memory. If the slots are
not page-locked, or the driver has no batches, torch copies, with one staging buffer on the
device per direction (:class:`~kvtier.memory.copy.BlockCopier`).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
from typing_extensions import override

from kvtier.memory.copy import BlockCopier, Copier, KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, GroupCopy
from kvtier.memory.cuda_choice import Choice, choose_methods
from kvtier.memory.cuda_methods import STAGING_NBYTES, Method, Streams
from kvtier.memory.fragments import FragmentPlanner, Fragments
from kvtier.memory.host_region import HostRegion
from kvtier.memory.pinning import SEGMENT_NBYTES, PinnedSlots
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import Driver, Fence

__all__ = ["CudaCopier"]

_MOST_SAMPLED: Final = 4096


class CudaCopier(Copier):
    """Copies blocks between KV memory on a GPU and RAM slots; page-locks the slots if possible.

    A store and a load may run at the same time, in two threads.

    Args:
        driver: The GPU.
        kv: The rank's KV memory.
        region: The RAM slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.
        segment_nbytes: Largest number of bytes to page-lock at once.

    Raises:
        UnsupportedError: A group's block does not fit its place in the slot.

    Attributes:
        store_method: Name of the method that copies stores.
        load_method: Name of the method that copies loads.
    """

    is_concurrent = True

    def __init__(
        self,
        driver: Driver,
        kv: KVBlocks,
        region: HostRegion,
        *,
        share: RankShare,
        blocks_per_chunk: int,
        segment_nbytes: int = SEGMENT_NBYTES,
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self._driver = driver
        geometry, address = region.geometry, region.shared.address
        planner = FragmentPlanner(
            kv, address, geometry, share=share, blocks_per_chunk=blocks_per_chunk
        )
        by_torch = partial(
            BlockCopier,
            kv,
            region,
            share=share,
            blocks_per_chunk=blocks_per_chunk,
            staging_nbytes=STAGING_NBYTES,
        )
        with ExitStack() as opened:
            self._slots = PinnedSlots(driver, address, geometry, segment_nbytes=segment_nbytes)
            opened.callback(self._slots.close)
            self.is_pageable = not self._slots.is_locked
            chosen = Choice(None, None)
            if not self.is_pageable:
                blocks = min(len(kv.tensors[0]), geometry.slots * blocks_per_chunk)
                sample = _sample(planner, blocks, blocks_per_chunk)
                chosen = choose_methods(driver, sample, self._slots.edges)
            self._stores, self._loads = (
                _Direction(driver, planner, method or by_torch(), stores=stores)
                for method, stores in ((chosen.store, True), (chosen.load, False))
            )
            opened.pop_all()
        self.store_method, self.load_method = self._stores.method_name, self._loads.method_name

    @override
    def mark(self) -> Fence:
        return self._driver.mark()

    @override
    def store(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        self._stores.run(plan, after)

    @override
    def load(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        self._loads.run(plan, after)

    @override
    def close(self) -> None:
        self._stores.close()
        self._loads.close()
        self._slots.close()


class _Direction:
    """Runs the copies in one direction, on streams of its own.

    Args:
        driver: The GPU.
        planner: Finds the fragments of a plan.
        method: The method of copying.
        stores: True to copy from the device to the host; False for the other direction.

    Attributes:
        method_name: Name of the method.
    """

    def __init__(
        self,
        driver: Driver,
        planner: FragmentPlanner,
        method: Method | BlockCopier,
        *,
        stores: bool,
    ) -> None:
        # A request waits for its load; a store has time until its blocks are needed.
        kernels = driver.open_stream(is_urgent=not stores)
        self._streams = Streams(driver.open_stream(), kernels)
        self._planner = planner
        self._method = method
        self._stores = stores
        self.method_name = "torch" if isinstance(method, BlockCopier) else method.name

    def run(self, plan: BlockCopyPlan, after: Fence | None) -> None:
        """Run the copies of ``plan`` after a fence and wait for them."""
        self._streams.run(partial(self._queue, plan), after=after)

    def close(self) -> None:
        """Release torch's views of the slots, if torch copies."""
        if isinstance(self._method, BlockCopier):
            self._method.close()

    def _queue(self, plan: BlockCopyPlan) -> None:
        method, stores = self._method, self._stores
        if isinstance(method, BlockCopier):
            copy = method.store if stores else method.load
            copy(plan, after=None)
            return
        planned = self._planner.plan_gradually(plan, stores=stores, first_nbytes=STAGING_NBYTES)
        for fragments in planned:
            method.queue(self._streams, fragments, stores=stores)


def _sample(planner: FragmentPlanner, blocks: int, blocks_per_chunk: int) -> Fragments:
    """Return fragments between the first slots and the first blocks of KV cache group 0.

    Adjacent blocks in ascending order could merge into one fragment, but engines rarely use
    such blocks. So the blocks are in reverse order.
    """
    numbers = np.arange(min(blocks, _MOST_SAMPLED))
    slots, places = np.divmod(numbers, blocks_per_chunk)
    copy = GroupCopy(0, numbers[::-1], slots, places)
    return planner.plan(BlockCopyPlan([copy], np.unique(slots).tolist()), stores=False)
