"""W-TinyLFU with one exact counter for each key, as in other simulators."""

from __future__ import annotations

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.eviction.w_tinylfu import WTinyLfu
from kvtier.policies.frequency import SketchFrequency

__all__ = ["ExactWTinyLfu"]


class ExactFrequency(SketchFrequency):
    """Counts without a sketch, and halves as often."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._counts: dict[ChunkKey, int] = {}

    @override
    def count(self, key: ChunkKey) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._uses += 1
        if self._uses == self._sample:
            self._uses //= 2
            self._counts = {key: uses // 2 for key, uses in self._counts.items() if uses > 1}

    @override
    def of(self, key: ChunkKey) -> int:
        return self._counts.get(key, 0)


class ExactWTinyLfu(WTinyLfu):
    """W-TinyLFU whose decisions depend on no hash."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._frequency = ExactFrequency(capacity)
