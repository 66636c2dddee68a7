"""Log lines for the operator about slow tiers, skipped loads and broken policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtier.logs import get_logger
from kvtier.manager import CostModel, LoadChoice, SkipCause
from kvtier.policies.base import NoVictimError
from kvtier.units import approximate_size

__all__ = ["Notices"]

logger = get_logger(__name__)

_INTERVAL_S: Final = 60.0
_NOT_DEMOTED: Final = (
    "tier %s does not keep up: %d new chunks (%s) were not copied to it and will not "
    "outlive RAM; a faster disk, more RAM or placement.write: evict helps"
)
_NOT_STORED: Final = (
    "tier %s is full of chunks that wait for a slower tier, which does not keep up: %d new "
    "chunks (%s) were not stored at all; a faster disk or more RAM helps"
)
_CAUSES: Final = {
    SkipCause.SLOWER: "computing is faster than loading",
    SkipCause.LATE: "loading would not end in time",
    SkipCause.UNPROVEN: "a load ran into its deadline and none has arrived since",
}


class Notices:
    """Logs messages about slow tiers, skipped loads and broken policies.

    Args:
        tiers: The tiers' names, RAM first.
        slot_nbytes: Bytes of one chunk.
    """

    def __init__(self, tiers: Sequence[str], slot_nbytes: int) -> None:
        self._tiers = tiers
        self._slot_nbytes = slot_nbytes
        self._dropped = [0] * len(tiers)
        self._skipped = 0
        self._policies: set[str] = set()
        self._dropped_due_s = [float("-inf")] * len(tiers)
        self._skipped_due_s = float("-inf")

    def log_dropped(self, dropped: Sequence[int], now: float) -> None:
        """Warn about chunks that were dropped because a slower tier is too slow.

        Args:
            dropped: For each tier, the number of chunks dropped since the start. For a slower
                tier, these chunks were not copied to the tier. For RAM, these chunks were not
                stored, because RAM was full of chunks that wait for a slower tier.
            now: Seconds, monotonic.
        """
        for index, total in enumerate(dropped):
            new = total - self._dropped[index]
            if not new or now < self._dropped_due_s[index]:
                continue
            self._dropped[index] = total
            self._dropped_due_s[index] = now + _INTERVAL_S
            logger.warning(
                _NOT_DEMOTED if index else _NOT_STORED,
                self._tiers[index],
                new,
                approximate_size(new * self._slot_nbytes),
            )

    def log_skipped(self, cost_model: CostModel, now: float) -> None:
        """Log how many chunks were computed instead of loaded, and why; at most once a minute.

        Args:
            cost_model: The manager's cost model.
            now: Seconds, monotonic.
        """
        last, total = cost_model.last, cost_model.skipped_chunks
        if last is None or total == self._skipped or now < self._skipped_due_s:
            return
        new, self._skipped = total - self._skipped, total
        self._skipped_due_s = now + _INTERVAL_S
        logger.info(
            "%d stored chunks were computed instead of loaded since the last such message. "
            "The latest, because %s: %s",
            new,
            _CAUSES[last.cause],
            self._explain(last),
        )

    def log_policies(self, errors: Iterable[NoVictimError]) -> None:
        """Warn once about each error of an eviction policy."""
        for error in errors:
            if str(error) not in self._policies:
                self._policies.add(str(error))
                logger.warning("%s; this tier evicts by lru until the engine restarts", error)

    def _explain(self, choice: LoadChoice) -> str:
        tiers = " and ".join(self._tiers[index] for index in sorted(choice.skipped))
        return (
            f"loading {choice.nbytes / 1e6:.1f} MB from {tiers} behind "
            f"{choice.queued_nbytes / 1e6:.1f} MB would have taken {choice.load_s:.3g} s and "
            f"may take {choice.max_load_s:.3g} s, computing takes {choice.recompute_s:.3g} s; "
            f"{choice.tokens} tokens are computed"
        )
