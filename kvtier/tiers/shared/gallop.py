"""Count the leading keys of a chain that a service has, with few requests.

The chunks of a prompt form a chain: an engine stores each chunk after the chunks before it. So
a service usually has all chunks up to some point and no later ones. A galloping search finds
the point. The first round asks about positions at exponentially growing distances, including
the first and the last position. So one round suffices for an absent, a short or a complete
chain. Each later round divides the remaining range evenly, like a binary search with several
requests per round.

A service that evicts may have a hole in a chain. The search then returns a position before
which all answers were "yes". A read of a chunk in the hole is a miss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

__all__ = ["AT_ONCE", "Ask", "count_leading", "count_rounds", "find_leading"]

Ask: TypeAlias = Callable[[Sequence[int]], Awaitable[Sequence[bool]]]
"""Returns for each given position of a chain whether the service has the key there."""

AT_ONCE: Final = 8
"""Largest number of requests in one round."""


async def count_leading(count: int, ask: Ask, *, at_once: int = AT_ONCE) -> int:
    """Return how many leading keys of a chain of ``count`` keys the service has.

    The search takes up to ``2 + log(count) / log(at_once + 1)`` rounds. Each round calls
    ``ask`` with at most ``at_once`` positions, ascending from 0 to ``count - 1``.
    """
    present, absent = 0, count
    positions = _exponential(count, at_once)
    while present < absent:
        answers = await ask(positions)
        for position, is_there in zip(positions, answers, strict=True):
            if not is_there:
                absent = position
                break
            present = position + 1
        positions = _even(present, absent, at_once)
    return present


async def find_leading(
    keys: Sequence[str], ask: Callable[[Sequence[str]], Awaitable[Sequence[bool]]]
) -> list[bool]:
    """Return for each key of a chain whether the service has it, by a galloping search.

    ``ask`` returns for each given key whether the service has the key.
    """
    count = await count_leading(len(keys), lambda places: ask([keys[at] for at in places]))
    return [True] * count + [False] * (len(keys) - count)


def count_rounds(found: Sequence[bool]) -> int:
    """Return how many rounds :func:`count_leading` takes if the answers are ``found``."""
    rounds = 0

    async def ask(positions: Sequence[int]) -> list[bool]:
        nonlocal rounds
        rounds += 1
        return [found[position] for position in positions]

    search = count_leading(len(found), ask)
    with contextlib.suppress(StopIteration):  # nothing in it waits
        search.send(None)
    return rounds


def _exponential(count: int, at_once: int) -> list[int]:
    """Return positions from 0 to ``count - 1`` at exponentially growing distances."""
    if count <= at_once:
        return list(range(count))
    steps = max(at_once - 1, 1)
    spread = {round(count ** (step / steps)) - 1 for step in range(steps + 1)}
    return sorted(spread)[-at_once:]


def _even(first: int, end: int, at_once: int) -> list[int]:
    """Return up to ``at_once`` evenly spaced positions between ``first`` and ``end``."""
    parts = at_once + 1
    spread = {first + (end - first) * part // parts for part in range(1, parts)}
    return sorted(spread)
