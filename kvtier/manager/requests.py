"""What the manager remembers about one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, TypeAlias

from kvtier.keys import GROUP_NBYTES, ChunkKey, is_single_group
from kvtier.manager.runs import by_group
from kvtier.policies import ChunkCopy
from kvtier.policies.base import RequestTerms
from kvtier.types import JobId

__all__ = ["DEFERRED", "BudgetUse", "Phase", "RequestState"]

BudgetUse: TypeAlias = tuple[int, int, int]
"""Changes of grants, RAM slots of direct loads, RAM slots of late promotions."""


class Phase:
    """Where a request stands between its first lookup and its load."""

    OPEN: ClassVar[int] = 0
    """Lookups see every tier."""
    QUEUED: ClassVar[int] = 1
    """It needs chunks promoted and waits for its turn."""
    WAITING: ClassVar[int] = 2
    """Its chunks are on their way to RAM."""
    SETTLED: ClassVar[int] = 3
    """Lookups see RAM only: its hits are pinned, the rest is recomputed."""
    FAILED: ClassVar[int] = 4
    """One of its loads failed: every lookup is a miss until it ends."""


DEFERRED: Final = (Phase.QUEUED, Phase.WAITING)
"""In these phases a lookup has no result yet."""


class RequestState:
    """One request from its first lookup to its end.

    :class:`~kvtier.manager.grants.Grants` writes its phase and what is granted to it.

    Attributes:
        req_id: The engine's id.
        terms: Which tiers it may use.
        phase: One of :class:`Phase`.
        wanted: Chunks that it waits for, in the order of its load.
        wanted_since_s: When it was queued.
        deferred_steps: Steps that it has spent in its phase.
        looked_up_at: Step of its last lookup since it settled.
        granted: RAM copies that are pinned for it.
        pending: How many of them are not whole yet.
        jobs: Promotion jobs planned for it.
        refused_at: What used the budget when its chunks did not fit; None if they did.
        refusals: Stores refused since one was accepted.
        is_miss_counted: Whether its first miss was counted.
        has_kv: Whether the engine has computed or loaded KV for it.
        is_stale: Whether some of that KV is older than a reset, so that nothing is stored.
        has_gap: Whether a chunk it stored was in no tier, so that later chunks were stranded.
        tails: Last chunk stored or loaded, and its depth, per KV cache group.
    """

    __slots__ = (
        "deferred_steps",
        "granted",
        "has_gap",
        "has_kv",
        "is_miss_counted",
        "is_stale",
        "jobs",
        "looked_up_at",
        "pending",
        "phase",
        "refusals",
        "refused_at",
        "req_id",
        "tails",
        "terms",
        "wanted",
        "wanted_since_s",
    )

    def __init__(self, req_id: str, terms: RequestTerms) -> None:
        self.req_id = req_id
        self.terms = terms
        self.phase = Phase.OPEN
        self.wanted: list[ChunkKey] = []
        self.wanted_since_s = 0.0
        self.deferred_steps = 0
        self.looked_up_at = 0
        self.granted: dict[ChunkCopy, None] = {}
        self.pending = 0
        self.jobs: set[JobId] = set()
        self.refused_at: BudgetUse | None = None
        self.refusals = 0
        self.is_miss_counted = False
        self.has_kv = False
        self.is_stale = False
        self.has_gap = False
        self.tails: dict[bytes, tuple[ChunkKey, int]] = {}

    def lose_blocks(self) -> None:
        """Record a preemption: its chunks are loaded, or offered, from the root again.

        The engine does not report when it has KV again, so ``has_kv`` stays.
        """
        self.tails.clear()
        self.has_gap = False
        self.is_stale = False

    def invalidate(self) -> None:
        """Record a reset of the cache."""
        self.is_stale |= self.has_kv
        self.tails.clear()

    def extend(self, copies: Sequence[ChunkCopy]) -> None:
        """Record that ``copies``, sorted by group, follow what was stored or loaded before."""
        if not copies:
            return
        if is_single_group((copies[0].key, copies[-1].key)):
            self._extend_group(copies)
            return
        for part in by_group(copies):
            self._extend_group(part)

    def _extend_group(self, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`extend` for ``copies`` of one group.

        The depth of a chunk that survived a restart is unknown, and the engine itself may have
        had part of the prefix. So the larger of the two depths counts. Loaded chunks may be
        offered again.
        """
        last = copies[-1]
        group = last.key[-GROUP_NBYTES:]
        depth, again = -1, 0
        if group in self.tails:
            tail, depth = self.tails[group]
            again = next((at for at, copy in enumerate(copies, 1) if copy.key == tail), 0)
        self.tails[group] = (last.key, max(last.depth, depth + len(copies) - again))
