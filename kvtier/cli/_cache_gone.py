"""Why a chunk is gone: how ``kvtier cache explain`` reads the removal log."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cli._cache_keys import KeyPattern
from kvtier.cli._cache_render import Explanation
from kvtier.errors import ConfigError
from kvtier.tiers.slab.removals import Removal, RemovalReason, find_marks

__all__ = ["explain_absence"]


def explain_absence(
    answer: Explanation, pattern: KeyPattern, removals: Sequence[Removal]
) -> None:
    """Enter into ``answer`` why the chunk that ``pattern`` names was removed.

    Args:
        answer: The explanation for the namespace of this removal log.
        pattern: The chunk's key.
        removals: The removal log, newest first.

    Raises:
        ConfigError: Several keys match.
    """
    marks = pattern.of_marks()
    found = find_marks(removals, marks)
    if len(found) > 1:
        some = ", ".join(sorted(map(marks.short_of, found))[:3])
        raise ConfigError(
            f"the keys of {len(found)} chunks that are gone begin with {pattern.digits}: "
            f"{some}; give one of them"
        )
    for mark, removal in found.items():
        answer.short_key = marks.short_of(mark)
        answer.left_at, answer.reason = removal.at, removal.reason
    answer.removal_log_begins_at = removals[-1].at if removals else 0
    damaged = RemovalReason.DAMAGED.value
    answer.damaged_at = next((row.at for row in removals if row.reason == damaged), 0)
