"""A warm-up by an engine that this process starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final, TypeVar

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    PlacementConfig,
    TierConfig,
    TraceConfig,
    load_config,
    resolve_rank_paths,
    slot_nbytes,
    vllm_transfer_config,
)
from kvtier.coverage import KeyRules, Prompt, PromptLine, Stores, check_prompt, to_prompt
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.manager import GroupReach
from kvtier.os.iopool import IoPool
from kvtier.os.memory import open_anonymous
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.vllm.identity import declared_identity
from kvtier.vllm.model_geometry import KvDtype, read_model_geometry
from kvtier.warmup._engine import EngineSetup, OpenEngine, WarmupEngine
from kvtier.warmup._events import Saving, WarmupOptions, WarmupReport
from kvtier.warmup._filling import STALL_S
from kvtier.warmup._stores import (
    find_fitting,
    load_seconds,
    newest_generation,
    persistent_tiers,
    readable,
    require_same_identity,
    retain,
    verify_since,
)

__all__ = ["OfflineSite"]

T = TypeVar("T")

_ALWAYS_S: Final = 3650 * 86400.0
_IDLE_S: Final = 0.001
_MEASURE_S: Final = 1.0
_OF_TERMINAL: Final = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to every process of the command, including vLLM's workers."""


class OfflineSite:
    """Runs an engine with the deployment's arguments and a changed configuration.

    Args:
        file: The configuration of kvtier.
        model: The model, as in ``vllm serve MODEL``.
        arguments: The other arguments of ``vllm serve``.
        options: Settings of the warm-up.
        open_engine: Opens the engine.
        pool: One thread for blocking calls.

    Raises:
        ConfigError: The file is wrong, or an option does not fit it.
    """

    def __init__(
        self,
        file: Path,
        *,
        model: str,
        arguments: Sequence[str],
        options: WarmupOptions,
        open_engine: OpenEngine,
        pool: IoPool,
    ) -> None:
        self._config = resolve_rank_paths(load_config(file), rank=None)
        self._tiers = persistent_tiers(self._config)
        if options.retain_s is not None and not self._quotas():
            raise ConfigError("--retain: no tier has a retain_quota; leave it out")
        self._model = model
        self._arguments = arguments
        self._options = options
        self._open_engine = open_engine
        self._pool = pool
        self._resources = contextlib.ExitStack()
        self._identity: Fields = declared_identity(self._config, model)
        self._spaces: dict[str, StoredNamespace] = {}
        self._newest: dict[str, int] = {}
        self._is_open = self._has_run = False

    def check(self) -> None:
        """Check, before the engine starts, that the engine will fill the deployment's cache.

        Importing vLLM takes seconds. So a dry run without arguments for vLLM checks only the
        settings in kvtier's configuration.

        Raises:
            ConfigError: An argument is wrong, or the engine would not fill the deployment's
                cache.
        """
        self._require_same_identity()
        if self._arguments or not self._options.dry_run:
            self._identity = {**self._identity, **self.setup.identity}
            self._require_same_identity()

    @functools.cached_property
    def setup(self) -> EngineSetup:
        """The arguments of the engine, as vLLM parsed them."""
        transfer = _write_settings(
            self._config, self._resources, may_remove=self._options.new_cache
        )
        setup = self._open_engine(self._model, self._arguments, transfer)
        self._resources.callback(setup.close)
        self._is_open = True
        return setup

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self._resources.close()

    async def to_prompt(self, number: int, line: PromptLine) -> Prompt:
        """Convert a line to a prompt of token ids.

        Raises:
            ConfigError: The engine cannot compute the prompt.
        """
        return await self._call(partial(self._to_prompt, number, line))

    def _to_prompt(self, number: int, line: PromptLine) -> Prompt:
        prompt = to_prompt(number, line, lambda: self.setup)
        if self._is_open or prompt.lora:
            check_prompt(
                prompt,
                most_tokens=self.setup.most_tokens,
                lora_paths=self.setup.lora_paths,
                vocabulary=self.setup.vocabulary,
            )
        return prompt

    # -- stores --------------------------------------------------------------------------------

    def stores(self) -> list[Stores]:
        """Return the namespaces that the engine uses, or would use. This call blocks.

        Raises:
            ConfigError: Several namespaces fit, so only a running engine can choose one.
        """
        spaces = self._spaces if self._has_run else self._declared_spaces()
        return [self._stores(spaces)]

    def _declared_spaces(self) -> dict[str, StoredNamespace]:
        spaces: dict[str, StoredNamespace] = {}
        for tier, path in self._tiers:
            fitting = find_fitting(path, self._identity)
            if len(fitting) > 1:
                names = ", ".join(space.name for space in fitting)
                problem = f"only a running engine knows which of {names} it uses"
                remedy = f"run kvtier cache coverage {path} --namespace NAME"
                raise ConfigError(f"tier {tier.name}: {problem}; {remedy}")
            spaces.update((tier.name, space) for space in fitting)
        return spaces

    def _stores(self, spaces: dict[str, StoredNamespace]) -> Stores:
        space = next(iter(spaces.values()), None)
        if space is None:
            block = self.setup.block_tokens
            group = GroupReach(block * self._config.engine.blocks_per_chunk)
            seed = str(self._identity["hash_seed"])
            rules = KeyRules(((0, group),), block, self.setup.algorithm, seed)
            nbytes = self._new_slot_nbytes(group.chunk_tokens)
        else:
            rules, nbytes = KeyRules.of(space), space.layout.slot_nbytes
            if self._is_open:
                rules = replace(rules, algorithm=self.setup.algorithm)
        capacity = max(tier.capacity_bytes for tier, _ in self._tiers)
        return Stores(
            spaces=spaces,
            rules=rules,
            capacity_chunks=capacity // nbytes if nbytes else float("inf"),
            slot_nbytes=nbytes,
            lora_paths=self.setup.lora_paths if self._is_open else {},
            name_chunk=self._name_chunk,
        )

    def _name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        return self.setup.name_chunk(lora)

    def _new_slot_nbytes(self, chunk_tokens: int) -> int:
        """Return the expected size in bytes of a slot in a new cache; 0 if unknown."""
        dtype = str(self.setup.identity.get("kv_dtype", ""))
        try:
            geometry = read_model_geometry(Path(self._model))
            kv = KvDtype(dtype.partition("_")[0]) if dtype else KvDtype.AUTO
        except (ConfigError, ValueError):
            return 0
        return slot_nbytes(geometry.token_nbytes(kv) * chunk_tokens)

    def _require_same_identity(self) -> None:
        """Check that the engine uses the deployment's cache in each tier.

        Raises:
            ConfigError: The engine would not fill the deployment's cache.
        """
        if not self._options.new_cache:
            for tier, path in self._tiers:
                own = self._spaces.get(tier.name)
                identity = own.layout.fingerprint.fields if own else self._identity
                require_same_identity(tier.name, path, identity, own=own)

    # -- with an engine ------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def targets(self) -> AsyncIterator[list[_Target]]:
        """Start the engine; end it when the ``with`` block ends.

        Raises:
            ConfigError: The engine would not fill the deployment's cache.
        """
        started: list[WarmupEngine] = []
        try:
            # A start cannot be cancelled: a cancellation takes effect when the engine runs.
            await self._call(lambda: started.append(_start(self.setup)))
            await self._call(partial(self._look, started[0]))
            yield [_Target(started[0], self._pool)]
        finally:
            for engine in started:
                try:
                    await self._call(engine.abort)
                finally:
                    await self._call(engine.close)

    def _look(self, engine: WarmupEngine) -> None:
        """Find the namespaces that the engine opened."""
        tiers = {tier.name for tier, _ in self._tiers}
        for store in engine.stores:
            if store.tier in tiers:
                for space in readable(Path(store.path, store.namespace)):
                    self._spaces[store.tier] = space
        self._require_same_identity()
        self._has_run = True
        self._newest = {name: newest_generation(each) for name, each in self._spaces.items()}

    def finish(self, report: WarmupReport, ranks: Mapping[int, int]) -> WarmupReport:
        """Verify and retain the chunks, and return ``report`` with these results added.

        Args:
            report: The report of the computed and stored prompts.
            ranks: Rank of each chunk to retain, by the hash of the chunk's key.

        Raises:
            ConfigError: A cache cannot be read or changed.
        """
        verified = [
            verify_since(name, space, self._newest[name])
            for name, space in self._spaces.items()
        ]
        retained, seconds = 0, self._options.retain_s
        if seconds is not None:
            for tier in self._quotas():
                if space := self._spaces.get(tier.name):
                    retained += retain(tier, space, ranks, seconds=seconds)
        saving = self._saving(report)
        return replace(report, verified=verified, retained_chunks=retained, saving=saving)

    def _quotas(self) -> list[NvmeTierConfig]:
        return [tier for tier, _ in self._tiers if isinstance(tier, NvmeTierConfig)]

    def _saving(self, report: WarmupReport) -> Saving | None:
        """Return the time that loading saves; None if it cannot be measured."""
        coverage = report.coverage
        if coverage is None or not coverage.hit_tokens or not report.computed_tokens:
            return None
        size = report.nbytes_per_token
        nbytes = {name: tokens * size for name, tokens in coverage.tier_tokens.items()}
        load_s = load_seconds(self._config, nbytes, seconds=_MEASURE_S)
        rate = report.computed_tokens / max(report.seconds, 1e-9)
        return None if load_s is None else Saving(coverage.hit_tokens / rate, load_s)

    async def _call(self, call: Callable[[], T]) -> T:
        return await self._pool.run(call, priority=0)


