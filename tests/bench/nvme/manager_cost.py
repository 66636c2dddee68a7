"""What a chunk costs in the scheduler's thread, where every request waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ManagerCost", "ManagerPeer", "manager_cost"]

ManagerPeer = Literal["kvtier", "kvtier_default", "native_lru"]
"""kvtier with LRU; kvtier with the policy that a tier has unless it says; vLLM's, with LRU."""


@dataclass(frozen=True, slots=True)
class ManagerCost:
    """Microseconds per chunk.

    Attributes:
        store_us: Of a request that is looked up in vain and stored.
        load_us: Of a request that is found and loaded.
    """

    store_us: float
    load_us: float


def manager_cost(peer: ManagerPeer) -> ManagerCost:
    """Measure one manager, in this process."""
    from tests.bench.nvme.manager_loop import measure  # noqa: PLC0415 - imports vLLM

    return measure(peer)
