"""Simulates one tier with an eviction policy or with Belady's optimal rule.

As in other cache simulators, the cache starts empty, the whole trace counts, and all chunks
have the same size. :class:`~kvtier.policies.simulated_tier.SimulatedTier` defines a hit, or
:mod:`.hybrid` for a model with several KV cache groups.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import numpy as np
from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.policies import Eviction, PolicyContext, build_eviction
from kvtier.policies.base import ChunkCopy, Evictable
from kvtier.policies.simulated_tier import SimulatedTier
from kvtier.sim.hybrid import ONE_GROUP, HybridTier, PromptHits, is_hybrid, parse_group_list
from kvtier.sim.traces import Trace

__all__ = [
    "BELADY",
    "SEED",
    "Belady",
    "Progress",
    "SingleResult",
    "TouchOrder",
    "check_belady",
    "chunk_keys",
    "distinct_chunks",
    "simulate_single",
]

TouchOrder = Literal["policy", "forward", "reverse"]
Progress = Callable[[float], None]
"""Called at intervals with the share of finished work, 0 to 1."""

SEED: Final = 0
"""Seed of the random numbers for policies."""

BELADY: Final = "belady"
"""The name of :class:`Belady`. A live tier cannot use this policy."""

_REPORTS: Final = 64


@dataclass(frozen=True, slots=True)
class SingleResult:
    """The figures of one policy on one trace at one size. The field names are stable.

    Attributes:
        trace: The trace's name.
        policy: The policy's name.
        touch_order: The order of touches: forward or reverse.
        groups: The model's KV cache groups.
        capacity_chunks: Number of chunks that the tier can hold. This number and the next ones
            are sums over all groups.
        refs: Number of chunk references.
        hits: Number of references to resident chunks.
        block_hit_ratio: ``hits / refs``.
        prefix_hit_ratio: Prompt tokens in leading hits, as a share of all prompt tokens. A
            request's leading hits are the hits before its first miss. A partial last chunk
            counts only the tokens that it has.
        lead_chunks: Number of leading hits; with several groups, the number of chunks that the
            hits need.
        stranded_hits: Number of resident chunks behind a missing ancestor. In forward order,
            this is ``hits - lead_chunks``. In reverse order, chunks count if they are resident
            when their request arrives; some may be evicted before they are accessed. With
            several groups, chunks behind the hit's end count if they are resident when their
            request arrives.
        seconds: Real duration of the simulation in seconds, without reading the trace.
        refs_per_second: ``refs / seconds``.
    """

    trace: str
    policy: str
    touch_order: str
    groups: str
    capacity_chunks: int
    refs: int
    hits: int
    block_hit_ratio: float
    prefix_hit_ratio: float
    lead_chunks: int
    stranded_hits: int
    seconds: float
    refs_per_second: float


class Belady(Eviction):
    """Evicts the copy with the latest next use, and inserts every new chunk.

    Among the policies that insert every new chunk, Belady's has the most hits. Hits behind a
    missing ancestor count too, so other policies may have more prefix hits.

    ``next_uses`` has the position of the next access to the same chunk, for each access.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
    Journal 5(2), 1966.
    """

    touch_order: ClassVar[Literal["reverse", "forward"]] = "forward"

    def __init__(self, capacity: int, next_uses: Iterator[int]) -> None:
        super().__init__(capacity)
        self._next_uses = next_uses
        self._accesses = 0
        # A use leaves the copy's older entry in the heap; ``copy.queued`` is the second item of
        # the current entry.
        self._heap: list[tuple[int, int, ChunkCopy]] = []

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._accesses += 1
        copy.queued = self._accesses
        heapq.heappush(self._heap, (-next(self._next_uses), copy.queued, copy))

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.on_insert(copy, ctx)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        copy.queued = 0

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        """Return the next victim. In a simulated tier every copy is evictable."""
        while self._heap:
            _, queued, copy = heapq.heappop(self._heap)
            if copy.queued == queued:
                copy.queued = 0
                return copy
        return None


def chunk_keys(distinct: int, group: int = 0) -> list[ChunkKey]:
    """Return one key per chunk number. Reuse of these objects avoids hashing keys again."""
    keys = np.zeros((distinct, 8 + GROUP_NBYTES), dtype=np.uint8)
    keys[:, :8] = np.arange(distinct, dtype=">u8").view(np.uint8).reshape(distinct, 8)
    keys[:, 8:] = list(group.to_bytes(GROUP_NBYTES, "big"))
    chunks: list[ChunkKey] = keys.view(f"V{keys.shape[1]}").ravel().tolist()
    return chunks


def check_belady(groups: str) -> None:
    """Raise a ConfigError if Belady's rule cannot know the next uses of chunks."""
    if is_hybrid(parse_group_list(groups, chunk_tokens=1)):
        raise ConfigError(
            f"--groups {groups}: the uses of a chunk depend on the hits, so {BELADY} cannot "
            f"know the next one; leave out {BELADY}, or write --groups {ONE_GROUP}"
        )


