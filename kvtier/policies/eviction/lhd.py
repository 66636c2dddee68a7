"""LHD: evicts the chunk with the least hit density, or LRU's victim while LRU does better.

LRU keeps every chunk for the same time. This policy sorts chunks into classes, learns how many
hits a slot earns with each class at each age, and evicts from the class that earns least. In a
class the order is LRU.

**Classes.** A chunk used twice is used again more often than a chunk used once; the number of
uses survives an eviction while the key is remembered (ARC: Megiddo and Modha, FAST 2003). New
chunks are classed by the length of their prompt, in powers of four. A prompt's last chunk is
hardly ever used again, because the next turn continues in the middle of it, so last chunks are
a class of their own.

**Recovery.** What an engine stored before its restart is older than all that comes next. So it
leaves first, as in LRU, until it is used.

**Density.** An age is the number of uses of all chunks since a chunk's last use; an octave is a
range of ages from one power of two to the next. The uses in an octave, divided by the chunks
that reached it and its length, are the hazard. The *hit density* is the largest mean hazard of
a range of octaves from the present one on: the hits per slot and time until the best moment
(LHD: Beckmann, Chen and Cidon, NSDI 2018, takes the mean of all later ages). A prior of 1/age,
like LRU, decides until there is data, first for all classes together, then for each.

**Prompts.** A chunk is useless without the chunks before it. So a class never earns less than
the classes of its continuations, and before a chunk that was used again, the deepest chunk of
its prompt is evicted. New chunks leave in their own order: in models with several KV cache
groups, the deepest may be the only chunk of a window, without which the prompt has no hit. An
engine computes a prompt in parts, by turns with other prompts. A part that continues a prompt
makes the prompt's earlier chunks as young as itself.

**Comparison with LRU.** Where chunks are alike or the traffic changes, what was learned
misleads. So :class:`Rivalry` compares the policy's leading hits with those of LRU. While the
policy is behind by more than an allowance, it evicts from the prompt used longest ago (choosing
the better expert: LeCaR, Vietri et al., HotStorage 2018). Both order the same copies, so a
switch moves nothing (Gramacy et al., NIPS 2002). LRU would hold the chunks used last, as many
as there are slots, so counts by time of last use tell what LRU holds, and no ghost cache is
needed.

**Pins.** If many copies are pinned, a scan of a class at every pick would be slow. So rejected
copies become the youngest, and the next victims, as many as were rejected, are chosen by age
alone, a run at a time.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from typing import Final, NamedTuple

from typing_extensions import override

from kvtier.keys import ChunkKey, hash_part
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._hit_density import (
    AFTER,
    KINDS,
    NEW_KINDS,
    RECOVERED,
    TAIL,
    USED,
    HitDensity,
)

__all__ = ["Lhd", "Rivalry"]

_SPANS: Final = 64
"""Least number of runs per turn. A turn is as many uses as the tier has slots."""
_MAX_SPAN: Final = 128
_SHARE: Final = 0.0005
"""Share of the uses that may be lost against LRU."""
_PROMPTS: Final = 4.0
"""Number of prompts of mean length that may be lost, too."""
_SLOTS: Final = 0.05
"""Share of the tier's slots that may be lost, too."""
_MOST_TIERS: Final = 2.0
"""Tiers that a prompt of mean length may fill; above, the policy stays with LRU."""
_KEEP: Final = 0.9986
"""Share of the lead that survives a renewal of the densities: half after 250 turns."""
_DEEP: Final = 1 << 62
"""Deeper than any chunk."""
_SLACK: Final = 8
"""Number of stale entries that a run may always have."""
_MOST_OPEN: Final = 1024
"""Largest number of prompts that may go on, about as many as an engine runs at a time."""
_UNLINKED: Final = 64
"""A larger batch without parents comes from an earlier engine."""
_run_of = operator.attrgetter("policy")


