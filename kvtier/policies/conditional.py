"""Conditions in front of the slower tiers, whatever places chunks there."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from kvtier.policies.admission import Admission
from kvtier.policies.base import ChunkCopy, Placement, PolicyContext, Promotion
from kvtier.types import Purpose

__all__ = ["ConditionalPlacement"]


class ConditionalPlacement(Placement):
    """Another placement, of whose copies only those go down that fulfil some conditions.

    So a budget holds whatever the placement says, and a placement need not know of it. The
    conditions are asked one after the other, each only about what was not refused before.

    Args:
        placement: Decides everything else.
        conditions: What a chunk must fulfil to be written to a slower tier, in this order.
    """

    def __init__(self, placement: Placement, conditions: Sequence[Admission]) -> None:
        super().__init__(placement.tiers)
        self._placement = placement
        self._conditions = tuple(conditions)

    @property
    @override
    def places_used(self) -> bool:
        return self._placement.places_used

    @property
    @override
    def min_chunks(self) -> int:
        return self._placement.min_chunks

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return self._placement.place(copy, ctx)

    @override
    def place_many(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext
    ) -> Sequence[Sequence[int]]:
        return self._placement.place_many(copies, ctx)

    @override
    def admit(self, copy: ChunkCopy, tier: int, purpose: Purpose, ctx: PolicyContext) -> bool:
        return self._placement.admit(copy, tier, purpose, ctx) and all(
            condition.admits(copy, tier, ctx) for condition in self._conditions
        )

    @override
    def admit_many(
        self, copies: Sequence[ChunkCopy], tier: int, purpose: Purpose, ctx: PolicyContext
    ) -> Sequence[bool]:
        answers = list(self._placement.admit_many(copies, tier, purpose, ctx))
        for condition in self._conditions:
            left = [at for at, admitted in enumerate(answers) if admitted]
            if not left:
                break
            verdicts = condition.admits_many([copies[at] for at in left], tier, ctx)
            for at, admitted in zip(left, verdicts, strict=True):
                answers[at] = admitted
        return answers

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return self._placement.promote(copy, source, ctx)

    @override
    def promote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[Promotion]:
        return self._placement.promote_many(copies, source, ctx)

    @override
    def demotion_targets(self, source: int, tiers: int) -> Sequence[int]:
        return self._placement.demotion_targets(source, tiers)

    @override
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        return self._placement.demote(copy, source, ctx)

    @override
    def demote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[int | None]:
        return self._placement.demote_many(copies, source, ctx)