def distinct_chunks(trace: Trace, groups: str = ONE_GROUP) -> int:
    """Return the number of chunks in a tier that never evicts, after the trace; at least 1."""
    parsed = parse_group_list(groups, chunk_tokens=trace.chunk_tokens)
    if not is_hybrid(parsed):
        return trace.distinct
    endless = build_eviction("fifo", capacity=trace.distinct * len(parsed))
    tier = HybridTier(endless, parsed)
    deque(_serve(trace, tier, len(parsed)), maxlen=0)
    return max(len(tier.members), 1)


def simulate_single(
    trace: Trace,
    *,
    policy: str,
    capacity: int,
    touch_order: TouchOrder = "policy",
    groups: str = ONE_GROUP,
    progress: Progress | None = None,
) -> SingleResult:
    """Replay ``trace`` against one tier.

    Args:
        trace: The trace.
        policy: Name of an eviction policy, or :data:`BELADY`.
        capacity: Number of chunks that the tier can hold, at least 1.
        touch_order: ``forward``, ``reverse``, or ``policy`` for the policy's own order.
        groups: KV cache groups as :func:`~kvtier.sim.hybrid.parse_group_list` reads them.
        progress: Called at intervals with the share of finished requests, 0 to 1.

    Raises:
        ConfigError: The policy is unknown, or ``groups`` is invalid.
    """
    begun = time.perf_counter()
    parsed = parse_group_list(groups, chunk_tokens=trace.chunk_tokens)
    if policy == BELADY:
        check_belady(groups)
    eviction = _make_eviction(trace, policy, capacity, touch_order)
    order = eviction.touch_order if touch_order == "policy" else touch_order
    tier = SimulatedTier(eviction, touch_order=order)
    if is_hybrid(parsed):
        tier = HybridTier(eviction, parsed, touch_order=order)
    served = _serve(trace, tier, len(parsed))
    inputs = trace.input_tokens.tolist()
    refs = hits = leads = stranded = saved = 0
    report_every = trace.requests // _REPORTS + 1
    for number, (one, tokens) in enumerate(zip(served, inputs, strict=True), start=1):
        refs += one.refs
        hits += one.hits
        leads += one.loaded
        stranded += one.stranded
        saved += min(one.depth * trace.chunk_tokens, tokens)
        if progress is not None and not number % report_every:
            progress(number / trace.requests)
    if progress is not None:
        progress(1.0)
    seconds = time.perf_counter() - begun
    return SingleResult(
        trace=trace.name,
        policy=policy,
        touch_order=order,
        groups=groups,
        capacity_chunks=capacity,
        refs=refs,
        hits=hits,
        block_hit_ratio=hits / max(refs, 1),
        prefix_hit_ratio=saved / max(sum(inputs), 1),
        lead_chunks=leads,
        stranded_hits=stranded,
        seconds=seconds,
        refs_per_second=refs / seconds,
    )


def _serve(trace: Trace, tier: SimulatedTier, groups: int = 1) -> Iterator[PromptHits]:
    """Serve every request of ``trace`` for a model with ``groups`` KV cache groups."""
    tier.ctx.rng.seed(SEED)
    keys_of = [chunk_keys(trace.distinct, group).__getitem__ for group in range(groups)]
    whole_chunks = (trace.input_tokens // trace.chunk_tokens).tolist()
    times, names = trace.timestamps_s.tolist(), trace.session_names()
    requests = zip(trace.chains(), whole_chunks, times, names, strict=True)
    for number, (chain, whole, now, session) in enumerate(requests):
        if isinstance(tier, HybridTier):
            # A chunk that occurs twice in a prompt is stored once.
            chunks = list(dict.fromkeys(chain))
            groups_keys = [list(map(key_of, chunks)) for key_of in keys_of]
            yield tier.serve_groups(
                groups_keys,
                min(whole, len(chunks)),
                now,
                request=str(number),
                session=session,
            )
        else:
            keys = list(map(keys_of[0], chain))
            lead, hits, behind = tier.serve(keys, now, request=str(number), session=session)
            yield PromptHits(lead, lead, hits, len(keys), behind)


def _make_eviction(
    trace: Trace, policy: str, capacity: int, touch_order: TouchOrder
) -> Eviction:
    if policy != BELADY:
        return build_eviction(policy, capacity=capacity)
    following = trace.next_uses(backwards=touch_order == "reverse")
    return Belady(capacity, iter(following.tolist()))
