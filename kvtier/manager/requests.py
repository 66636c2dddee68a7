"""What the manager remembers about a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, TypeAlias

from kvtier.keys import GROUP_NBYTES, ChunkKey, is_single_group
from kvtier.manager.order import by_group
from kvtier.policies import ChunkCopy
from kvtier.policies.terms import RequestTerms
from kvtier.types import JobId

__all__ = ["DEFERRED", "BudgetUse", "Phase", "RequestState"]

BudgetUse: TypeAlias = tuple[int, int, int]
"""Changes of what is kept for requests, slots of streams, slots of reads that are stuck."""


class Phase:
    """Where a request stands between being looked up and being loaded."""

    ASKING: ClassVar[int] = 0
    """Lookups see every tier."""
    QUEUED: ClassVar[int] = 1
    """Wants chunks brought up and waits for its turn."""
    WAITING: ClassVar[int] = 2
    """Its chunks are on their way."""
    SETTLED: ClassVar[int] = 3
    """Answers show RAM alone: hits are kept for it, all else is recomputed."""
    FAILED: ClassVar[int] = 4
    """A load of its did not work: every answer is a miss until it ends."""


DEFERRED: Final = (Phase.QUEUED, Phase.WAITING)
"""In these a request is asked about in vain."""


class RequestState:
    """One request from its first lookup to its end.

    Attributes:
        req_id: The engine's id.
        terms: What it may do with the tiers.
        phase: One of :class:`Phase`.
        asked: Chunks that it waits to be granted, in the order of its load.
        asked_at: Step of its last lookup since it settled.
        granted: RAM copies kept for it until it loads or ends.
        pending: How many of them are not whole yet.
        jobs: Promotion jobs made for it alone.
        lookups: Steps it has been waiting for its turn.
        queued_s: When it began to wait for it.
        too_dear: What of the budget was held when all it asked for was more than the rest;
            None if it was not.
        refusals: Stores refused since one was accepted.
        missed: Whether its first miss was counted.
        has_kv: Whether the engine has computed or loaded KV for it.
        is_stale: Whether some of that is of before a reset: what it offers is not taken.
        broken: Whether a chunk it stored was in no tier: what follows it was stranded.
        tails: Last chunk stored or loaded, and its depth, per KV cache group.
    """

    __slots__ = (
        "asked",
        "asked_at",
        "broken",
        "granted",
        "has_kv",
        "is_stale",
        "jobs",
        "lookups",
        "missed",
        "pending",
        "phase",
        "queued_s",
        "refusals",
        "req_id",
        "tails",
        "terms",
        "too_dear",
    )

    def __init__(self, req_id: str, terms: RequestTerms) -> None:
        self.req_id = req_id
        self.terms = terms
        self.phase = Phase.ASKING
        self.asked: list[ChunkKey] = []
        self.asked_at = 0
        self.granted: dict[ChunkCopy, None] = {}
        self.pending = 0
        self.jobs: set[JobId] = set()
        self.lookups = 0
        self.queued_s = 0.0
        self.too_dear: BudgetUse | None = None
        self.refusals = 0
        self.missed = False
        self.has_kv = False
        self.is_stale = False
        self.broken = False
        self.tails: dict[bytes, tuple[ChunkKey, int]] = {}

    def remember(self, copies: Sequence[ChunkCopy]) -> None:
        """Note that ``copies`` follow, group by group, on what was stored or loaded before."""
        if not copies:
            return
        if is_single_group((copies[0].key, copies[-1].key)):
            self._follow(copies)
            return
        for part in by_group(copies):
            self._follow(part)

    def _follow(self, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`remember` for ``copies`` of one group.

        Nobody knows how deep a chunk stands that survived a restart, nor whether the engine
        itself had some of the prefix, so it is the deeper of what the two say. What was loaded
        may be offered again.
        """
        last = copies[-1]
        group = last.key[-GROUP_NBYTES:]
        depth, again = -1, 0
        if group in self.tails:
            tail, depth = self.tails[group]
            again = next((at for at, copy in enumerate(copies, 1) if copy.key == tail), 0)
        self.tails[group] = (last.key, max(last.depth, depth + len(copies) - again))
