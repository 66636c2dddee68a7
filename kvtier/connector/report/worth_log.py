"""Tells the operator, not too often, why chunks that are there were computed instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.logs import get_logger
from kvtier.manager import CostModel, LoadChoice, SkipCause

__all__ = ["WorthLog"]

logger = get_logger(__name__)

_QUIET_S: Final = 60.0
_WHY: Final = {
    SkipCause.SLOWER: "computing is faster than loading",
    SkipCause.LATE: "loading would not end in time",
    SkipCause.UNPROVEN: "a load ran into its deadline and none has arrived since",
}


class WorthLog:
    """Explains loads that were not done, at once and then at most once a minute.

    Time is passed in.

    Args:
        tiers: The tiers' names.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self._reported = 0
        self._due_s = float("-inf")

    def note(self, cost_model: CostModel, now: float) -> None:
        """Look at what the manager decided until ``now``, in seconds."""
        last, total = cost_model.last, cost_model.skipped_chunks
        if last is None or total == self._reported or now < self._due_s:
            return
        new, self._reported = total - self._reported, total
        self._due_s = now + _QUIET_S
        logger.info(
            "%d chunks were computed although they are stored since the last such message. "
            "The latest, because %s: %s",
            new,
            _WHY[last.cause],
            self._explain(last),
        )

    def _explain(self, choice: LoadChoice) -> str:
        tiers = " and ".join(self._tiers[index] for index in sorted(choice.skipped))
        return (
            f"loading {choice.nbytes / 1e6:.1f} MB from {tiers} behind "
            f"{choice.queued_nbytes / 1e6:.1f} MB would have taken {choice.load_s:.3g} s and "
            f"may take {choice.max_load_s:.3g} s, computing takes {choice.recompute_s:.3g} s; "
            f"{choice.tokens} tokens are computed"
        )
