"""Eviction policies as their papers describe them: plain lists, every one looked at.

They share nothing with kvtier.policies: whole keys instead of copies, no hooks, no pins, and
not one shortcut. Slow, and short enough to be compared with the papers by eye.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

__all__ = ["TEXTBOOK", "Textbook", "TwoLevels", "count_hits"]


class Textbook(ABC):
    """A cache of ``capacity`` keys."""

    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        self.capacity = capacity
        self.refs = refs
        self.now = 0

    @abstractmethod
    def access(self, key: int) -> bool:
        """Use ``key`` and return whether it was there."""


def count_hits(policy: str, refs: Sequence[int], capacity: int) -> int:
    cache = TEXTBOOK[policy](capacity, refs)
    hits = 0
    for cache.now, key in enumerate(refs):
        hits += cache.access(key)
    return hits


class Fifo(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.queue: list[int] = []

    def access(self, key: int) -> bool:
        if key in self.queue:
            self.hit(key)
            return True
        if len(self.queue) == self.capacity:
            self.queue.pop(0)
        self.queue.append(key)
        return False

    def hit(self, key: int) -> None:
        pass


class Lru(Fifo):
    def hit(self, key: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)


class Belady(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.members: set[int] = set()
        self.following = [len(refs)] * len(refs)
        seen: dict[int, int] = {}
        for at in range(len(refs) - 1, -1, -1):
            self.following[at] = seen.get(refs[at], len(refs))
            seen[refs[at]] = at
        self.next: dict[int, int] = {}

    def access(self, key: int) -> bool:
        hit = key in self.members
        if not hit and len(self.members) == self.capacity:
            self.members.remove(max(self.members, key=self.next.__getitem__))
        self.members.add(key)
        self.next[key] = self.following[self.now]
        return hit


class TwoQ(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.a1in: list[int] = []
        self.a1out: list[int] = []
        self.am: list[int] = []

    def access(self, key: int) -> bool:
        if key in self.am:
            self.am.remove(key)
            self.am.append(key)
            return True
        if key in self.a1in:
            return True
        known = key in self.a1out
        if known:
            self.a1out.remove(key)
        if len(self.a1in) + len(self.am) == self.capacity:
            self.reclaim()
        (self.am if known else self.a1in).append(key)
        return False

    def reclaim(self) -> None:
        if self.am and len(self.a1in) <= int(0.25 * self.capacity):
            self.am.pop(0)
            return
        self.a1out.append(self.a1in.pop(0))
        if len(self.a1out) > int(0.5 * self.capacity):
            self.a1out.pop(0)


class Slru(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def access(self, key: int) -> bool:
        if key in self.protected:
            self.protected.remove(key)
            self.protected.append(key)
            return True
        if key in self.probation:
            self.probation.remove(key)
            self.protected.append(key)
            if len(self.protected) > int(0.8 * self.capacity):
                self.probation.append(self.protected.pop(0))
            return True
        if len(self.probation) + len(self.protected) == self.capacity:
            (self.probation or self.protected).pop(0)
        self.probation.append(key)
        return False


class Arc(Textbook):
    """Figure 4 of the paper, case by case."""

    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def access(self, key: int) -> bool:
        for held in (self.t1, self.t2):
            if key in held:
                held.remove(key)
                self.t2.append(key)
                return True
        if key in self.b1:
            self.p = min(self.capacity, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(key)
            self.replace(in_b2=False)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(key)
            self.replace(in_b2=True)
            self.t2.append(key)
        else:
            self.miss()
            self.t1.append(key)
        return False

    def miss(self) -> None:
        if len(self.t1) + len(self.b1) == self.capacity:
            if len(self.t1) < self.capacity:
                self.b1.pop(0)
                self.replace(in_b2=False)
            else:
                self.t1.pop(0)
            return
        total = sum(map(len, (self.t1, self.t2, self.b1, self.b2)))
        if total >= self.capacity:
            if total == 2 * self.capacity:
                self.b2.pop(0)
            self.replace(in_b2=False)

    def replace(self, *, in_b2: bool) -> None:
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


class S3Fifo(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.uses: dict[int, int] = {}
        self.evicted = False

    def access(self, key: int) -> bool:
        if key in self.small or key in self.main:
            self.uses[key] += 1
            return True
        known = key in self.ghost
        if known:
            self.ghost.remove(key)
        while len(self.small) + len(self.main) == self.capacity:
            self.evict()
        filling = not self.evicted and len(self.small) >= int(0.1 * self.capacity)
        (self.main if known or filling else self.small).append(key)
        self.uses[key] = 0
        return False

    def evict(self) -> None:
        self.evicted = True
        if len(self.main) > self.capacity - int(0.1 * self.capacity) or not self.small:
            self.evict_main()
        else:
            self.evict_small()

    def evict_small(self) -> None:
        while self.small:
            key = self.small.pop(0)
            if self.uses[key] < 2:
                self.ghost = [*self.ghost, key][-int(0.9 * self.capacity) :]
                return
            self.main.append(key)
            self.uses[key] = 0

    def evict_main(self) -> None:
        while self.uses[self.main[0]]:
            key = self.main.pop(0)
            self.uses[key] = min(self.uses[key], 3) - 1
            self.main.append(key)
        self.main.pop(0)


class Lirs(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.low: set[int] = set()
        self.low_limit = capacity - max(1, int(0.01 * capacity))
        self.stack: list[int] = []
        self.queue: list[int] = []
        self.left: list[int] = []

    def access(self, key: int) -> bool:
        hit = key in self.low or key in self.queue
        if not hit and len(self.low) + len(self.queue) == self.capacity:
            victim = self.queue.pop(0)
            if victim in self.stack:
                self.left.append(victim)
        known = key in self.stack
        if known:
            self.stack.remove(key)
        self.stack.append(key)
        if key in self.left:
            self.left.remove(key)
        if key not in self.low:
            self.place(key, known=known)
        self.prune()
        if len(self.stack) > 2 * self.capacity:
            self.stack.remove(self.left.pop(0))
        return hit

    def place(self, key: int, *, known: bool) -> None:
        if key in self.queue:
            self.queue.remove(key)
        if not known and len(self.low) == self.low_limit:
            self.queue.append(key)
            return
        self.low.add(key)
        if len(self.low) > self.low_limit:
            bottom = next(member for member in self.stack if member in self.low)
            self.low.remove(bottom)
            self.queue.append(bottom)

    def prune(self) -> None:
        while self.stack[0] not in self.low:
            key = self.stack.pop(0)
            if key in self.left:
                self.left.remove(key)


class WTinyLfu(Textbook):
    def __init__(self, capacity: int, refs: Sequence[int]) -> None:
        super().__init__(capacity, refs)
        self.main_limit = int(0.99 * capacity)
        self.window: list[int] = []
        self.main = Slru(self.main_limit, refs)
        self.counts: Counter[int] = Counter()
        self.counted = 0

    def access(self, key: int) -> bool:
        self.count(key)
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return True
        if key in self.main.probation or key in self.main.protected:
            return self.main.access(key)
        self.window.append(key)
        if len(self.window) > self.capacity - self.main_limit:
            self.compete(self.window.pop(0))
        return False

    def count(self, key: int) -> None:
        self.counts[key] += 1
        self.counted += 1
        if self.counted == 10 * self.capacity:
            self.counts = Counter({key: uses // 2 for key, uses in self.counts.items()})
            self.counted //= 2

    def compete(self, candidate: int) -> None:
        resident = [*self.main.probation, *self.main.protected]
        full = len(resident) == self.main_limit
        if not full or self.counts[candidate] > self.counts[resident[0]]:
            self.main.access(candidate)


class TwoLevels:
    """Two LRU caches, one below the other, and what crosses between them.

    A chunk found in the second is touched or taken there before it enters the first.

    Args:
        scheme: ``exclusive``, ``write_through`` or ``demote_keep``; the last also with
            ``_admit2``, only what was used twice goes down.
    """

    def __init__(self, scheme: str, first: int, second: int) -> None:
        self.scheme = scheme
        self.limits = first, second
        self.first: list[int] = []  # the next victim first
        self.second: list[int] = []
        self.uses: Counter[int] = Counter()
        self.hits = [0, 0]
        self.writes = self.promotions = 0

    def access(self, key: int) -> None:
        self.uses[key] += 1
        if key in self.first:
            self.hits[0] += 1
            self.first.remove(key)
            self.first.append(key)
            return
        if key in self.second:
            self.hits[1] += 1
            self.second.remove(key)
            if self.scheme != "exclusive":
                self.second.append(key)
            self.promotions += 1
        elif self.scheme == "write_through":
            self.write(key)
        if len(self.first) == self.limits[0]:
            self.leave(self.first.pop(0))
        self.first.append(key)

    def leave(self, key: int) -> None:
        """Let ``key``, which was evicted above, go down; if it is there it is touched."""
        worthy = self.uses[key] > 1 or not self.scheme.endswith("admit2")
        if self.scheme == "write_through":
            return
        if key in self.second:
            self.second.remove(key)
            self.second.append(key)
        elif worthy:
            self.write(key)

    def write(self, key: int) -> None:
        self.writes += 1
        if len(self.second) == self.limits[1]:
            self.second.pop(0)
        self.second.append(key)


TEXTBOOK: dict[str, type[Textbook]] = {
    "2q": TwoQ,
    "arc": Arc,
    "belady": Belady,
    "fifo": Fifo,
    "lirs": Lirs,
    "lru": Lru,
    "s3-fifo": S3Fifo,
    "slru": Slru,
    "w-tinylfu": WTinyLfu,
}
