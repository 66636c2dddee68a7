"""Sends prompts to engines only as fast as slower tiers write the chunks.

A chunk that waits for a disk occupies a slot in RAM. If all slots had such chunks, the engine
could not store new KV, and that KV would be lost. So a prompt is sent only if its chunks and
all unwritten chunks fit in half of the RAM slots. A prompt is also sent if no other prompt is
running and every chunk is written.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvtier.coverage import BadLine, Prompt
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.warmup._events import Progress
from kvtier.warmup._plan import Work

__all__ = ["STALL_S", "FillState", "Target", "fill"]

_RAM_SHARE: Final = 0.5
"""Share of RAM for chunks that a slower tier must still write."""
_PROGRESS_S: Final = 0.25
STALL_S: Final = 300.0
"""Longest time without progress. It is long because one step can take seconds."""


class Target(Protocol):
    """One engine that a warm-up fills with chunks."""

    @property
    def ram_chunks(self) -> int:
        """Number of slots of the RAM tier."""

    @property
    def most_requests(self) -> int:
        """Largest number of prompts to run at the same time."""

    @property
    def prompt_timeout_s(self) -> float:
        """Longest time without progress while prompts run, in seconds."""

    @property
    def unwritten_chunks(self) -> int:
        """Number of chunks that a slower tier must still receive."""

    @property
    def is_idle(self) -> bool:
        """Whether every chunk is written. Meaningful only while no prompt is running."""

    async def compute(self, prompt: Prompt) -> int:
        """Compute a prompt; return the number of tokens that the engine computed.

        Raises:
            ConfigError: The engine refuses the prompt.
        """

    async def work(self) -> None:
        """Let the engine run for a moment, and update ``unwritten_chunks``."""


@dataclass(slots=True)
class FillState:
    """Progress of a :func:`fill`.

    Attributes:
        prompts: Number of prompts that ended.
        tokens: Number of planned tokens of these prompts.
        computed_tokens: Number of tokens that the engines computed.
        failed: Prompts that an engine refused, with the reasons.
        seconds: Seconds since the start.
    """

    prompts: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    failed: list[BadLine] = field(default_factory=list)
    seconds: float = 0.0


async def fill(
    plans: Sequence[tuple[Target, Sequence[Work]]],
    state: FillState,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Progress, None]:
    """Compute the prompts on their engines, and wait until all chunks are written.

    Args:
        plans: Each engine, with its prompts in order.
        state: The progress; this call updates it.
        clock: Returns seconds on a monotonic clock.

    Yields:
        The progress, several times a second.

    Raises:
        TierUnavailableError: No prompt ended and no chunk was written for too long.
    """
    began_s = clock()
    planned = sum(work.tokens for _, works in plans for work in works)
    tasks = [
        asyncio.create_task(_feed(target, deque(works), state, clock), name=f"warmup-{number}")
        for number, (target, works) in enumerate(plans)
    ]
    try:
        while running := [task for task in tasks if not task.done()]:
            await asyncio.wait(
                running, timeout=_PROGRESS_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in tasks:
                if task.done():
                    task.result()
            state.seconds = clock() - began_s
            unwritten = sum(target.unwritten_chunks for target, _ in plans)
            rate = state.tokens / state.seconds if state.seconds else 0.0
            yield Progress(state.prompts, state.tokens, planned, rate, unwritten)
    finally:
        await _end(tasks)


async def _feed(
    target: Target, works: deque[Work], state: FillState, clock: Callable[[], float]
) -> None:
    """Send prompts to one engine while RAM has room; then wait for unwritten chunks."""
    running: dict[asyncio.Task[int], Work] = {}
    moved_s, unwritten = clock(), target.unwritten_chunks
    try:
        while works or running or not target.is_idle:
            while works and _has_room(target, works[0], running):
                work = works.popleft()
                running[asyncio.create_task(target.compute(work.prompt))] = work
            await target.work()
            ended = [task for task in running if task.done()]
            for task in ended:
                _record(task, running.pop(task), state)
            limit_s = target.prompt_timeout_s if running else STALL_S
            if ended or unwritten != target.unwritten_chunks:
                moved_s, unwritten = clock(), target.unwritten_chunks
            elif clock() - moved_s > limit_s:
                raise TierUnavailableError("warm-up", _stalled(unwritten, limit_s))
    finally:
        await _end(running)


def _has_room(target: Target, work: Work, running: dict[asyncio.Task[int], Work]) -> bool:
    waiting = target.unwritten_chunks + sum(each.chunks for each in running.values())
    fits = not waiting or waiting + work.chunks <= _RAM_SHARE * target.ram_chunks
    return fits and len(running) < target.most_requests


def _record(task: asyncio.Task[int], work: Work, state: FillState) -> None:
    try:
        state.computed_tokens += task.result()
    except ConfigError as error:
        state.failed.append(BadLine(work.prompt.line, str(error)))
    else:
        state.prompts += 1
        state.tokens += work.tokens


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks``, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks)
        for task in ended:
            if not task.cancelled():
                task.exception()  # retrieved, so asyncio does not report it as lost


def _stalled(unwritten: int, limit_s: float) -> str:
    return (
        f"no prompt ended and nothing was written for {limit_s:.0f} s, and {unwritten:,} "
        "chunks are only in RAM; see the engine's log (with write: evict, a server writes them "
        "when it stops)"
    )
