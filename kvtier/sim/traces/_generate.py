"""Generates traces of conversations, agents, and prompts with shared prefixes.

In a session the text grows: a prompt is the previous prompt, its answer and new input. Only
whole chunks have ids, as in an engine. Two chunks have the same id if and only if their whole
prefixes are equal. All random numbers come from one seeded generator, so a seed and a workload
always give the same trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Final

from kvtier.sim.traces._source import TraceBuilder
from kvtier.sim.traces._trace import Trace

__all__ = ["GENERATORS", "Workload", "generate"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of generated sessions.

    Lengths are medians of log-normal distributions. Times are means of exponential
    distributions.

    Attributes:
        prompts: Number of shared prefixes. The n-th most popular prefix has weight 1/n.
        prompt_tokens: Number of tokens of a shared prefix.
        turns: Mean number of turns of a session, geometrically distributed.
        input_tokens: Number of tokens that a turn adds to the prompt.
        output_tokens: Number of tokens of the answer.
        pause_s: Mean time from one turn to the next.
        spread: Standard deviation of the logarithms of the lengths.
        limit_tokens: Number of tokens of the longest prompt. A session ends before its prompt
            gets longer.
    """

    prompts: int
    prompt_tokens: int
    turns: float
    input_tokens: int
    output_tokens: int
    pause_s: float
    spread: float = 0.8
    limit_tokens: int = 131_072


GENERATORS: Final[Mapping[str, Workload]] = {
    "chat": Workload(
        prompts=8,
        prompt_tokens=400,
        turns=4.0,
        input_tokens=150,
        output_tokens=300,
        pause_s=60.0,
    ),
    "agents": Workload(
        prompts=4,
        prompt_tokens=6_000,
        turns=20.0,
        input_tokens=900,
        output_tokens=150,
        pause_s=6.0,
    ),
    "shared": Workload(
        prompts=200,
        prompt_tokens=4_000,
        turns=1.0,
        input_tokens=400,
        output_tokens=200,
        pause_s=0.0,
    ),
}


@dataclass(frozen=True, slots=True)
class _Turn:
    time_s: float
    session: int
    prompt: int
    input_tokens: int
    output_tokens: int


def generate(name: str, *, sessions: int, per_s: float, chunk_tokens: int, seed: int) -> Trace:
    """Return a trace of ``sessions`` sessions of the workload ``name``.

    ``per_s`` sessions start per second, on average. Equal seeds give equal traces.
    """
    workload = GENERATORS[name]
    rng = random.Random(seed)
    lengths = [
        _draw(rng, workload.prompt_tokens, workload.spread) for _ in range(workload.prompts)
    ]
    weights = [1 / rank for rank in range(1, workload.prompts + 1)]
    turns: list[_Turn] = []
    begin_s = 0.0
    for session in range(sessions):
        begin_s += rng.expovariate(per_s)
        (prompt,) = rng.choices(range(workload.prompts), weights)
        turns.extend(_session(rng, workload, session, prompt, lengths[prompt], begin_s))
    turns.sort(key=lambda turn: (turn.time_s, turn.session))
    builder = TraceBuilder(chunk_tokens=chunk_tokens)
    for turn in turns:
        builder.add(
            _chain(turn, lengths[turn.prompt] // chunk_tokens, chunk_tokens),
            timestamp_s=turn.time_s,
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            session=f"{name} {turn.session}",
        )
    made_of = f"{name} {asdict(workload)} {sessions} {per_s} {chunk_tokens} {seed}"
    digest = sha256(made_of.encode()).hexdigest()
    return builder.finish(name=f"{name}-{seed}", format_name="generated", sha256=digest)


def _session(
    rng: random.Random,
    workload: Workload,
    session: int,
    prompt: int,
    length: int,
    begin_s: float,
) -> Iterator[_Turn]:
    time_s = begin_s
    while True:
        length += _draw(rng, workload.input_tokens, workload.spread)
        if length > workload.limit_tokens:
            return
        output = _draw(rng, workload.output_tokens, workload.spread)
        yield _Turn(time_s, session, prompt, length, output)
        length += output
        if rng.random() * workload.turns < 1.0:
            return
        time_s += rng.expovariate(1 / workload.pause_s)


def _chain(turn: _Turn, shared: int, chunk_tokens: int) -> list[Hashable]:
    """Return the ids of a prompt's whole chunks: chunks of the prefix, then of the session."""
    whole = turn.input_tokens // chunk_tokens
    own = range(shared, whole)
    return [
        *((-1 - turn.prompt, depth) for depth in range(min(shared, whole))),
        *((turn.session, depth) for depth in own),
    ]


def _draw(rng: random.Random, median: int, spread: float) -> int:
    """Return a log-normal length, at least 1 and at most 50 times the median."""
    return max(1, min(round(rng.lognormvariate(math.log(median), spread)), 50 * median))
