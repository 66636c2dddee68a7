"""Promises RAM slots for chunks that are loaded straight from a slower tier.

A chunk that only a slower tier has may be a hit at once, if a RAM slot can be promised for it:
the load that is planned next, in the same step, allots the slots.

A promise is a number, not a slot: nothing is evicted for a request that may not be scheduled.
What a request was told is a hit in this step, in RAM or below, is counted against what could be
evicted, and promises, streams in flight and the slots of reads that are stuck against
``pin_budget``; so its load finds room, a tier that does not answer leaves RAM to others, and
one that would not waits its turn with the :class:`~kvtier.manager.promoter.Promoter`. An engine
that looks up many requests before it loads for the first, or stores what it was told is a hit,
can still break that; so can a policy that evicts leaves only, where what nothing holds comes
before what something does. Then a chunk has no slot, which the plan says, and its load fails by
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.grants import Grants
from kvtier.manager.ladder import Ladder
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import RequestState
from kvtier.manager.tier import TierState

__all__ = ["Promises"]


class Promises:
    """The RAM slots promised in this step.

    Attributes:
        last_to: The request that was promised slots last, if no load was planned since.
    """

    def __init__(self, ladder: Ladder, grants: Grants, promoter: Promoter) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._grants = grants
        self._promoter = promoter
        self._promised: Counter[RequestState] = Counter()
        self.last_to: RequestState | None = None
        self._left = 0
        self._fits = 0
        self._plain: dict[int, int] = {}

    def make(self, request: RequestState, key: ChunkKey, tier: TierState) -> bool:
        """Promise a RAM slot for a chunk of ``tier`` until the step ends, if one is sure."""
        ladder = self._ladder
        if not ladder.limits.streams or request.wanting:
            return False
        if key in request.asked:
            return True
        if request is not self.last_to:
            # An engine asks for one request after the other, so this is not done for every key.
            self._turn_to(request)
        plain = self._plain[tier.index]
        if self._left <= 0 or len(request.asked) >= self._fits or plain <= 0:
            return False
        self._left -= 1
        self._plain[tier.index] = plain - 1
        self._promised[request] += 1
        return True

    def make_all(self, request: RequestState, tiers: Sequence[int]) -> bool:
        """Do :meth:`make` for chunks that ``request`` did not ask for yet, or for none.

        Args:
            request: The request, which has just been asked for the first time in this step.
            tiers: Index of the tier that each chunk is in, at least one.
        """
        if not self._ladder.limits.streams or request.wanting:
            return False
        self._turn_to(request)
        chunks = len(tiers)
        if chunks > min(self._left, self._fits - len(request.asked)):
            return False
        counts = Counter(tiers) if len(self._plain) > 1 else {tiers[0]: chunks}
        if any(self._plain[tier] < some for tier, some in counts.items()):
            return False
        for tier, some in counts.items():
            self._plain[tier] -= some
        self._left -= chunks
        self._promised[request] += chunks
        return True

    def has_too_many(self, request: RequestState) -> bool:
        """Say whether what ``request`` found in RAM is what was to make room for the rest."""
        return request in self._promised and len(request.asked) > self._fits

    def redeem(self, request: RequestState | None) -> None:
        """Take back what was promised to ``request``: its load has the slots, or has none."""
        self.last_to = None
        if request is not None:
            self._promised.pop(request, None)

    def end_step(self) -> None:
        """Take back what was promised in this step and not used."""
        if self._promised:
            self._promised.clear()
        self.last_to = None

    def _turn_to(self, request: RequestState) -> None:
        """Work out what can be promised to ``request``."""
        ladder, grants = self._ladder, self._grants
        promised = self._promised.total()
        held = grants.granted + grants.streaming + promised + ladder.ledger.stuck
        others = (other for other in self._promoter.asked_for() if other is not request)
        self.last_to = request
        self._left = ladder.limits.pin_budget - held
        self._fits = self._ram.room - sum(len(other.asked) for other in others)
        self._plain = {
            tier.index: ladder.worth.plain_chunks(tier.index) - promised
            for tier in ladder.tiers[1:]
        }
