"""Greedy dual size frequency: frequency that ages by inflation.

A copy's score is ``L + uses``, where ``L`` is the score of the last victim. Newcomers start
above everything that was evicted before, so old fame is overtaken without any copy's score
ever being touched. Chunks have one size and one cost, which leaves frequency and age.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from kvtier.policies.base import PolicyContext
from kvtier.policies.eviction._scored import ScoredEviction

__all__ = ["Gdsf"]


class Gdsf(ScoredEviction):
    """Evicts the lowest ``L + uses``; among equals the least recently used.

    Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy", HP Laboratories HPL-98-69R1, 1998; after Cao and Irani, USITS 1997.
    """

    insert_first: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._inflation = 0.0

    @override
    def _score(self, uses: int, ctx: PolicyContext) -> float:
        return self._inflation + uses

    @override
    def _settle(self, score: float) -> None:
        self._inflation = score
