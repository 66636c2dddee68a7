"""The ladder: new chunks go down, wanted chunks come up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Placement, PolicyContext, Promotion
from kvtier.types import Purpose

__all__ = ["LadderPlacement"]

_COPY: Final = Promotion()
_MOVE: Final = Promotion(keep_source=False)
_PASS: Final = Promotion(stay=False)


class LadderPlacement(Placement):
    """Write-through, selective or on evict; promotion on every n-th hit, by copy or by move.

    Keeping the slower copy on promotion costs nothing on the medium, where moving it means
    writing it again at the next demotion: on agent traffic an exclusive pair writes four to ten
    times as much for at most 1.6 points of hit ratio. Moving pays where the tiers are of like
    size, for then two copies of a chunk waste much of the room.

    Args:
        tiers: Number of tiers, RAM included.
        write: ``through`` copies a chunk to every slower tier as soon as it is stored, which is
            what makes it survive a killed process; ``evict`` copies it to the next tier when
            its room is needed and no slower tier has it.
        write_after: With ``through``, a chunk is copied at its n-th use, its storing included.
        promote: ``copy`` leaves the slower copy where it is, ``move`` takes it away.
        promote_after: A chunk stays in RAM from every n-th hit in the slower tier on; otherwise
            it leaves again once the request it was fetched for has loaded it. Not with
            ``move``, which leaves no copy to count on.
        min_chunks: Chunks of the shortest prefix that is copied down.
    """

    def __init__(
        self,
        tiers: int,
        *,
        write: Literal["through", "evict"] = "through",
        write_after: int = 1,
        promote: Literal["copy", "move"] = "copy",
        promote_after: int = 1,
        min_chunks: int = 1,
    ) -> None:
        super().__init__(tiers)
        through = write == "through"
        self._slower = tuple(range(1, tiers)) if through else ()
        self._last = 0 if through else tiers - 1
        self._write_after = write_after
        self._moves = promote == "move"
        self._promote_after = promote_after
        self._min_chunks = min_chunks
        # A derived class may decide any of these chunk by chunk.
        self._places_alike = write_after == 1 and self._has_own("place")
        self._admits_all = self._has_own("admit")
        self._promotes_alike = promote_after == 1 and self._has_own("promote")
        self._demotes_alike = self._has_own("demote")

    @property
    @override
    def places_used(self) -> bool:
        return bool(self._slower) and self._write_after > 1

    @property
    @override
    def min_chunks(self) -> int:
        return self._min_chunks

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
    def admit_many(
        self, copies: Sequence[ChunkCopy], tier: int, purpose: Purpose, ctx: PolicyContext
    ) -> Sequence[bool]:
        if not self._admits_all:
            return super().admit_many(copies, tier, purpose, ctx)
        return [True] * len(copies)

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        if self._moves:
            return _MOVE
        return _PASS if (copy.hits + 1) % self._promote_after else _COPY

    @override
    def promote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[Promotion]:
        if not self._promotes_alike:
            return super().promote_many(copies, source, ctx)
        return [_MOVE if self._moves else _COPY] * len(copies)

    @override
    def demotion_targets(self, source: int, tiers: int) -> Sequence[int]:
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
        """Return whether ``name`` is this class's method and no derived one's."""
        return getattr(type(self), name) is getattr(LadderPlacement, name)
