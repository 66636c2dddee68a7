"""Warms up running servers in place: every engine behind them computes every prompt."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.manager.hits import GroupReach
from kvtier.os.iopool import IoPool
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.warmup._coverage import (
    Coverage,
    CoverageReader,
    KeyRules,
    StoredKeys,
    sum_coverages,
)
from kvtier.warmup._engine import check_prompt
from kvtier.warmup._events import (
    EngineStarted,
    Finished,
    Planned,
    Progress,
    WarmupEvent,
    WarmupReport,
    progress_of,
)
from kvtier.warmup._http import EngineFigures, HttpClient, Server
from kvtier.warmup._options import WarmupOptions
from kvtier.warmup._plan import Plan, Room, make_plan, pick, planned_of
from kvtier.warmup._prefill import RAM_SHARE, STALL_S, PrefillState
from kvtier.warmup._prompts import BadLine, Line, Prompt
from kvtier.warmup._spool import PromptSpool, fill_spool
from kvtier.warmup._stores import nbytes_per_token

__all__ = ["ServerRun"]

T = TypeVar("T")

_AT_ONCE: Final = 4
"""Requests to one engine at a time, beside those of users."""
_LOOK_S: Final = 1.0
"""How often figures are read; the server updates them once a second."""
_FIRST_REPORT_S: Final = 30.0
_UNKNOWN: Final = KeyRules(((0, GroupReach(16)),), 16)
"""For stores on other machines: where nothing is stored, only the number of chunks matters."""


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine behind a server."""

    server: Server
    rank: str
    figures: EngineFigures
    spaces: Mapping[str, StoredNamespace] = field(default_factory=dict)
    plan: Plan | None = None
    underway: int = 0
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def name(self) -> str:
        """Return the engine's name in messages."""
        return f"{self.server.url} engine {self.rank}"

    async def take_room(self, chunks: int) -> None:
        """Wait until RAM has room for ``chunks`` more chunks, and reserve the room."""
        async with self.moved:
            await self.moved.wait_for(lambda: self._has_room(chunks))
            self.underway += chunks

    async def give_back(self, chunks: int) -> None:
        """Release the room for ``chunks`` that :meth:`take_room` reserved."""
        async with self.moved:
            self.underway -= chunks
            self.moved.notify_all()

    async def update(self, figures: EngineFigures) -> bool:
        """Replace the figures; return whether the number of unwritten chunks changed."""
        has_moved = figures.unwritten_chunks != self.figures.unwritten_chunks
        async with self.moved:
            self.figures = figures
            self.moved.notify_all()
        return has_moved

    def _has_room(self, chunks: int) -> bool:
        waiting = self.underway + self.figures.unwritten_chunks
        return not waiting or waiting + chunks <= RAM_SHARE * self.figures.ram_chunks


