"""The built-in placement policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Placement, PolicyContext, Promotion

__all__ = ["TieredPlacement"]


class TieredPlacement(Placement):
    """Demotes chunks after their store or before their eviction; copies or moves hits to RAM.

    If a promotion keeps the slower copy, the next demotion needs no write. If the promotion
    moves the chunk, the next demotion writes the chunk again. On agent traffic, moves cause
    four to ten times as many writes as copies, and gain at most 1.6 points of hit ratio. Use
    moves if the tiers have similar sizes, because second copies then waste much of the
    capacity.

    Args:
        tiers: Number of tiers, RAM included.
        write: ``through`` copies a chunk to every slower tier as soon as it is stored, so that
            the chunk survives a killed process. ``evict`` copies a victim to the next tier if
            no slower tier has the chunk.
        write_after: With ``through``, the number of uses after which a chunk is copied. The
            store is the first use.
        promote: ``copy`` keeps the copy in the slower tier; ``move`` removes this copy.
    """

    def __init__(
        self,
        tiers: int,
        *,
        write: Literal["through", "evict"] = "through",
        write_after: int = 1,
        promote: Literal["copy", "move"] = "copy",
    ) -> None:
        super().__init__(tiers)
        through = write == "through"
        self._slower = tuple(range(1, tiers)) if through else ()
        self._last = 0 if through else tiers - 1
        self._write_after = write_after
        self._promotion = Promotion(promote)
        # A derived class may decide any of these chunk by chunk.
        self._places_alike = write_after == 1 and self._has_own("place")
        self._promotes_alike = self._has_own("promote")
        self._demotes_alike = self._has_own("demote")

    @property
    @override
    def places_used(self) -> bool:
        return bool(self._slower) and self._write_after > 1

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return self._slower if copy.hits + 1 >= self._write_after else ()

    @override
    def place_many(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext
    ) -> Sequence[Sequence[int]]:
        if not self._places_alike:
            return super().place_many(copies, ctx)
        return [self._slower] * len(copies)

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return self._promotion

    @override
    def promote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[Promotion]:
        if not self._promotes_alike:
            return super().promote_many(copies, source, ctx)
        return [self._promotion] * len(copies)

    @override
    def demotion_targets(self, source: int) -> Sequence[int]:
        return (source + 1,) if source < self._last else ()

    @override
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        return source + 1 if source < self._last else None

    @override
    def demote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[int | None]:
        if not self._demotes_alike:
            return super().demote_many(copies, source, ctx)
        return [source + 1 if source < self._last else None] * len(copies)

    def _has_own(self, name: str) -> bool:
        """Return whether no derived class overrides the method ``name``."""
        return getattr(type(self), name) is getattr(TieredPlacement, name)