class _Target:
    """Adapts a running engine to :class:`kvtier.warmup._filling.Target`."""

    prompt_timeout_s = STALL_S

    def __init__(self, engine: WarmupEngine, pool: IoPool) -> None:
        self._engine = engine
        self._pool = pool
        self._ended: dict[int, asyncio.Future[int]] = {}
        self.ram_chunks = engine.ram_chunks
        self.most_requests = engine.max_requests
        self.unwritten_chunks = 0

    @property
    def is_idle(self) -> bool:
        return not self._engine.has_work()

    async def compute(self, prompt: Prompt) -> int:
        add = partial(self._engine.add, lora=prompt.lora, cache_salt=prompt.cache_salt)
        call = partial(add, prompt.line, prompt.tokens)
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended[prompt.line] = ended
        try:
            if problem := await self._pool.run(call, priority=0):
                raise ConfigError(problem)
            return await ended
        finally:
            del self._ended[prompt.line]

    async def work(self) -> None:
        """Run one step of the engine."""
        await asyncio.sleep(0)  # new calls of compute() queue their prompts first
        for line, tokens, cached_tokens in await self._pool.run(self._step, priority=1):
            ended = self._ended.get(line)
            if ended is not None and not ended.done():  # the call may be cancelled
                ended.set_result(tokens - cached_tokens)
        self.unwritten_chunks = self._engine.unwritten_chunks()
        await asyncio.sleep(0)  # the calls of compute() return

    def _step(self) -> Sequence[tuple[int, int, int]]:
        ended = self._engine.step()
        if not ended and not self._ended:
            time.sleep(_IDLE_S)  # the threads of the tiers need the interpreter
        return ended


