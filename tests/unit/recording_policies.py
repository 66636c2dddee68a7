"""Eviction policies that record the request of every use and insertion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from typing_extensions import override

from kvtier.policies import ChunkCopy, Eviction, PolicyContext
from kvtier.policies.eviction import Lru
from kvtier.policies.eviction.scored import Gdsf
from kvtier.policies.eviction.slru import Slru4

__all__ = ["RECORDING_POLICIES", "PolicyCall", "RecordingLru"]


class PolicyCall(NamedTuple):
    """One use or insertion: by whom, and who stored the chunk."""

    what: str
    request: str
    session: str
    stored_by: str


class RecordingPolicy(Eviction):
    """Records uses and insertions in a list of its class, which outlives the policy."""

    calls: ClassVar[list[PolicyCall]] = []

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.calls.append(PolicyCall("insert", ctx.request, ctx.session, copy.session))
        super().on_insert(copy, ctx)  # type: ignore[safe-super] # a policy comes after it

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.calls.append(PolicyCall("hit", ctx.request, ctx.session, copy.session))
        super().on_hit(copy, ctx)  # type: ignore[safe-super] # a policy comes after it

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_hit(copy, ctx)


class RecordingLru(RecordingPolicy, Lru):
    """Driven by the plain calls."""

    calls: ClassVar[list[PolicyCall]] = []


class RecordingGdsf(RecordingPolicy, Gdsf):
    """Newcomers compete."""

    calls: ClassVar[list[PolicyCall]] = []


class RecordingSlru4(RecordingPolicy, Slru4):
    """A hit may evict."""

    calls: ClassVar[list[PolicyCall]] = []


RECORDING_POLICIES: tuple[type[RecordingPolicy], ...] = (
    RecordingLru,
    RecordingGdsf,
    RecordingSlru4,
)
