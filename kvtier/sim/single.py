"""One tier: the lean driver that replays a trace against a live eviction policy.

The definitions are those of the simulators the figures are compared with. A cold cache, the
whole trace counted, every chunk of one size. *Forward*, a request's chunks are accessed one by
one, root to leaf: a hit if resident, else a miss that evicts and inserts. *Reverse*, the
leading hits are counted first, at arrival, and then the chunks are accessed leaf to root, so
that of one prefix the root stays longest; that is what an engine does which frees a request's
blocks last to first. A policy that evicts leaves only is touched leaf to root and then filled
root to leaf: inserting a child before its parent would strand it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, Final, Literal

from kvtier.policies import build_eviction
from kvtier.sim._tiers import tier_for
from kvtier.sim.traces import Trace

__all__ = ["SEED", "Progress", "SingleResult", "TouchOrder", "simulate_single"]

TouchOrder = Literal["policy", "forward", "reverse"]
Progress = Callable[[float], None]
"""Told the share done, 0 to 1, now and then."""

SEED: Final = 0
"""Of the random numbers that policies may draw."""

_SLICES: Final = 64


@dataclass(frozen=True, slots=True)
class SingleResult:
    """What one policy did with one trace at one size; the fields are a contract.

    Attributes:
        trace: The trace's name.
        policy: The policy's name.
        touch_order: The order used: forward or reverse.
        capacity_chunks: Chunks the tier holds.
        refs: Chunk references.
        hits: References to resident chunks.
        block_hit_ratio: ``hits / refs``.
        prefix_hit_ratio: Prompt tokens in leading hits, of all prompt tokens. A request's
            leading hits are those before its first miss; a partial last chunk counts as the
            tokens it has.
        lead_chunks: Leading hits.
        stranded_hits: Resident, but behind a missing ancestor: in forward order
            ``hits - lead_chunks``, and in reverse the chunks resident when their request
            arrived, less the leading ones. Never negative; in reverse some may be gone when
            their turn comes, and be no hits.
        seconds: Time taken, reading the trace excluded.
        refs_per_second: ``refs / seconds``.
    """

    trace: str
    policy: str
    touch_order: str
    capacity_chunks: int
    refs: int
    hits: int
    block_hit_ratio: float
    prefix_hit_ratio: float
    lead_chunks: int
    stranded_hits: int
    seconds: float
    refs_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)


def simulate_single(
    trace: Trace,
    *,
    policy: str,
    capacity: int,
    touch_order: TouchOrder = "policy",
    progress: Progress | None = None,
) -> SingleResult:
    """Replay ``trace`` against one tier.

    Args:
        trace: The trace.
        policy: An eviction policy's name, those that need the future included.
        capacity: Chunks the tier holds, at least 1.
        touch_order: ``policy`` is the order the policy asks for.
        progress: Told the share done now and then.

    Raises:
        ConfigError: There is no such policy.
    """
    begun = time.perf_counter()
    eviction = build_eviction(policy, capacity=capacity, future=True)
    order = eviction.touch_order if touch_order == "policy" else touch_order
    tier = tier_for(eviction, trace, order)
    tier.ctx.rng.seed(SEED)
    chains = trace.chains()
    arrivals = trace.timestamps_s.tolist()
    inputs = trace.input_tokens.tolist()
    requests = zip(
        chains, arrivals, inputs, trace.session_names(), map(str, count()), strict=False
    )
    hits = leads = stranded = saved = 0
    step = len(chains) // _SLICES + 1
    for start in range(0, len(chains), step):
        for chain, now, tokens, session, name in islice(requests, step):
            tier.turn_to(name, session, now)
            lead, found, behind = tier.serve(chain)
            hits += found
            leads += lead
            stranded += behind
            saved += min(lead * trace.chunk_tokens, tokens)
        if progress is not None:
            progress(min(start + step, len(chains)) / len(chains))
    seconds = time.perf_counter() - begun
    return SingleResult(
        trace=trace.name,
        policy=policy,
        touch_order=order,
        capacity_chunks=capacity,
        refs=trace.refs,
        hits=hits,
        block_hit_ratio=hits / trace.refs,
        prefix_hit_ratio=saved / max(sum(inputs), 1),
        lead_chunks=leads,
        stranded_hits=stranded,
        seconds=seconds,
        refs_per_second=trace.refs / seconds,
    )