@dataclass(frozen=True, slots=True)
class ServerRun:
    """A warm-up of running servers.

    Attributes:
        options: Settings of the warm-up.
        prompts: The file of prompts.
        model: The model, as the servers call it.
        client: Sends requests.
        spool: Sorts the prompts.
        pool: One thread for blocking calls.
    """

    options: WarmupOptions
    prompts: Path
    model: str
    client: HttpClient
    spool: PromptSpool
    pool: IoPool

    async def events(self) -> AsyncGenerator[WarmupEvent, None]:
        """Run the whole warm-up and yield its events."""
        opening = partial(Server.open, self.client, model=self.model)
        servers = [await opening(url=url) for url in self.options.servers]
        reading = fill_spool(
            self.spool,
            self.prompts,
            convert=partial(_to_prompts, servers[0]),
            skip_bad_lines=self.options.skip_bad_lines,
            pool=self.pool,
        )
        async with contextlib.aclosing(reading) as events:
            async for event in events:
                yield event
        engines = [engine for server in servers for engine in await self._engines(server)]
        for engine in engines:
            engine.spaces = await self._call(partial(_local_spaces, engine.figures))
        yield EngineStarted(
            {
                f"{engine.name} {tier}": str(path)
                for engine in engines
                for tier, path in engine.figures.stores.items()
            }
        )
        for engine in engines:
            engine.plan = await self._call(partial(self._plan, engine))
        planned = _planned(engines)
        yield planned
        if self.options.dry_run:
            return
        state = PrefillState()
        async with contextlib.aclosing(self._compute(engines, state)) as progress:
            async for each in progress:
                yield each
        yield await self._call(partial(self._finished, engines, planned, state))

    async def _call(self, call: Callable[[], T]) -> T:
        return await self.pool.run(call, priority=0)

    # -- engines -------------------------------------------------------------------------------

    async def _engines(self, server: Server) -> list[_Engine]:
        """Return the engines behind ``server``, each with its first report.

        An engine reports its tiers only after its first step. So this method first sends a
        prompt.

        Raises:
            ConfigError: An engine has no kvtier.
        """
        figures = await server.figures()
        silent = [rank for rank, each in figures.items() if not each.ram_chunks]
        if silent and self.options.dry_run:
            return [_Engine(server, rank, each) for rank, each in sorted(figures.items())]
        if silent:
            _, first = await self._call(lambda: next(self.spool.in_order()))
            for rank in silent:
                await server.compute(first, rank)
        deadline_s = time.monotonic() + _FIRST_REPORT_S
        while not figures or not all(each.ram_chunks for each in figures.values()):
            if time.monotonic() > deadline_s:
                remedy = "start it with what kvtier vllm-args prints"
                raise ConfigError(f"{server.url}: an engine reports no kvtier; {remedy}")
            await asyncio.sleep(_LOOK_S)
            figures = await server.figures()
        return [_Engine(server, rank, each) for rank, each in sorted(figures.items())]

    def _plan(self, engine: _Engine) -> Plan:
        space, budget = next(iter(engine.spaces.values()), None), math.inf
        if space is not None and self.options.budget_bytes is not None:
            budget = self.options.budget_bytes // space.layout.slot_nbytes
        room = Room(engine.figures.tier_chunks or math.inf, budget)
        return make_plan(self.spool.in_order(), _reader(engine), room)

    # -- work ----------------------------------------------------------------------------------

    async def _compute(
        self, engines: Sequence[_Engine], state: PrefillState
    ) -> AsyncGenerator[Progress, None]:
        """Let each engine compute its plan; yield progress until all chunks are written."""
        began_s = moved_s = time.monotonic()
        total = sum(engine.plan.new_tokens for engine in engines if engine.plan)
        work = [
            asyncio.create_task(self._feed(engine, state), name=f"kvtier-warmup-{number}")
            for number, engine in enumerate(engines)
        ]
        try:
            # The figures of a server are older than the end of its last prompt.
            while not _is_done(work, state, quiet_s=time.monotonic() - moved_s):
                before = state.prompts
                await _wait(work)
                _raise_failed(work)
                has_moved = await _look(engines)
                state.unwritten_chunks = sum(
                    engine.figures.unwritten_chunks for engine in engines
                )
                now_s = time.monotonic()
                state.seconds = now_s - began_s
                if has_moved or state.prompts > before:
                    moved_s = now_s
                elif now_s - moved_s > STALL_S:
                    raise TierUnavailableError("warm-up", _stalled(state))
                yield progress_of(state, total)
        finally:
            for task in work:
                task.cancel()
            await asyncio.wait(work)

    async def _feed(self, engine: _Engine, state: PrefillState) -> None:
        """Send the prompts of the engine's plan, a few at a time."""
        if engine.plan is None or not engine.plan.ids:
            return
        prompts = pick(engine.plan, self.spool.pick(engine.plan.ids))
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._send(engine, prompts, state))

    async def _send(
        self,
        engine: _Engine,
        prompts: Iterator[tuple[Prompt, int, int]],
        state: PrefillState,
    ) -> None:
        while (found := await self._call(partial(next, prompts, None))) is not None:
            prompt, chunks, tokens = found
            await engine.take_room(chunks)
            try:
                state.computed_tokens += await engine.server.compute(prompt, engine.rank)
                state.prompts += 1
                state.tokens += tokens
            except ConfigError as error:
                state.failed.append(BadLine(prompt.line, str(error)))
            finally:
                await engine.give_back(chunks)

    def _finished(
        self, engines: Sequence[_Engine], planned: Planned, state: PrefillState
    ) -> Finished:
        total: Coverage | None = None
        for engine in engines:
            if not engine.spaces:
                continue
            reader = _reader(engine)
            coverage = reader.totals()
            for _, prompt in self.spool.in_order():
                coverage.add(reader.cover(prompt))
            total = sum_coverages([coverage] if total is None else [total, coverage])
        spaces = [space for engine in engines for space in engine.spaces.values()]
        return Finished(
            WarmupReport(
                planned=planned,
                prompts=state.prompts,
                failed=tuple(state.failed),
                computed_tokens=state.computed_tokens,
                seconds=state.seconds,
                coverage=total,
                nbytes_per_token=nbytes_per_token(spaces[0]) if spaces else 0.0,
            )
        )


