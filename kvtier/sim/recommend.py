"""Recommends a configuration for a trace and given sizes of RAM and disk.

There are two stages, because a simulation of all tiers takes much longer than a simulation of
one tier. The first stage simulates each eviction policy in a tier of RAM's size and in a tier
of the disk's size. A policy replaces the default only if it has clearly more hits. The second
stage simulates all tiers with the best policies, for each value of ``placement.write``. The
configuration with the shortest waits wins. If several configurations have similar waits, the
safest configuration wins: it keeps the most chunks after a kill. But a configuration that wears
the disk clearly less is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import yaml

from kvtier.config import parse_config, slot_nbytes
from kvtier.errors import ConfigError
from kvtier.sim.cache import CacheResult, default_time_model, simulate_cache
from kvtier.sim.single import Progress, SingleResult, simulate_single
from kvtier.sim.time_model import TierSpeed
from kvtier.sim.traces import Trace
from kvtier.units import approximate_rate, approximate_size, format_size

__all__ = ["CANDIDATES", "RecommendRequest", "recommend"]

T = TypeVar("T")

CANDIDATES: Final = ("lhd", "lru", "arc", "2q", "s3-fifo")
"""Names of the eviction policies to try."""

_DEFAULT: Final = CANDIDATES[0]

_BLOCK_TOKENS: Final = 16
"""Default number of tokens of an engine's block."""
_CLEARLY: Final = 0.003
"""Smallest gain in prefix hit ratio with which a policy replaces the default policy."""
_ABOUT: Final = 1.02
"""Waits count as equal within this ratio, because the time model is inexact."""
_THRIFTY: Final = 0.8
"""A configuration wins if its writes are below this share of the safest configuration's."""
_WRITES: Final = ("through", "evict")
"""Values of ``placement.write`` to try, the safest first."""


