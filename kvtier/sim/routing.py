"""Rules that send each request of a trace to one of several engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle, takewhile
from typing import Final

from kvtier.sim.traces import Trace

__all__ = ["ROUTINGS"]

_ENOUGH: Final = 0.5
"""A known prefix must have at least this share of the prompt's chunks."""


def _by_turns(trace: Trace, engines: int) -> list[int]:
    """Return the engine of each request; the engines get requests in turn."""
    return [number % engines for number in range(trace.requests)]


def _by_prefix(trace: Trace, engines: int) -> list[int]:
    """Return for each request the engine that last received its longest known prefix.

    If this prefix is shorter than half of the prompt, the next engine in turn gets the request.
    So a system prompt that all requests share does not send all requests to one engine.
    """
    turns = cycle(range(engines))
    last: dict[int, int] = {}
    routes = []
    for chain in trace.chains():
        lead = sum(1 for _ in takewhile(last.__contains__, chain))
        known = lead and lead >= len(chain) * _ENOUGH
        engine = last[chain[lead - 1]] if known else next(turns)
        last.update(dict.fromkeys(chain, engine))
        routes.append(engine)
    return routes


ROUTINGS: Final[Mapping[str, Callable[[Trace, int], list[int]]]] = {
    "round-robin": _by_turns,
    "prefix": _by_prefix,
}
"""Routing rules, by name. A rule is a function that returns each request's engine."""