async def _to_prompts(server: Server, lines: Sequence[Line]) -> list[Prompt | BadLine]:
    """Return the prompt in each line, or the line's problem; ``server`` finds the tokens."""
    return [await _to_prompt(line, server) for line in lines]


async def _to_prompt(line: Line, server: Server) -> Prompt | BadLine:
    """Return the prompt in a line, or the line's problem."""
    if isinstance(line, BadLine):
        return line
    number, content = line
    try:
        tokens = await server.tokens(content)
        prompt = Prompt(number, tokens, content.priority, content.lora, content.cache_salt)
        check_prompt(prompt, server)
    except ConfigError as error:
        return BadLine(number, str(error))
    return prompt


def _local_spaces(figures: EngineFigures) -> dict[str, StoredNamespace]:
    """Return the engine's namespaces that are on this machine, by the tier's name."""
    spaces: dict[str, StoredNamespace] = {}
    for tier, path in figures.stores.items():
        with contextlib.suppress(ConfigError):
            spaces[tier] = find_namespaces(path)[0]
    return spaces


def _reader(engine: _Engine) -> CoverageReader:
    """Return a reader of the engine's stores; of none if they are on another machine."""
    space = next(iter(engine.spaces.values()), None)
    rules = _UNKNOWN if space is None else KeyRules.of(space)
    # Only the server knows the content of adapters. So keys are compared without its digest.
    stores = {
        name: StoredKeys.read(each, with_adapters=False) for name, each in engine.spaces.items()
    }
    return CoverageReader(rules, stores, lora_paths=engine.server.lora_paths)


def _planned(engines: Sequence[_Engine]) -> Planned:
    plans = [(engine, engine.plan) for engine in engines if engine.plan is not None]
    nbytes = 0
    for engine, plan in plans:
        for space in engine.spaces.values():
            nbytes += plan.new_chunks * space.layout.slot_nbytes
    known = nbytes if all(engine.spaces for engine in engines) else None
    return planned_of([plan for _, plan in plans], known)


async def _look(engines: Sequence[_Engine]) -> bool:
    """Read the figures of all engines; return whether a number of unwritten chunks changed."""
    has_moved = False
    for server in dict.fromkeys(engine.server for engine in engines):
        figures = await server.figures()
        for engine in engines:
            if engine.server is server and engine.rank in figures:
                has_moved |= await engine.update(figures[engine.rank])
    return has_moved


def _is_done(
    work: Sequence[asyncio.Task[None]], state: PrefillState, *, quiet_s: float
) -> bool:
    """Return whether all prompts ended and all chunks are written, for some seconds already."""
    is_idle = all(task.done() for task in work) and not state.unwritten_chunks
    return is_idle and quiet_s > 2 * _LOOK_S


async def _wait(work: Sequence[asyncio.Task[None]]) -> None:
    """Wait until the next reading of the figures is due, or until a task ends."""
    running = [task for task in work if not task.done()]
    if running:
        await asyncio.wait(running, timeout=_LOOK_S)
    else:
        await asyncio.sleep(_LOOK_S)


def _raise_failed(work: Sequence[asyncio.Task[None]]) -> None:
    """Raise the error of a task that failed."""
    for task in work:
        if task.done() and (error := task.exception()) is not None:
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error


def _stalled(state: PrefillState) -> str:
    return (
        f"no prompt ended and nothing was written for {STALL_S:.0f} s, and "
        f"{state.unwritten_chunks} chunks are only in RAM; with write: evict they reach the "
        "disk when the server stops"
    )
