"""Why a chunk is gone: what ``kvtier cache explain`` makes of the trail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.cli._cache_keys import KeyPattern
from kvtier.cli._cache_render import Explanation
from kvtier.errors import ConfigError
from kvtier.tiers.slab.checksum import hash_key
from kvtier.tiers.slab.trail import Departure, Reason, find_hash, find_marks

__all__ = ["explain_absence"]


def explain_absence(
    answer: Explanation, pattern: KeyPattern, trail: Sequence[Departure]
) -> None:
    """Enter into ``answer`` why what is meant is not there.

    Args:
        answer: Of the namespace whose trail this is.
        pattern: What is meant.
        trail: Newest first.

    Raises:
        ConfigError: Several keys are meant.
    """
    left = _find(pattern, trail, answer)
    if left is not None:
        answer.left_at, answer.reason = left.at, left.reason
    answer.trail_begins_at = trail[-1].at if trail else 0
    answer.damaged_at = _newest(trail, lambda row: row.reason == Reason.DAMAGED.value)
    answer.whole_keys_until = _newest(trail, lambda row: bool(row.key_marks) and not row.marked)


def _find(
    pattern: KeyPattern, trail: Sequence[Departure], answer: Explanation
) -> Departure | None:
    marks = pattern.of_marks()
    found = find_marks(trail, marks)
    if len(found) > 1:
        some = ", ".join(sorted(map(marks.short_of, found))[:3])
        raise ConfigError(
            f"the keys of {len(found)} chunks that are gone begin with {pattern.digits}: "
            f"{some}; give one of them"
        )
    for mark, left in found.items():
        answer.short_key = marks.short_of(mark)
        return left
    whole_key = pattern.whole_key()
    return None if whole_key is None else find_hash(trail, hash_key(whole_key))


def _newest(trail: Sequence[Departure], wanted: Callable[[Departure], bool]) -> int:
    """Return when the newest of ``trail`` that is ``wanted`` was; 0 if none is."""
    return next((row.at for row in trail if wanted(row)), 0)
