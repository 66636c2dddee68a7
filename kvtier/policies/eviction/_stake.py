"""How far a policy may depart from LRU: no further than it can afford to be wrong.

A policy that learns does well until the traffic changes, and then it loses. Switching between
it and LRU by who did better lately does not save it: by the time the switch comes the hits are
lost, and it is wrong again at the next change. So the policy is held to a *budget* instead. It
may have, at any time, only so many chunks evicted that LRU would still hold. Each of those can
cost one hit, when it is used before LRU would have let it go too, so their number bounds what
can be lost by being wrong.

How many it may be is a matter of means and prices. The means are a *stake*, a small share of
the uses that may be lost for finding out, and what was *won*: hits on chunks that LRU would
not hold any more, less the hits that LRU would have had and the policy had not. The price of a
departure is the share of them that turned out to be lost. So a policy that wins departs
further, by what it won, and one that loses comes back while there is little to lose. The stake
is the regret of LeCaR (Vietri et al., HotStorage 2018) turned from a weight into a bound; that
winnings are staked is how one bets with an edge that is not known (Kelly, Bell System
Technical Journal 1956).

Chunks are not lost one by one but a prompt at a time. The fewer prompts a tier holds, the less
their losses average out, so the price is never less than one prompt's share of the tier.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Stake"]

_SHARE: Final = 0.002
"""Share of the uses that may be lost against LRU."""
_LEAST_PRICE: Final = 0.1
"""Share of departures that is taken to be lost at least, whatever was seen."""
_PRIOR: Final = 16.0
"""Departures that the least price has the weight of before any was seen."""


class Stake:
    """Counts what departures from LRU won and lost, and says how many there may be.

    Args:
        capacity: Slots of the tier.
        keep: What a count keeps of itself each time it is renewed.

    Attributes:
        limit: Chunks that may be gone although LRU would hold them.
        won: Hits on chunks that LRU would not have held.
        lost: Uses of chunks that LRU would have held, and we had not.
        departures: Chunks evicted that LRU held.
    """

    __slots__ = ("_capacity", "_depths", "_keep", "_uses", "departures", "limit", "lost", "won")

    def __init__(self, capacity: int, keep: float) -> None:
        self._capacity = capacity
        self._keep = keep
        self._uses = 0.0
        self._depths = 0.0
        self.won = 0.0
        self.lost = 0.0
        self.departures = 0.0
        self.limit = 0.0

    def used(self, count: int, depth: int) -> None:
        """Note ``count`` uses, of chunks down to ``depth``."""
        self._uses += count
        self._depths += count * (depth + 1)

    def renew(self) -> None:
        """Say anew how many departures there may be; let what was count a little less."""
        stake = _SHARE * self._uses
        lead = self.won - self.lost
        if self._uses and stake + lead > 0.0:
            prompt = self._depths / self._uses / self._capacity
            seen = (self.lost + _PRIOR * _LEAST_PRICE) / (self.departures + _PRIOR)
            self.limit = min(stake + lead, stake) / (_LEAST_PRICE + prompt)
            self.limit += max(lead, 0.0) / max(seen, _LEAST_PRICE)
        else:
            self.limit = 0.0
        keep = self._keep
        self._uses *= keep
        self._depths *= keep
        self.won *= keep
        self.lost *= keep
        self.departures *= keep
