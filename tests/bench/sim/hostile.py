"""Traffic made to mislead a policy that learns, and what the default loses to LRU on it.

Every kind of traffic has cases: a trace by its seed, and a tier's size. A loop, an alternation
and a lure are made for one size each; of these the loop and the lure are worst for it: a loop
is a little larger or smaller than the tier, a lure first teaches that what is used once never
returns, and then lets everything come back once, just within LRU's reach.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Final, NamedTuple, TypeAlias

from kvtier.sim.single import simulate_single
from kvtier.sim.traces import Trace, generate
from kvtier.sim.traces._source import TraceBuilder

__all__ = ["FLOOR_POINTS", "Row", "rows"]

Prompt: TypeAlias = list[tuple[object, int]]

POLICY: Final = "lhd"
FLOOR_POINTS: Final = -0.5
"""The most that the default may lose, in points of prefix hit ratio."""
SHARES: Final = (0.01, 0.05, 0.1, 0.2)
TINY_CHUNKS: Final = (20, 50, 100, 200)
_TOKENS: Final = 512
_FOOTPRINT: Final = 20_000


class Row(NamedTuple):
    """Points of prefix hit ratio above LRU on one kind of traffic."""

    traffic: str
    cases: int
    worst: float
    median: float
    best: float


def rows() -> Iterator[Row]:
    """Measure one kind of traffic after the other."""
    for traffic, cases in (
        ("generated chats", _generated("chat", 600, 1.0, SHARES)),
        ("generated agents", _generated("agents", 30, 0.05, SHARES)),
        ("generated shared prompts", _generated("shared", 3000, 4.0, SHARES)),
        ("scans, with repeats or a hot set between", _scans()),
        ("loops of 0.9 to 1.5 times the tier", _loops()),
        ("popularity that changes at once", _changes()),
        ("two kinds of traffic by turns", _alternations()),
        ("lures: a calm time, then everything comes back once", _lures()),
        ("tiny tiers of chats", _generated("chat", 400, 1.0, TINY_CHUNKS)),
        ("tiny tiers of agents", _generated("agents", 40, 0.1, TINY_CHUNKS)),
        ("tiny tiers of shared prompts", _generated("shared", 1500, 4.0, TINY_CHUNKS)),
    ):
        points = [_points(trace, size) for trace, size in cases]
        yield Row(traffic, len(points), min(points), statistics.median(points), max(points))


def _points(trace: Trace, size: float) -> float:
    """Return the points that the default is above LRU in a tier of ``size``."""
    capacity = max(round(size * trace.distinct), 1) if size < 1 else int(size)
    hits = [
        simulate_single(trace, policy=policy, capacity=capacity).prefix_hit_ratio
        for policy in (POLICY, "lru")
    ]
    return 100.0 * (hits[0] - hits[1])


# -- kinds of traffic


def _generated(
    kind: str, sessions: int, per_s: float, sizes: Sequence[float]
) -> Iterator[tuple[Trace, float]]:
    for seed in (1, 2):
        trace = generate(kind, sessions=sessions, per_s=per_s, chunk_tokens=256, seed=seed)
        yield from ((trace, size) for size in sizes)


def _scans() -> Iterator[tuple[Trace, float]]:
    for seed in (1, 2):
        rng = random.Random(seed)
        hot = _Hot(rng, 200)
        once = _trace(_scan(rng, 2000, seed))
        repeated = _trace(
            [
                prompt
                for prompt in _scan(rng, 2000, seed)
                for _ in range(1 + (rng.random() < 0.3))
            ]
        )
        between = _trace(
            [hot.draw() if rng.random() < 0.5 else prompt for prompt in _scan(rng, 4000, seed)]
        )
        yield from ((trace, size) for trace in (once, repeated, between) for size in SHARES)


def _loops() -> Iterator[tuple[Trace, float]]:
    for size in SHARES:
        for over in (0.9, 0.98, 1.02, 1.1, 1.5):
            rng = random.Random(1)
            count = max(int(over * size * _FOOTPRINT / 7), 1)
            loop = [_prompt(("loop", number), rng.randint(2, 12)) for number in range(count)]
            length = sum(map(len, loop))
            others = _scan(rng, (_FOOTPRINT - length) // 7, "other", lengths=(2, 12))
            turns = max(3, 40_000 // length)
            yield _trace([*(loop * turns), *others]), size
            yield _trace(_interleaved(rng, loop, others)), size


def _interleaved(
    rng: random.Random, loop: Sequence[Prompt], others: Sequence[Prompt]
) -> Iterator[Prompt]:
    at = 0
    for prompt in others:
        while rng.random() >= 0.3:
            yield loop[at % len(loop)]
            at += 1
        yield prompt


def _changes() -> Iterator[tuple[Trace, float]]:
    for every in (200, 1000, 4000):
        rng = random.Random(every)
        hot = _Hot(rng, 1500)
        prompts = []
        for number in range(8000):
            if not number % every:
                hot.change()
            prompts.append(hot.draw())
        trace = _trace(prompts)
        yield from ((trace, size) for size in SHARES)


def _alternations() -> Iterator[tuple[Trace, float]]:
    for size in SHARES:
        reach = int(0.8 * size * 5 * _FOOTPRINT)
        rng = random.Random(7)
        kinds = (
            partial(_scan, rng),
            partial(_drawn, rng),
            partial(_returning, rng, reach=reach),
        )
        for first, second in permutations(kinds, 2):
            for period in (300, 1500):
                turns = [
                    (first, second)[turn % 2](period, turn) for turn in range(6000 // period)
                ]
                yield _trace([prompt for prompts in turns for prompt in prompts]), size


def _lures() -> Iterator[tuple[Trace, float]]:
    for size in SHARES:
        for period in (400, 2000):
            for reach in (0.5, 0.85):
                rng = random.Random(3)
                prompts: list[Prompt] = []
                for turn in range(0, 8000 // period, 2):
                    hot = _Hot(rng, 100, tag=turn)
                    prompts += [
                        hot.draw() if rng.random() < 0.5 else prompt
                        for prompt in _scan(rng, period, turn)
                    ]
                    chunks = int(reach * size * 5 * _FOOTPRINT)
                    prompts += _returning(rng, period, turn, reach=chunks)
                yield _trace(prompts), size


# -- what they are made of


class _Hot:
    """Prompts of which a few are drawn often: the n-th with a weight of 1/n."""

    def __init__(self, rng: random.Random, count: int, *, tag: object = "hot") -> None:
        self._rng = rng
        self._prompts = [
            _prompt(("hot", tag, number), rng.randint(4, 30)) for number in range(count)
        ]
        self._weights = [1 / number for number in range(1, count + 1)]

    def draw(self) -> Prompt:
        return self._rng.choices(self._prompts, self._weights)[0]

    def change(self) -> None:
        """Let others be popular."""
        self._rng.shuffle(self._prompts)


def _drawn(rng: random.Random, count: int, tag: object) -> list[Prompt]:
    """Return draws from a hot set of its own."""
    hot = _Hot(rng, 500, tag=tag)
    return [hot.draw() for _ in range(count)]


def _scan(
    rng: random.Random, count: int, tag: object, *, lengths: tuple[int, int] = (10, 40)
) -> list[Prompt]:
    """Return prompts of which none comes twice."""
    return [_prompt(("once", tag, number), rng.randint(*lengths)) for number in range(count)]


def _returning(rng: random.Random, count: int, tag: object, *, reach: int) -> list[Prompt]:
    """Return prompts that come back once, after ``reach`` chunks, and never again."""
    prompts: list[Prompt] = []
    pending: list[tuple[int, Prompt]] = []
    chunks = number = 0
    while len(prompts) < count:
        new = _prompt(("twice", tag, number), rng.randint(5, 30))
        number += 1
        prompts.append(new)
        chunks += len(new)
        pending.append((chunks + reach, new))
        while pending and pending[0][0] <= chunks:
            _, back = pending.pop(0)
            prompts.append(back)
            chunks += len(back)
    return prompts[:count]


def _prompt(name: object, chunks: int) -> Prompt:
    return [(name, depth) for depth in range(chunks)]


def _trace(prompts: Sequence[Prompt] | Iterator[Prompt]) -> Trace:
    builder = TraceBuilder(chunk_tokens=_TOKENS)
    for number, prompt in enumerate(prompts):
        builder.add(
            prompt, timestamp_s=float(number), input_tokens=len(prompt) * _TOKENS, session=""
        )
    return builder.finish(name="made", format_name="made", sha256="0" * 64)
