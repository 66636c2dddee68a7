"""What the scheduler half tells the worker half about RAM slots."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.vllm.contract import LoadStoreSpec

__all__ = ["SlotLoadStoreSpec"]


class SlotLoadStoreSpec(LoadStoreSpec):
    """RAM slots of a job's chunks; pickled to every worker, so plain lists.

    Args:
        slots: One per chunk, in the job's order.
        generations: Stamp per slot: what a store leaves, what a load insists on.
        wait_s: How long the slots of a load may take to bear their stamps.
        in_step: Whether a load happens within the forward pass of its step.
    """

    def __init__(
        self,
        slots: Sequence[int],
        generations: Sequence[int],
        wait_s: float = 0.0,
        *,
        in_step: bool = False,
    ) -> None:
        self.slots = list(slots)
        self.generations = list(generations)
        self.wait_s = wait_s
        self.in_step = in_step

    @staticmethod
    def medium() -> str:
        """Name the memory the slots are in; nobody asks since vLLM 0.26."""
        return "CPU"

    def __repr__(self) -> str:
        return f"SlotLoadStoreSpec({self.slots})"
