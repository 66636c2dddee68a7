"""Policies that note what they are told of the request that uses or stores a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from typing_extensions import override

from kvtier.policies import ChunkCopy, Eviction, PolicyContext
from kvtier.policies.eviction import Lru
from kvtier.policies.eviction.prefix_lru import PrefixLru
from kvtier.policies.eviction.scored import Gdsf
from kvtier.policies.eviction.slru import Slru4

__all__ = ["EARS", "PlainEar", "Told"]


class Told(NamedTuple):
    """One use or insertion: by whom, and who stored the chunk."""

    what: str
    request: str
    session: str
    stored_by: str


class Ear(Eviction):
    """Notes uses and insertions in a list of its class, which outlives the policy."""

    heard: ClassVar[list[Told]] = []

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.heard.append(Told("insert", ctx.request, ctx.session, copy.session))
        super().on_insert(copy, ctx)  # type: ignore[safe-super] # a policy comes after it

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.heard.append(Told("hit", ctx.request, ctx.session, copy.session))
        super().on_hit(copy, ctx)  # type: ignore[safe-super] # a policy comes after it

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_hit(copy, ctx)


class PlainEar(Ear, Lru):
    """Driven by the plain calls."""

    heard: ClassVar[list[Told]] = []


class LeafEar(Ear, PrefixLru):
    """Evicts leaves only."""

    heard: ClassVar[list[Told]] = []


class RivalEar(Ear, Gdsf):
    """Newcomers compete."""

    heard: ClassVar[list[Told]] = []


class SheddingEar(Ear, Slru4):
    """A hit may evict."""

    heard: ClassVar[list[Told]] = []


EARS: tuple[type[Ear], ...] = (PlainEar, LeafEar, RivalEar, SheddingEar)
