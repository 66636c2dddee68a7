"""Ghost caches beside the live ones: what would another policy have hit?

A ghost is an eviction policy, the live class itself, and who would be resident; it moves no
bytes. It is driven as the simulator drives a single tier: each request's chunks are accessed
once, in the order the policy asks for, a miss inserts at once and nothing is ever pinned. So
ghosts are compared with ghosts and never with the live tier, and each tier's own policy is
among them.

A large tier is run in miniature: only the chunks whose hash falls into a fixed share of all
hashes are looked at, by a ghost whose capacity is that share of the tier's. A chunk is then in
the sample always or never, so what is reused in the trace is reused in the sample, and hit
ratios are close (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015, and
for policies that are no stacks "Cache Modeling and Optimization using Miniature Simulations",
USENIX ATC 2017, whose finding that a few thousand sampled chunks suffice sets the size here).
That bounds memory and time: a ghost has at most 4,096 chunks, and a chunk that is not sampled
costs a look at one byte of its key. Runs of hits lose their meaning in a sample, so what is
counted is hits of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, CopyState, Eviction, NoVictimError, PolicyContext
from kvtier.policies.leaves import pick_leaf
from kvtier.policies.registry import build_eviction
from kvtier.policies.terms import NO_TERMS, RequestTerms, session_terms

__all__ = ["GhostFigures", "ShadowTier"]

_LARGEST: Final = 4096
_HASH_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class GhostFigures:
    """What one policy would have done in one tier since the start.

    Attributes:
        policy: The policy's name.
        references: Sampled chunks asked for.
        hits: Those it would have had.
    """

    policy: str
    references: int
    hits: int


class ShadowTier:
    """Ghosts of one tier, one for each policy.

    Args:
        capacity: Slots of the tier.
        policies: Their names, each once.

    Raises:
        ConfigError: There is no such policy, or it needs the future.
    """

    def __init__(self, capacity: int, policies: Iterable[str]) -> None:
        shift = max((max(capacity, 1) - 1) // _LARGEST, 0).bit_length()
        self._mask = (1 << shift) - 1
        self._capacity = max(capacity >> shift, 1)
        self._ctx = PolicyContext()
        self._policies = tuple(policies)
        self._references = 0
        self._ghosts = self._make_ghosts()

    def serve(
        self, chain: Sequence[ChunkKey], now: float, *, request: str = "", session: str = ""
    ) -> None:
        """Let every ghost see one request.

        Args:
            chain: The chunks it asks for, root to leaf.
            now: Seconds on a monotonic clock.
            request: What identifies it.
            session: What it belongs to, empty if it does not say.
        """
        mask = self._mask
        if mask:
            chain = [
                key for key in chain if not int.from_bytes(key[:_HASH_NBYTES], "big") & mask
            ]
        if not chain:
            return
        ctx = self._ctx
        ctx.now, ctx.request, ctx.session = now, request, session
        terms = session_terms(session)
        self._references += len(chain)
        for ghost in self._ghosts:
            ghost.serve(chain, ctx, terms)

    def figures(self) -> list[GhostFigures]:
        """Return what every policy would have done."""
        return [
            GhostFigures(policy, self._references, ghost.hits)
            for policy, ghost in zip(self._policies, self._ghosts, strict=True)
        ]

    def clear(self) -> None:
        """Forget every chunk, as a reset of the cache does; what was counted stays."""
        fresh = self._make_ghosts()
        for ghost, old in zip(fresh, self._ghosts, strict=True):
            ghost.hits = old.hits
        self._ghosts = fresh

    def _make_ghosts(self) -> list[_Ghost]:
        return [
            _Ghost(build_eviction(policy, capacity=self._capacity)) for policy in self._policies
        ]


class _Ghost:
    """One policy and who would be resident."""

    def __init__(self, eviction: Eviction) -> None:
        self.hits = 0
        self._terms = NO_TERMS
        self._eviction = eviction
        self._here: dict[ChunkKey, ChunkCopy] = {}
        self._kids: dict[ChunkKey, int] = {}

    def serve(self, chain: Sequence[ChunkKey], ctx: PolicyContext, terms: RequestTerms) -> None:
        """Access the chunks of one request, in the order the policy asks for."""
        self._terms = terms
        places = range(len(chain))
        if self._eviction.touch_order == "forward":
            self._access(chain, places, ctx)
        elif self._eviction.leaf_only:
            # A child before its parent would be stranded: what is missing comes root to leaf.
            missing = [at for at in places if chain[at] not in self._here]
            there = [at for at in places if chain[at] in self._here]
            self._access(chain, reversed(there), ctx)
            self._access(chain, missing, ctx)
        else:
            self._access(chain, reversed(places), ctx)

    def _access(
        self, chain: Sequence[ChunkKey], places: Iterable[int], ctx: PolicyContext
    ) -> None:
        here, eviction = self._here, self._eviction
        for depth in places:
            key = chain[depth]
            copy = here.get(key)
            if copy is None:
                self._insert(key, depth, chain[depth - 1] if depth else None, ctx)
                continue
            self.hits += 1
            copy.hits += 1
            eviction.on_hit(copy, ctx)
            while eviction.sheds and eviction.surplus:
                self._evict(ctx)

    def _insert(
        self, key: ChunkKey, depth: int, parent: ChunkKey | None, ctx: PolicyContext
    ) -> None:
        eviction = self._eviction
        before = None
        if eviction.leaf_only and parent is not None:
            before = self._here.get(parent)
            if before is None:
                return  # it would be stranded
        if eviction.tracks_misses:
            eviction.on_miss(key, ctx)
        full = len(self._here) >= eviction.capacity
        competes = eviction.insert_first and not eviction.leaf_only
        if full and not competes:
            # The victim's object becomes the newcomer: making one costs as much as all else.
            copy = self._evict(ctx, but=before)
            if copy is None:
                return
            copy.key, copy.parent, copy.depth, copy.hits = key, parent, depth, 0
        else:
            copy = ChunkCopy(key, 0, parent, depth)
            copy.state = CopyState.RESIDENT
        copy.terms = self._terms
        self._here[key] = copy
        if eviction.leaf_only:
            copy.child_count = self._kids.get(key, 0)
            self._count_kid(parent, 1)
        eviction.on_insert(copy, ctx)
        if full and competes:
            self._evict(ctx)

    def _evict(self, ctx: PolicyContext, *, but: ChunkCopy | None = None) -> ChunkCopy | None:
        """Let one victim go; None when only leaves may go and ``but`` is the only one."""
        if self._eviction.leaf_only:
            victim = pick_leaf(self._eviction, ctx, but=but)
            if victim is None:
                return None
        else:
            victim = self._eviction.pick(_always, ctx)
            if victim is None:
                raise NoVictimError(self._eviction)
        del self._here[victim.key]
        if self._eviction.leaf_only:
            self._count_kid(victim.parent, -1)
        return victim

    def _count_kid(self, parent: ChunkKey | None, change: int) -> None:
        """Keep count of resident children, also of a parent that is not here."""
        if parent is None:
            return
        kids = self._kids.get(parent, 0) + change
        if kids:
            self._kids[parent] = kids
        else:
            self._kids.pop(parent, None)
        copy = self._here.get(parent)
        if copy is not None:
            copy.child_count = kids


def _always(_: ChunkCopy) -> bool:
    return True
