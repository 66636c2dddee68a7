"""The steps of a warm-up: read, plan, compute, write, verify."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvtier.config import KvtierConfig, NvmeTierConfig
from kvtier.errors import ConfigError
from kvtier.manager.hits import GroupReach
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.warmup._coverage import Coverage, CoverageReader, KeyRules, StoredKeys
from kvtier.warmup._engine import EngineSetup, WarmupEngine, check_prompt, to_prompt
from kvtier.warmup._events import (
    EngineStarted,
    Finished,
    Planned,
    Progress,
    Verified,
    WarmupEvent,
    WarmupReport,
    progress_of,
)
from kvtier.warmup._identity import declared_namespaces, require_same_identity
from kvtier.warmup._options import WarmupOptions
from kvtier.warmup._plan import Plan, Room, make_plan, pick, planned_of
from kvtier.warmup._prefill import PrefillState, prefill
from kvtier.warmup._prompts import BadLine, Line, Prompt
from kvtier.warmup._spool import PromptSpool, fill_spool
from kvtier.warmup._stores import (
    estimate_saving,
    nbytes_per_token,
    newest_generation,
    opened_namespaces,
    retain,
    verify_since,
)

__all__ = ["WarmupRun"]

T = TypeVar("T")

_PROGRESS_S: Final = 0.25
_MEASURE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class WarmupRun:
    """One run of a warm-up.

    Attributes:
        options: Settings of the warm-up.
        prompts: The file of prompts.
        config: The configuration of the tiers.
        tiers: The persistent tiers.
        identity: The part of the engine's identity that is known before it starts.
        setup: The engine before it starts.
        spool: Sorts the prompts.
        pool: One thread for blocking calls.
    """

    options: WarmupOptions
    prompts: Path
    config: KvtierConfig
    tiers: Sequence[NvmeTierConfig]
    identity: Fields
    setup: EngineSetup
    spool: PromptSpool
    pool: IoPool

    async def events(self) -> AsyncGenerator[WarmupEvent, None]:
        """Run the whole warm-up and yield its events."""
        reading = fill_spool(
            self.spool,
            self.prompts,
            convert=self._to_prompts,
            skip_bad_lines=self.options.skip_bad_lines,
            pool=self.pool,
        )
        async with contextlib.aclosing(reading) as events:
            async for event in events:
                yield event
        steps = self._dry_run() if self.options.dry_run else self._warm()
        async with contextlib.aclosing(steps) as events:
            async for event in events:
                yield event

    async def _call(self, call: Callable[[], T]) -> T:
        return await self.pool.run(call, priority=0)

    # -- prompts -------------------------------------------------------------------------------

    async def _to_prompts(self, lines: Sequence[Line]) -> list[Prompt | BadLine]:
        """Return the prompt in each line, or the line's problem."""
        return await self._call(lambda: [_to_prompt(line, self.setup) for line in lines])

    # -- plans ---------------------------------------------------------------------------------

    async def _dry_run(self) -> AsyncGenerator[WarmupEvent, None]:
        """Choose the prompts by namespaces that are known without an engine; yield the plan."""
        _, planned = await self._call(lambda: self._plan(self._declared_spaces()))
        yield planned

    def _declared_spaces(self) -> dict[str, StoredNamespace]:
        """Return the namespace that an engine would use, by the tier's name.

        Raises:
            ConfigError: Several namespaces fit; only a running engine knows its own.
        """
        spaces: dict[str, StoredNamespace] = {}
        for tier in self.tiers:
            fitting, _ = declared_namespaces(tier, self.identity)
            if len(fitting) > 1:
                names = ", ".join(space.name for space in fitting)
                problem = f"only a running engine knows which of {names} it uses"
                remedy = f"run kvtier cache coverage {tier.path} --namespace NAME"
                raise ConfigError(f"tier {tier.name}: {problem}; {remedy}")
            spaces.update((tier.name, space) for space in fitting)
        return spaces

    def _plan(self, spaces: Mapping[str, StoredNamespace]) -> tuple[Plan, Planned]:
        """Choose the prompts to compute."""
        slot_nbytes = next((each.layout.slot_nbytes for each in spaces.values()), 0)
        room = Room()
        if slot_nbytes:
            budget = self.options.budget_bytes
            room = Room(
                max(tier.capacity_bytes for tier in self.tiers) // slot_nbytes,
                math.inf if budget is None else budget // slot_nbytes,
            )
        plan = make_plan(self.spool.in_order(), self._reader(spaces), room)
        nbytes = plan.new_chunks * slot_nbytes if slot_nbytes else None
        return plan, planned_of([plan], nbytes)

    def _reader(self, spaces: Mapping[str, StoredNamespace]) -> CoverageReader:
        setup, space = self.setup, next(iter(spaces.values()), None)
        if space is None:
            tokens = setup.block_tokens
            chunk = GroupReach(tokens * self.config.engine.blocks_per_chunk)
            seed = str(self.identity["hash_seed"])
            rules = KeyRules(((0, chunk),), tokens, setup.algorithm, seed)
        else:
            rules = KeyRules.of(space, algorithm=setup.algorithm)
        return CoverageReader(
            rules,
            {name: StoredKeys.read(each) for name, each in spaces.items()},
            lora_paths=setup.lora_paths,
            name_chunk=setup.name_chunk,
        )

    def _coverage(
        self, spaces: Mapping[str, StoredNamespace]
    ) -> tuple[Coverage, Mapping[int, int]]:
        """Return the coverage of all prompts, and the rank of each chunk by its key's hash."""
        reader = self._reader(spaces)
        coverage = reader.totals()
        places: dict[int, int] = {}
        for _, prompt in self.spool.in_order():
            found = reader.cover(prompt)
            coverage.add(found)
            for key_hash in found.key_hashes.tolist():
                places.setdefault(key_hash, len(places))
        return coverage, places

    # -- with an engine ------------------------------------------------------------------------

    async def _warm(self) -> AsyncGenerator[WarmupEvent, None]:
        """Start the engine; compute, write and verify the prompts; yield the events."""
        state = PrefillState()
        async with self._engine() as engine:
            spaces = await self._call(partial(opened_namespaces, engine, self.tiers))
            yield EngineStarted({name: str(each.directory) for name, each in spaces.items()})
            await self._call(partial(self._require_same_identity, spaces))
            before = await self._call(partial(_newest, spaces))
            plan, planned = await self._call(partial(self._plan, spaces))
            yield planned
            async with contextlib.aclosing(self._prefill(engine, plan, state)) as progress:
                async for event in progress:
                    yield event
        verified = []
        for name, space in spaces.items():
            found = await self._call(partial(verify_since, name, space, before[name]))
            verified.append(found)
            yield found
        yield await self._call(partial(self._finished, planned, state, spaces, verified))

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[WarmupEngine]:
        """Start the engine, and end it afterwards."""
        started: list[WarmupEngine] = []
        try:
            # A start cannot be cancelled: a cancellation takes effect when the engine runs.
            await self._call(lambda: started.append(self.setup.start()))
            yield started[0]
        finally:
            for engine in started:
                await self._call(engine.close)

    def _require_same_identity(self, spaces: Mapping[str, StoredNamespace]) -> None:
        if self.options.new_cache:
            return
        for tier in self.tiers:
            own = spaces[tier.name]
            require_same_identity(tier, own.layout.fingerprint.fields, own=own)

    async def _prefill(
        self, engine: WarmupEngine, plan: Plan, state: PrefillState
    ) -> AsyncGenerator[Progress, None]:
        """Compute the prompts of ``plan`` on the job's thread, and yield the progress."""
        stop = threading.Event()
        prompts = pick(plan, self.spool.pick(plan.ids))
        call = self._call(partial(prefill, engine, prompts, state, stop=stop))
        work = asyncio.create_task(call, name="kvtier-warmup")
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_PROGRESS_S)
                yield progress_of(state, plan.new_tokens)
            await work
        finally:
            stop.set()
            await asyncio.wait({work})

    def _finished(
        self,
        planned: Planned,
        state: PrefillState,
        spaces: Mapping[str, StoredNamespace],
        verified: Sequence[Verified],
    ) -> Finished:
        coverage, hashes = self._coverage(spaces)
        retained = 0
        if self.options.retain_s is not None:
            for tier in self.tiers:
                space = spaces[tier.name]
                retained += retain(tier, space, hashes, seconds=self.options.retain_s)
        return Finished(
            WarmupReport(
                planned=planned,
                prompts=state.prompts,
                failed=tuple(state.failed),
                computed_tokens=state.computed_tokens,
                seconds=state.seconds,
                coverage=coverage,
                nbytes_per_token=nbytes_per_token(next(iter(spaces.values()))),
                verified=verified,
                retained_chunks=retained,
                saving=estimate_saving(
                    self.config, coverage, state, spaces, seconds=_MEASURE_S
                ),
            )
        )


def _to_prompt(line: Line, setup: EngineSetup) -> Prompt | BadLine:
    """Return the prompt in a line, or the line's problem."""
    if isinstance(line, BadLine):
        return line
    number, content = line
    try:
        prompt = to_prompt(number, content, setup)
        check_prompt(prompt, setup)
    except ConfigError as error:
        return BadLine(number, str(error))
    return prompt


def _newest(spaces: Mapping[str, StoredNamespace]) -> dict[str, int]:
    return {name: newest_generation(space) for name, space in spaces.items()}
