"""A simulated service behind a shared tier, and one engine's client of it.

The service keeps chunks by key and evicts the least recently used chunk. A get is a use, and a
put of an absent chunk is a use. A question or a put of a present chunk is not. A chunk can be
read when its put ends. A job sees the state of the service at the job's start.

The speeds of a shared tier limit each engine's connection. The service itself has no limit, so
compare the peak rates with the limits of the real service.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.tiers.shared.gallop import count_rounds
from kvtier.types import Job, Outcome

__all__ = ["Meter", "SharedCache", "SharedClient", "SharedTraffic"]

_WINDOW_S: Final = 60.0


class Meter:
    """Sums amounts in total and per minute."""

    def __init__(self) -> None:
        self._by_minute: Counter[int] = Counter()

    def add(self, amount: int, now_s: float) -> None:
        """Add ``amount`` at ``now_s``."""
        self._by_minute[int(now_s // _WINDOW_S)] += amount

    @property
    def total(self) -> int:
        """The sum of all amounts."""
        return self._by_minute.total()

    def peak_per_s(self, duration_s: float) -> float:
        """Return the amount per second in the busiest minute of the ``duration_s`` seconds."""
        window_s = min(duration_s, _WINDOW_S) or _WINDOW_S
        return max(self._by_minute.values(), default=0) / window_s


class SharedCache:
    """The chunks that a service keeps for many engines. Calls must be in order of time.

    The capacity is in chunks. ``asked`` meters questions; ``read`` and ``written`` meter
    chunks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0
        self.asked, self.read, self.written = Meter(), Meter(), Meter()
        self._chunks: OrderedDict[ChunkKey, None] = OrderedDict()
        self._puts: list[tuple[float, int, Sequence[ChunkKey]]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._chunks)

    def contains(self, keys: Sequence[ChunkKey], now_s: float) -> list[bool]:
        """Return for each key whether the service has its chunk. This call is not a use."""
        self._end_puts(now_s)
        return [key in self._chunks for key in keys]

    def get(self, keys: Sequence[ChunkKey], now_s: float) -> list[ChunkKey]:
        """Record a use of the chunks that the service has; return the keys of these chunks."""
        self._end_puts(now_s)
        found = [key for key in keys if key in self._chunks]
        for key in found:
            self._chunks.move_to_end(key)
        self.read.add(len(found), now_s)
        return found

    def put(self, keys: Sequence[ChunkKey], now_s: float, *, done_s: float) -> None:
        """Start putting the chunks of ``keys``. The chunks are present at ``done_s``."""
        self.written.add(len(keys), now_s)
        heapq.heappush(self._puts, (done_s, next(self._order), keys))

    def end_all_puts(self) -> None:
        """End all puts. No other call may follow."""
        self._end_puts(math.inf)

    def _end_puts(self, now_s: float) -> None:
        while self._puts and self._puts[0][0] <= now_s:
            for key in heapq.heappop(self._puts)[2]:
                self._chunks[key] = None
                self._chunks.move_to_end(key)
            while len(self._chunks) > self.capacity:
                self._chunks.popitem(last=False)
                self.evicted += 1


@dataclass(slots=True)
class SharedTraffic:
    """One engine's calls to a shared tier. The names of the fields are a stable interface.

    Attributes:
        questions: Number of questions, each about the chunks of one request.
        keys_asked: Number of chunks in these questions.
        keys_found: Number of these chunks that the tier had.
        chunks_read: Number of chunks got from the tier.
        chunks_missing: Number of chunks that a get did not find.
        chunks_written: Number of chunks put into the tier.
        chunks_already_there: Number of chunks that the tier had already, so they were
            not put.
    """

    questions: int = 0
    keys_asked: int = 0
    keys_found: int = 0
    chunks_read: int = 0
    chunks_missing: int = 0
    chunks_written: int = 0
    chunks_already_there: int = 0


class SharedClient:
    """One engine's client of a shared cache.

    ``tier`` is the name of the shared tier. If it gallops, a question takes several rounds, as
    in :mod:`kvtier.tiers.shared.gallop`.
    """

    def __init__(self, cache: SharedCache, tier: str, *, gallops: bool = False) -> None:
        self.cache = cache
        self.traffic = SharedTraffic()
        self._tier = tier
        self._gallops = gallops

    def find(self, job: Job, now_s: float) -> tuple[list[Outcome], int]:
        """Answer the question ``job``; return the outcomes and the number of rounds."""
        found = self.cache.contains(job.keys, now_s)
        self.cache.asked.add(1, now_s)
        self.traffic.questions += 1
        self.traffic.keys_asked += len(found)
        self.traffic.keys_found += sum(found)
        outcomes = [Outcome.DONE if is_there else Outcome.MISSING for is_there in found]
        return outcomes, count_rounds(found) if self._gallops else 1

    def begin(self, job: Job, now_s: float) -> Sequence[ChunkKey]:
        """Return the chunks that ``job`` must move, and count the traffic.

        For a get, these are the chunks that the service still has. For a put, these are the
        chunks that the service lacks. For a job between other tiers, these are all chunks.
        """
        traffic = self.traffic
        if job.source == self._tier:
            keys = self.cache.get(job.keys, now_s)
            traffic.chunks_read += len(keys)
            traffic.chunks_missing += len(job.keys) - len(keys)
            return keys
        if job.destination == self._tier:
            found = self.cache.contains(job.keys, now_s)
            keys = [key for key, is_there in zip(job.keys, found, strict=True) if not is_there]
            traffic.chunks_written += len(keys)
            traffic.chunks_already_there += len(job.keys) - len(keys)
            return keys
        return job.keys

    def end(
        self, job: Job, moved: Sequence[ChunkKey], now_s: float, *, done_s: float
    ) -> list[Outcome]:
        """End ``job``; return its outcomes.

        If the job stored chunks in the shared tier, they are present from ``done_s`` on.
        """
        if job.destination == self._tier and moved:
            self.cache.put(moved, now_s, done_s=done_s)
        if job.source != self._tier or len(moved) == len(job.keys):
            return [Outcome.DONE] * len(job.keys)
        there = frozenset(moved)
        return [Outcome.DONE if key in there else Outcome.MISSING for key in job.keys]