class Prompt:
    """The chunks that one request used and that no other request has used since.

    Attributes:
        request: The request's id; an empty string if unknown.
        runs: The runs with the chunks, leaf to root.
        next_at: Index in ``runs`` at which the next run is inserted.
        reach: Number of a use; when the request began, LRU held the chunks used since then.
        end: Depth of the deepest chunk, plus 1.
        missed: Least depth of the chunks that were absent when the request began.
        lru_missed: Least depth of the chunks that LRU did not hold then.
        won: Leading hits minus those of LRU, as they were last counted.
    """

    __slots__ = ("end", "lru_missed", "missed", "next_at", "reach", "request", "runs", "won")

    def __init__(self, request: str, reach: int) -> None:
        self.request = request
        self.runs: list[Run] = []
        self.next_at = 0
        self.reach = reach
        self.end = 0
        self.missed = self.lru_missed = _DEEP
        self.won: int | None = None

    def remove(self, run: Run) -> None:
        """Remove ``run``, which has no copies."""
        at = self.runs.index(run)
        del self.runs[at]
        self.next_at -= at < self.next_at


class Run:
    """Chunks of one prompt and one class that were used in succession.

    Attributes:
        kind: The class.
        since: Number of the use that began the run.
        prompt: The prompt.
        copies: The copies, leaf to root. An entry is stale unless the copy's ``policy`` is this
            run.
        first: Index of the first entry that may be live.
        live: Number of live entries.
        evicted_for: The last request for which a copy of the run was evicted; None if no copy
            was evicted.
    """

    __slots__ = ("copies", "evicted_for", "first", "kind", "live", "prompt", "since")

    def __init__(self, kind: int, since: int, prompt: Prompt) -> None:
        self.kind = kind
        self.since = since
        self.prompt = prompt
        self.copies: list[ChunkCopy] = []
        self.first = 0
        self.live = 0
        self.evicted_for: str | None = None

    def live_copies(self) -> list[ChunkCopy]:
        """Return the copies that are still in this run."""
        return [copy for copy in self.copies[self.first :] if copy.policy is self]


class Part(NamedTuple):
    """Adjacent chunks of a prompt with the same previous run.

    Attributes:
        copies: The copies, leaf to root.
        source: The run in which the copies were, or are remembered.
        is_hit: Whether the copies were in the tier when the request began.
    """

    copies: Sequence[ChunkCopy]
    source: Run
    is_hit: bool


