"""Least frequently used."""

from __future__ import annotations

from typing_extensions import override

from kvtier.policies.base import PolicyContext
from kvtier.policies.eviction._scored import ScoredEviction

__all__ = ["Lfu"]


class Lfu(ScoredEviction):
    """Evicts the copy with the fewest uses since it came; among equals the least recent.

    Nothing ages, so what was popular once stays: on agent traffic the cache freezes. It is a
    yardstick rather than a choice; :class:`~kvtier.policies.eviction.Gdsf` ages.
    """

    @override
    def _score(self, uses: int, ctx: PolicyContext) -> float:
        return uses
