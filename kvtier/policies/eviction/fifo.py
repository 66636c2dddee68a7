"""First in, first out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction.lru import Lru

__all__ = ["Fifo"]


class Fifo(Lru):
    """Evicts the copy that came first, whether it was used or not."""

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        pass

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        pass