@dataclass(frozen=True, slots=True)
class RecommendRequest:
    """The resources that the cache may use.

    Attributes:
        ram_bytes: Number of bytes of memory for chunks.
        nvme_bytes: Number of bytes of disk for chunks.
        prefill_tokens_per_s: Number of prompt tokens that the engine computes per second; None
            for the default.
        speeds: Known speeds by tier: ``ram``, ``nvme``.
    """

    ram_bytes: int
    nvme_bytes: int
    path: Path
    chunk_bytes: int
    prefill_tokens_per_s: float | None = None
    speeds: Mapping[str, TierSpeed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tried:
    write: str
    text: str
    result: CacheResult


def recommend(trace: Trace, request: RecommendRequest, *, progress: Progress | None) -> str:
    """Return the recommended configuration as YAML text, with comments that explain it.

    Raises:
        ConfigError: RAM or disk is smaller than a chunk, or ``speeds`` names an unknown tier.
    """
    slots = _slots(request)
    steps, ended = len(slots) * len(CANDIDATES) + len(_WRITES), count(1)

    def done(result: T) -> T:
        if progress is not None:
            progress(next(ended) / steps)
        return result

    singles = {
        tier: [
            done(simulate_single(trace, policy=policy, capacity=capacity))
            for policy in CANDIDATES
        ]
        for tier, capacity in slots.items()
    }
    evictions = {tier: _winner(results) for tier, results in singles.items()}
    tried = [done(_try(trace, request, evictions, write)) for write in _WRITES]
    best = _best(tried)
    comments = _reasons(trace, request, singles, tried, best)
    return "".join(f"# {line}".rstrip() + "\n" for line in comments) + best.text


def _slots(request: RecommendRequest) -> dict[str, int]:
    slot_bytes = slot_nbytes(request.chunk_bytes)
    slots = {"ram": request.ram_bytes // slot_bytes, "nvme": request.nvme_bytes // slot_bytes}
    for tier, chunks in slots.items():
        if not chunks:
            need = f"a chunk takes {format_size(slot_bytes)}"
            raise ConfigError(f"--{tier}: holds no chunk; {need}: give it more")
    unknown = request.speeds.keys() - slots.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"--tier-speed {names}: no such tier; the tiers are ram and nvme")
    return slots


def _winner(results: Sequence[SingleResult]) -> str:
    """Return the policy with the best hit ratio if it clearly wins, else the default."""
    default = next(result for result in results if result.policy == _DEFAULT)
    best = max(results, key=lambda result: result.prefix_hit_ratio)
    clearly = best.prefix_hit_ratio > default.prefix_hit_ratio + _CLEARLY
    return best.policy if clearly else default.policy


def _try(
    trace: Trace,
    request: RecommendRequest,
    evictions: Mapping[str, str],
    write: str,
) -> _Tried:
    document = {
        "tiers": [
            {
                "kind": "ram",
                "capacity": format_size(request.ram_bytes),
                "eviction": evictions["ram"],
            },
            {
                "kind": "nvme",
                "path": str(request.path),
                "capacity": format_size(request.nvme_bytes),
                "eviction": evictions["nvme"],
            },
        ],
        "placement": {"write": write},
        **_engine(trace),
    }
    text = yaml.safe_dump(document, sort_keys=False)
    config = parse_config(text, source="recommended")
    result = simulate_cache(
        trace,
        config,
        chunk_bytes=request.chunk_bytes,
        model=default_time_model(
            config,
            trace,
            prefill_tokens_per_s=request.prefill_tokens_per_s,
            speeds=request.speeds,
        ),
    )
    return _Tried(write, text, result)


def _engine(trace: Trace) -> dict[str, dict[str, int]]:
    """Return the ``engine`` section; {} if chunks are not multiples of 16 tokens."""
    blocks, rest = divmod(trace.chunk_tokens, _BLOCK_TOKENS)
    return {} if rest else {"engine": {"blocks_per_chunk": blocks}}


def _best(tried: Sequence[_Tried]) -> _Tried:
    shortest = min(_wait(one) for one in tried)
    good = [one for one in tried if _wait(one) <= shortest * _ABOUT]
    thrifty = min(good, key=lambda one: one.result.writes_per_ref)
    saves = thrifty.result.writes_per_ref < good[0].result.writes_per_ref * _THRIFTY
    return thrifty if saves else good[0]


def _wait(one: _Tried) -> float:
    return one.result.ttft_s["p90"]


def _reasons(
    trace: Trace,
    request: RecommendRequest,
    singles: Mapping[str, Sequence[SingleResult]],
    tried: Sequence[_Tried],
    best: _Tried,
) -> Iterator[str]:
    model = best.result.time_model
    yield f"For the traffic of {trace.name} (sha256 {trace.sha256[:16]}), read as:"
    yield from (f"  {assumption}" for assumption in trace.assumed)
    yield from (f"Warning: {warning}." for warning in trace.warnings)
    yield f"Assumed: chunks of {approximate_size(request.chunk_bytes)}, an engine that computes"
    yield f"{model.prefill_tokens_per_s:,.0f} prompt tokens per second, and tiers so fast:"
    for tier, speed in model.speeds.items():
        read, write = speed.read_bytes_per_s, speed.write_bytes_per_s
        yield f"  {tier} reads {approximate_rate(read)} and writes {approximate_rate(write)}."
    yield f"Loads go the path {best.result.load_path}, as behind kvtier's connector."
    yield f"Assumes chunks of {trace.chunk_tokens} tokens: set engine.blocks_per_chunk to that,"
    yield f"divided by the tokens of one of the engine's blocks, usually {_BLOCK_TOKENS}."
    for tier, results in singles.items():
        yield ""
        yield f"Eviction, alone in {results[0].capacity_chunks:,} chunks (the {tier} tier):"
        for single in sorted(results, key=lambda one: -one.prefix_hit_ratio):
            yield f"  {single.policy:<12}{single.prefix_hit_ratio:8.2%} of the prompt tokens"
        clearly = f"{_CLEARLY * 100:.1f} points more"
        yield f"  {_DEFAULT} stays unless another hits {clearly}: {_winner(results)}."
    yield ""
    yield "Placement, with all tiers:"
    for one in tried:
        yield f"  {_figures(one)}{'   <- chosen' if one is best else ''}"
    without = best.result.ttft_no_cache_s
    yield f"  no cache at all: p50 {without['p50']:.2f} s, p90 {without['p90']:.2f} s"
    if best.result.peak_load_no_cache > 1:
        load = f"{best.result.peak_load_no_cache:.1f} times what it computes"
        yield f"  (in its busiest tenth it is asked for {load}: a queue that grows)"
    yield "The shortest p90 wins; of those within 2 % of it the first, for write: through keeps"
    yield "everything when a process is killed, unless another writes a fifth less."
    yield ""


def _figures(one: _Tried) -> str:
    result = one.result
    dwpd = result.tiers[-1].dwpd
    wear = "" if dwpd is None else f", {dwpd:.1f} drive writes per day"
    return (
        f"write: {one.write:<8} "
        f"hits {result.prefix_hit_ratio:.2%}, first token p50 {result.ttft_s['p50']:.2f} s, "
        f"p90 {result.ttft_s['p90']:.2f} s{wear}"
    )
