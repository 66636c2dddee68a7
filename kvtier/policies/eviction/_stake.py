"""How far a policy may depart from LRU: no further than it can afford to be wrong.

A policy that learns does well until the traffic changes, and then it loses. Switching between
it and LRU by who did better lately does not save it: by the time the switch comes the hits are
lost, and it is wrong again at the next change. So the policy is held to a *budget* instead. It
may have, at any time, only so many chunks evicted that LRU would still hold: its *departures*.
Each can cost one hit, if it is used before LRU would have let it go too, so their number bounds
what can still be lost, whatever comes.

The means are a *stake*, a small share of the uses that may be lost for finding out, and the
*lead*: the hits on chunks that LRU would not hold any more, less the uses of chunks that LRU
would have had and the policy had not. As long as nothing was won, departures are paid for in
full: what was lost and what still can be are together no more than the stake. That is a bound
by counting, it needs no assumption about the traffic. Winnings are what may be risked beyond
it, and they are staked at odds, because departures of many prompts are not all lost at once.
So a policy that wins departs further, by what it won, and one that loses comes back while there
is little to lose. The stake is the regret of LeCaR (Vietri et al., HotStorage 2018) turned from
a weight into a bound; that winnings are staked is how one bets with an edge that is not known
(Kelly, Bell System Technical Journal 1956).

Chunks are not lost one by one: a prompt without one of its chunks is lost from there on, half
of it on average, so with less than that there is nothing to be staked. And in a tier that holds
but a few prompts losses do not average out, and a prompt pushes out its own beginning before
that is used, so that what is won cannot be told from what is lost: such a tier stays with LRU.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Stake"]

_SHARE: Final = 0.002
"""Share of the uses that may be lost against LRU."""
_ODDS: Final = 4.0
"""Departures for each hit that is ahead of LRU."""
_LEAST_SHARE: Final = 0.5
"""Share of a prompt that the means must be."""
_LEAST_PROMPTS: Final = 16
"""Prompts that a tier must hold."""


class Stake:
    """Counts what departures from LRU won and lost, and says how many there may be.

    Args:
        capacity: Slots of the tier.
        keep: What a count keeps of itself each time it is renewed.

    Attributes:
        uses: Uses of any chunk.
        depths: Lengths of the prompts at those uses, summed up.
        lead: Hits on chunks that LRU would not have held, less uses of chunks that LRU would
            have held, and we had not.
    """

    __slots__ = ("_capacity", "_keep", "depths", "lead", "uses")

    def __init__(self, capacity: int, keep: float) -> None:
        self._capacity = capacity
        self._keep = keep
        self.uses = 0.0
        self.depths = 0.0
        self.lead = 0.0

    @property
    def limit(self) -> float:
        """Chunks that may be gone although LRU would hold them."""
        uses, lead, depths = self.uses, self.lead, self.depths
        stake = _SHARE * uses
        if (stake + lead) * uses <= _LEAST_SHARE * depths:
            return 0.0
        if _LEAST_PROMPTS * depths > uses * self._capacity:
            return 0.0
        return stake + (_ODDS * lead if lead > 0.0 else lead)

    def renew(self) -> None:
        """Let what was counted count a little less."""
        keep = self._keep
        self.uses *= keep
        self.depths *= keep
        self.lead *= keep