class Rivalry:
    """Compares the policy's leading hits with LRU's, request by request.

    Attributes:
        follows_lru: Whether the policy must evict what LRU would evict.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lead = self._uses = self._requests = 0.0
        self.follows_lru = False

    def record(self, requests: int, uses: int, won: int) -> None:
        """Count requests, uses and hits ``won`` over LRU, and set :attr:`follows_lru`."""
        self._requests += requests
        self._uses += uses
        length = self._uses / self._requests
        allowance = _PROMPTS * length + _SLOTS * self._capacity
        # Old wins must not pay for long losses.
        self._lead = min(self._lead + won, allowance)
        budget = _SHARE * self._uses + self._lead
        if not self.follows_lru:
            budget += allowance
        self.follows_lru = budget < 0.0 or length > _MOST_TIERS * self._capacity

    def renew(self) -> None:
        """Reduce the weight of past counts."""
        self._lead *= _KEEP
        self._uses *= _KEEP
        self._requests *= _KEEP


class Lhd(Eviction):
    """Evicts by least hit density (LHD), or like LRU while LRU does better.

    The keys of evicted copies are remembered, at most two per slot.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._density = HitDensity(capacity)
        self._rivalry = Rivalry(capacity)
        self._clock = 0
        self._queues: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(KINDS)]
        self._ghosts: dict[ChunkKey, Run] = {}
        self._ghosts_before: dict[ChunkKey, Run] = {}
        self._prompt = Prompt("", 0)
        self._outside = Run(TAIL, -1, self._prompt)  # the source of unknown chunks
        # Prompts that may go on, by request or, if that is unknown, by last chunk.
        self._open: dict[str | int, Prompt] = {}
        self._most_open = min(max(capacity // 8, 8), _MOST_OPEN)
        self._span = min(max(capacity // _SPANS, 1), _MAX_SPAN)
        self._unsettled = 0  # uses of the present prompt that were not compared yet
        self._backoff = 0  # number of victims to choose by age
        self._victims: Run | None = None

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._use([self._arrived(copy, ctx)], ctx)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        if len(copies) > _UNLINKED and all(copy.parent is None for copy in copies):
            self._recover(copies)
            return
        for chain in _chains(copies):
            keys = [copy.key for copy in chain]
            ghosts, before = self._ghosts.keys(), self._ghosts_before.keys()
            if ghosts.isdisjoint(keys) and before.isdisjoint(keys):
                self._use([Part(chain, self._outside, is_hit=False)], ctx)
            else:
                self._use([self._arrived(copy, ctx) for copy in chain], ctx)

    @override
    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.policy = self._forget(copy.key)
        self._requeue((copy,))

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.on_hit_many((copy,), ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        for chain in _chains(list(copies)):
            parts: list[Part] = []
            for source, used in groupby(chain, _run_of):
                if not ctx.request or source.prompt.request != ctx.request:
                    parts.append(Part(list(used), source, is_hit=True))
            if parts:
                self._use(parts, ctx)
            for part in parts:
                self._leave(part.source, len(part.copies))

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        run: Run = copy.policy
        self._density.remove(run.kind, run.since, 1)
        copy.policy = None
        self._leave(run, 1)

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        return next(iter(self.pick_many(1, evictable, ctx)), None)

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        picked: list[ChunkCopy] = []
        rejected: list[ChunkCopy] = []  # since the last victim
        while (left := count - len(picked)) > 0:
            by_age = self._backoff > 0
            going = self._peek(min(left, self._backoff) if by_age else left, by_age=by_age)
            if not going:
                break
            for may_go, part in groupby(going, evictable):
                copies = list(part)
                if may_go:
                    self._evict(copies, ctx)
                    picked += copies
                    self._requeue(rejected)
                    rejected = []
                    continue
                if not by_age:
                    del copies[1:]
                self._drop(copies)
                rejected += copies
                self._backoff = max(self._backoff, len(rejected) + 1)
                if not by_age:
                    break
        self._requeue(rejected)
        return picked

    def _recover(self, copies: Sequence[ChunkCopy]) -> None:
        """Insert copies of an earlier engine. A prompt for each would cost time and memory."""
        for at in range(0, len(copies), self._span):
            self._append(copies[at : at + self._span], RECOVERED, Prompt("", 0))

    # -- uses -------------------------------------------------------------------------------

    def _arrived(self, copy: ChunkCopy, ctx: PolicyContext) -> Part:
        """Return a part of ``copy``; its source is the run that the chunk was evicted from."""
        source = self._forget(copy.key)
        is_hit = bool(ctx.request) and source.evicted_for == ctx.request
        return Part([copy], source, is_hit)

    def _forget(self, key: ChunkKey) -> Run:
        """Forget the evicted copy of ``key``; return its last run, or ``_outside`` if none."""
        ghosts, before = self._ghosts, self._ghosts_before
        return ghosts.pop(key, None) or before.pop(key, None) or self._outside

    def _use(self, parts: Sequence[Part], ctx: PolicyContext) -> None:
        """Record a use of ``parts``, which are successive parts of one prompt, leaf to root."""
        self._begin(parts[0].copies[0], parts[-1].copies[-1], ctx)
        prompt = self._prompt
        for copies, source, is_hit in parts:
            least = copies[-1].depth
            if not is_hit and least < prompt.missed:
                prompt.missed = least
            if source.since < prompt.reach and least < prompt.lru_missed:
                prompt.lru_missed = least
            self._unsettled += len(copies)
            if source is not self._outside:
                self._place(copies, AFTER[source.kind], source)
                continue
            tails, end = 0, prompt.end - 1
            while tails < len(copies) and copies[tails].depth == end:
                tails += 1
            self._place(copies[:tails], TAIL, source)
            self._place(copies[tails:], NEW_KINDS[prompt.end.bit_length()], source)

    def _begin(self, leaf: ChunkCopy, root: ChunkCopy, ctx: PolicyContext) -> None:
        """Find or create the prompt of ``root`` to ``leaf``, and make it the current one."""
        name, last = ctx.request, self._prompt
        if name and name == last.request and leaf.depth < last.end:
            return
        prompt = self._open.pop(name, None) or self._open.pop(_hash(root.parent), None)
        if prompt is not last:
            self._settle()
        self._victims = None
        if prompt is None:
            prompt = Prompt(name, self._density.reach)
        elif leaf.depth >= prompt.end:
            self._refresh(prompt, leaf.depth + 1)
        prompt.request = name
        prompt.end = max(prompt.end, leaf.depth + 1)
        self._prompt = self._open[name or _hash(leaf.key)] = prompt
        if len(self._open) > self._most_open:
            del self._open[next(iter(self._open))]

    def _settle(self) -> None:
        """Report the uses and leading hits of the current prompt to the rivalry."""
        prompt = self._prompt
        if not self._unsettled:
            return
        won = min(prompt.missed, prompt.end) - min(prompt.lru_missed, prompt.end)
        self._rivalry.record(prompt.won is None, self._unsettled, won - (prompt.won or 0))
        prompt.won = won
        self._unsettled = 0

    def _refresh(self, prompt: Prompt, length: int) -> None:
        """Make the chunks of ``prompt`` the youngest, because a request continues the prompt.

        This is not a use.
        """
        runs, prompt.runs, prompt.next_at = prompt.runs, [], 0
        for run in runs:
            kind = run.kind if run.kind >= USED else NEW_KINDS[length.bit_length()]
            self._density.remove(run.kind, run.since, run.live)
            del self._queues[run.kind][run]
            if run.evicted_for is None and 2 * run.live > self._span:
                run.kind, run.since = kind, self._clock
                self._add_run(run)
                self._density.add(kind, run.since, run.live)
                continue
            copies = run.live_copies()
            run.copies, run.first, run.live = [], 0, 0
            run.prompt = self._outside.prompt
            self._append(copies, kind, prompt)
        prompt.next_at = 0

    def _place(self, copies: Sequence[ChunkCopy], kind: int, source: Run) -> None:
        """Count a use of ``copies`` from run ``source``; add them to runs of class ``kind``."""
        density = self._density
        for at in range(0, len(copies), self._span):
            piece = copies[at : at + self._span]
            if self._clock >= density.due:
                density.renew(self._clock)
                self._rivalry.renew()
            if source is not self._outside:
                density.record_uses(source.kind, source.since, self._clock, len(piece))
            self._append(piece, kind, self._prompt)
            self._clock += len(piece)

    def _append(self, copies: Sequence[ChunkCopy], kind: int, prompt: Prompt) -> None:
        """Append ``copies``, at most one span, to ``prompt``."""
        run = prompt.runs[prompt.next_at - 1] if prompt.next_at else self._outside
        is_full = len(run.copies) + len(copies) > self._span
        # A copy that came back to the run would make its own stale entry live again.
        has_stale = run.live < len(run.copies) - run.first
        if run.kind != kind or is_full or has_stale or run.since < self._density.renewed:
            run = Run(kind, self._clock, prompt)
            self._add_run(run)
        run.copies += copies
        for copy in copies:
            copy.policy = run
        run.live += len(copies)
        self._density.add(kind, run.since, len(copies))

    def _add_run(self, run: Run) -> None:
        """Insert ``run`` into its prompt, and append it to the queue of its class."""
        prompt = run.prompt
        prompt.runs.insert(prompt.next_at, run)
        prompt.next_at += 1
        self._queues[run.kind][run] = None

    # -- runs -------------------------------------------------------------------------------

    def _peek(self, count: int, *, by_age: bool) -> list[ChunkCopy]:
        """Return up to ``count`` copies of one run, the next victim first."""
        run = self._victims
        if by_age or run is None or not run.live or run.prompt is self._prompt:
            chosen = self._choose(by_age=by_age)
            run = None if chosen is None else _deepest(chosen)
        self._victims = None if by_age else run
        if run is None:
            return []
        while run.copies[run.first].policy is not run:
            run.first += 1
        going: list[ChunkCopy] = run.copies[run.first : run.first + count]
        if run.live == len(run.copies) - run.first:
            return going
        return [copy for copy in going if copy.policy is run]

    def _drop(self, copies: Sequence[ChunkCopy]) -> Run:
        """Remove ``copies`` from the front of their run; return the run."""
        run: Run = copies[0].policy
        run.first = run.copies.index(copies[-1], run.first) + 1
        self._leave(run, len(copies))
        return run

    def _evict(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Remove ``copies`` from the front of their run; add their keys to the ghosts."""
        self._backoff = max(self._backoff - len(copies), 0)
        run = self._drop(copies)
        run.evicted_for = ctx.request
        if len(self._ghosts) + len(copies) > self.capacity:
            self._ghosts, self._ghosts_before = {}, self._ghosts
        for copy in copies:
            self._ghosts[copy.key] = run

    def _leave(self, run: Run, count: int) -> None:
        """Record that ``count`` copies left ``run``."""
        run.live -= count
        if not run.live:
            run.copies, run.first = [], 0
            del self._queues[run.kind][run]
            run.prompt.remove(run)
            run.prompt = self._outside.prompt  # not needed to remember the run
        elif len(run.copies) > 2 * run.live + _SLACK:
            run.copies, run.first = run.live_copies(), 0

    def _requeue(self, copies: Sequence[ChunkCopy]) -> None:
        """Make ``copies``, which have left their runs, the youngest. This is not a use."""
        for source, part in groupby(copies, _run_of):
            prompt, moved = Prompt("", 0), list(part)
            self._density.remove(source.kind, source.since, len(moved))
            for at in range(0, len(moved), self._span):
                self._append(moved[at : at + self._span], source.kind, prompt)

    def _choose(self, *, by_age: bool) -> Run | None:
        """Return the run with the least hit density, or the oldest run; None without runs."""
        chosen: Run | None = None
        oldest, least = inf, inf
        by_age = by_age or self._rivalry.follows_lru
        clock, table = self._clock, self._density.table
        for kind, queue in enumerate(self._queues):
            run = next(iter(queue), None)
            if run is None:
                continue
            earns = 0.0 if by_age else table[kind][(clock - run.since).bit_length()]
            if earns < least or (earns == least and run.since < oldest):
                chosen, least, oldest = run, earns, run.since
        return chosen


def _chains(copies: Sequence[ChunkCopy]) -> Iterator[Sequence[ChunkCopy]]:
    """Split ``copies`` into chains of one prompt each; yield each chain leaf to root."""
    if not copies:
        return
    if copies[0].depth < copies[-1].depth:
        depths = [copy.depth for copy in copies]
        if depths == sorted(depths):
            copies = copies[::-1]
    begin = 0
    if copies[0].depth - copies[-1].depth != len(copies) - 1:
        for at, (before, copy) in enumerate(pairwise(copies), start=1):
            if copy.depth >= before.depth and _hash(copy.key) != _hash(before.key):
                yield copies[begin:at]
                begin = at
    yield copies[begin:]


def _deepest(chosen: Run) -> Run:
    """Return the run to evict first: the deepest of the same prompt, or ``chosen``."""
    runs = chosen.prompt.runs
    if chosen.kind >= USED:
        return runs[0]
    return next(run for run in runs if run.kind == chosen.kind)


def _hash(key: ChunkKey | None) -> int:
    """Return a hash of ``key``. Keys of different groups at the same token have equal hashes.

    A policy that stores this number does not keep the key.
    """
    return 0 if key is None else hash(hash_part(key))
