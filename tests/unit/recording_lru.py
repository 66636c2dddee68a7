"""An eviction policy that records the request of every use and insertion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from typing_extensions import override

from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.eviction import Lru

__all__ = ["PolicyCall", "RecordingLru"]


class PolicyCall(NamedTuple):
    """One use or insertion: by whom, and who stored the chunk."""

    what: str
    request: str
    session: str
    stored_by: str


class RecordingLru(Lru):
    """Records uses and insertions in a list of the class, which outlives the policy."""

    calls: ClassVar[list[PolicyCall]] = []

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.calls.append(PolicyCall("insert", ctx.request, ctx.session, copy.session))
        super().on_insert(copy, ctx)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.calls.append(PolicyCall("hit", ctx.request, ctx.session, copy.session))
        super().on_hit(copy, ctx)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_hit(copy, ctx)
