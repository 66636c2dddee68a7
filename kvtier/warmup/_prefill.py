"""Feeds prompts to an engine no faster than its slower tiers can write the chunks.

A chunk that waits for a disk takes a slot in RAM. If all slots waited, the engine could store
nothing, and the KV that it computes meanwhile would be lost. So a prompt is sent only if its
chunks and the chunks that are not written yet fit in half of RAM. A prompt is also sent if no
other prompt is running and every chunk is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvtier.errors import TierUnavailableError
from kvtier.warmup._prompts import BadLine, Prompt

__all__ = ["RAM_SHARE", "STALL_S", "PrefillEngine", "PrefillState", "prefill"]

RAM_SHARE: Final = 0.5
"""Share of RAM that chunks may take while they wait for a slower tier."""
_IDLE_S: Final = 0.001
STALL_S: Final = 300.0
"""Longest time without any progress: a step of a large model takes seconds."""


class PrefillEngine(Protocol):
    """An engine that computes prompts, driven by one thread."""

    ram_chunks: int
    """Slots of the RAM tier."""
    max_requests: int
    """Requests that it runs at a time."""

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        """Queue a prompt; return why the engine refuses it, or an empty text."""

    def step(self) -> Sequence[tuple[int, int, int]]:
        """Run one step.

        Returns:
            One tuple per prompt that ended: its line, its number of tokens, and how many of
            these tokens came from a cache.
        """

    def has_work(self) -> bool:
        """Return whether the engine has a prompt to compute or a chunk to move."""

    def unwritten_chunks(self) -> int:
        """Return how many chunks a slower tier must still receive."""

    def abort(self) -> None:
        """Drop all queued and running prompts."""


@dataclass(slots=True)
class PrefillState:
    """Progress of a :func:`prefill`.

    Attributes:
        prompts: Number of prompts that ended.
        tokens: Number of tokens that these prompts added.
        computed_tokens: Number of tokens that the engine computed.
        unwritten_chunks: Chunks that a slower tier must still receive.
        failed: Prompts that the engine refused.
        seconds: Time since the start.
    """

    prompts: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    unwritten_chunks: int = 0
    failed: list[BadLine] = field(default_factory=list)
    seconds: float = 0.0


def prefill(
    engine: PrefillEngine,
    prompts: Iterator[tuple[Prompt, int, int]],
    state: PrefillState,
    *,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compute ``prompts``, and wait until every tier has their chunks. This call blocks.

    Args:
        engine: The engine.
        prompts: Each prompt, with the number of chunks and of tokens that it adds.
        state: This call updates it.
        stop: Set this event to make the call return soon. Closing the engine then writes the
            computed chunks.
        clock: Returns seconds on a monotonic clock.

    Raises:
        TierUnavailableError: For minutes no prompt ended and no chunk was written.
    """
    _Prefill(engine, prompts, state, clock).run(stop)


class _Prefill:
    """The state of one :func:`prefill`."""

    def __init__(
        self,
        engine: PrefillEngine,
        prompts: Iterator[tuple[Prompt, int, int]],
        state: PrefillState,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._clock = clock
        self._next: tuple[Prompt, int, int] | None = None
        self._running: dict[int, tuple[int, int]] = {}
        self._state = state
        self._began_s = self._moved_s = clock()

    def run(self, stop: threading.Event) -> None:
        """Run the loop of :func:`prefill` until every chunk is written or ``stop`` is set."""
        engine = self._engine
        while not stop.is_set():
            self._send()
            if not (self._running or engine.has_work()):
                break
            ended = engine.step()
            for line, tokens, cached_tokens in ended:
                self._end(line, tokens - cached_tokens)
            self._watch(moved=bool(ended))
            if not ended and not self._running:
                time.sleep(_IDLE_S)  # the threads of the tiers need the interpreter
        if self._running:
            engine.abort()
        self._state.seconds = self._clock() - self._began_s

    def _send(self) -> None:
        """Send prompts while there is room for their chunks."""
        engine = self._engine
        while len(self._running) < engine.max_requests:
            if self._next is None:
                self._next = next(self._prompts, None)
            if self._next is None:
                return
            prompt, chunks, tokens = self._next
            waiting = engine.unwritten_chunks() + sum(
                added for added, _ in self._running.values()
            )
            if waiting and waiting + chunks > RAM_SHARE * engine.ram_chunks:
                return
            self._next = None
            problem = engine.add(
                prompt.line, prompt.tokens, lora=prompt.lora, cache_salt=prompt.cache_salt
            )
            if problem:
                self._state.failed.append(BadLine(prompt.line, problem))
            else:
                self._running[prompt.line] = (chunks, tokens)

    def _end(self, line: int, computed_tokens: int) -> None:
        state = self._state
        _, tokens = self._running.pop(line, (0, 0))
        state.prompts += 1
        state.tokens += tokens
        state.computed_tokens += computed_tokens

    def _watch(self, *, moved: bool) -> None:
        """Record the progress; raise an error if there was no progress for too long."""
        state, now_s = self._state, self._clock()
        unwritten = self._engine.unwritten_chunks()
        if moved or unwritten != state.unwritten_chunks:
            self._moved_s = now_s
        state.unwritten_chunks, state.seconds = unwritten, now_s - self._began_s
        if now_s - self._moved_s > STALL_S:
            raise TierUnavailableError(
                "warm-up",
                f"no prompt ended and nothing was written for {STALL_S:.0f} s; see the "
                "engine's log, and run the command again to go on",
            )
