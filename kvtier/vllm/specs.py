"""What the scheduler half tells the worker half about RAM slots."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import LoadStoreSpec

__all__ = ["SlotLoadStoreSpec"]


class SlotLoadStoreSpec(LoadStoreSpec):
    """RAM slots of a job's chunks; pickled to every worker, so plain lists.

    Args:
        slots: One per chunk, in the job's order.
        generations: Stamp per slot: what a store leaves, what a load insists on.
    """

    def __init__(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self.slots = list(slots)
        self.generations = list(generations)

    def __repr__(self) -> str:
        return f"SlotLoadStoreSpec({self.slots})"