def _start(setup: EngineSetup) -> WarmupEngine:
    """Start the engine, and protect the engine's processes from the terminal's signals.

    After Ctrl-C, only this process gets the signal, so the workers can still write the computed
    chunks. The workers set their own handlers but inherit the blocked signals.
    """
    resource_tracker.ensure_running()  # its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINAL)
    try:
        return setup.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_settings(
    config: KvtierConfig, resources: contextlib.ExitStack, *, may_remove: bool
) -> dict[str, Any]:
    """Write the configuration of a warm-up's engine to a file in memory.

    With this configuration, the engine writes every chunk to every tier at once. The engine
    also loads every stored chunk instead of computing it, and records no requests. These
    changes do not affect the identity of a namespace. So the deployment's engines can read the
    chunks.

    Args:
        config: The user's configuration.
        resources: Closes the file.
        may_remove: Whether to keep the user's setting for removing a cache of another identity.
            False forbids removal, which protects the deployment's cache from wrong arguments.

    Returns:
        The value of vLLM's ``--kv-transfer-config`` that makes vLLM read the file.
    """
    tiers = config.tiers if may_remove else tuple(map(_refusing, config.tiers))
    placement = PlacementConfig(
        pin_budget=config.placement.pin_budget, backlog_limit=1.0, load_if="always"
    )
    changes = {"tiers": tiers, "placement": placement, "trace": TraceConfig(), "shadow": ()}
    changed = config.model_copy(update=changes)
    fd = open_anonymous("kvtier-warmup.yaml")  # in memory: a kill leaves no file
    resources.callback(os.close, fd)
    os.write(fd, changed.model_dump_json(by_alias=True, exclude_none=True).encode())
    return vllm_transfer_config(f"/proc/{os.getpid()}/fd/{fd}", changed)


def _refusing(tier: TierConfig) -> TierConfig:
    """Return a copy of ``tier`` that never removes another cache's chunks when it opens."""
    if not isinstance(tier, NvmeTierConfig):
        return tier
    return tier.model_copy(update={"on_mismatch": "refuse", "keep_for_s": _ALWAYS_S})
