"""The optimum, for who knows the future."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from kvtier.policies.base import PolicyContext
from kvtier.policies.eviction._scored import ScoredEviction

__all__ = ["Belady"]


class Belady(ScoredEviction):
    """Evicts the copy whose next use is farthest away; the newcomer always comes in.

    No policy that must let every newcomer in has more hits. It counts chunks one by one: hits
    behind a missing ancestor count too, so it does not bound the prefix hits of every policy.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
    Journal 5(2), 1966.
    """

    needs_future: ClassVar[bool] = True
    falling: ClassVar[bool] = True
    touch_order: ClassVar[Literal["reverse", "forward"]] = "forward"

    @override
    def _score(self, uses: int, ctx: PolicyContext) -> float:
        return -ctx.next_use
