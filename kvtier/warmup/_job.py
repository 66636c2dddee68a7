"""Computes known prompts once, so that their KV is stored before the first user asks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

from kvtier.config import load_config, resolve_rank_paths
from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.vllm.identity import declared_identity
from kvtier.warmup._engine import OpenEngine, open_vllm
from kvtier.warmup._events import WarmupEvent
from kvtier.warmup._http import OpenClient, open_aiohttp
from kvtier.warmup._identity import persistent_tiers, require_same_identity
from kvtier.warmup._options import WarmupOptions
from kvtier.warmup._run import WarmupRun
from kvtier.warmup._server import ServerRun
from kvtier.warmup._settings import write_settings
from kvtier.warmup._spool import PromptSpool

__all__ = ["WarmupJob"]


class WarmupJob:
    """Computes the prompts of a file and stores their KV; iterate it once for its events.

    Prompts that are stored already are not computed again. So a job that was interrupted, even
    by SIGKILL, goes on where it stopped when another job begins with the same arguments.

    Args:
        file: The configuration of kvtier.
        model: The model, as in ``vllm serve MODEL``.
        prompts: A file with one prompt a line.
        arguments: The other arguments of ``vllm serve``.
        options: Settings of the warm-up.
        open_engine: Returns the engine.
        open_client: Opens a client that sends requests to servers.

    Cancellation:
        No more prompts are computed. Before the cancellation continues, the computed chunks
        are written, for at most ``transfer.close_timeout``, and the engine ends.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        file: Path | str,
        *,
        model: str,
        prompts: Path | str,
        arguments: Sequence[str] = (),
        options: WarmupOptions | None = None,
        open_engine: OpenEngine = open_vllm,
        open_client: OpenClient = open_aiohttp,
    ) -> None:
        self._file = Path(file)
        self._model = model
        self._prompts = Path(prompts)
        self._arguments = arguments
        self._options = options or WarmupOptions()
        self._open_engine = open_engine
        self._open_client = open_client

    async def __aiter__(self) -> AsyncGenerator[WarmupEvent, None]:
        """Run the job and yield its events; :class:`Finished` is the last one.

        Raises:
            ConfigError: A file or an argument is wrong, or the engine would fill a cache that
                the deployment does not read.
            KvtierError: The engine cannot start, or makes no progress.
        """
        pool, stack = IoPool(1, name="kvtier-warmup"), contextlib.ExitStack()
        run = self._on_servers if self._options.servers else self._on_engine
        try:
            async with contextlib.aclosing(run(pool, stack)) as events:
                async for event in events:
                    yield event
        finally:
            await pool.run(stack.close, priority=0)
            pool.close(timeout_s=0.0)

    async def _on_servers(
        self, pool: IoPool, stack: contextlib.ExitStack
    ) -> AsyncGenerator[WarmupEvent, None]:
        if self._options.retain_s is not None or self._arguments:
            what = "arguments after --" if self._arguments else "--retain"
            raise ConfigError(f"{what}: not with --server, whose engine runs; leave it out")
        spool = await pool.run(partial(_open_spool, stack), priority=0)
        async with self._open_client() as client:
            run = ServerRun(self._options, self._prompts, self._model, client, spool, pool)
            async with contextlib.aclosing(run.events()) as events:
                async for event in events:
                    yield event

    async def _on_engine(
        self, pool: IoPool, stack: contextlib.ExitStack
    ) -> AsyncGenerator[WarmupEvent, None]:
        run = await pool.run(partial(self._open, pool, stack), priority=0)
        async with contextlib.aclosing(run.events()) as events:
            async for event in events:
                yield event

    def _open(self, pool: IoPool, stack: contextlib.ExitStack) -> WarmupRun:
        """Check the settings that are known before an engine starts; prepare the engine."""
        config = resolve_rank_paths(load_config(self._file), rank=None)
        tiers = persistent_tiers(config)
        identity = declared_identity(config, self._model)
        if not self._options.new_cache:
            for tier in tiers:
                require_same_identity(tier, identity, own=None)
        directory = tempfile.TemporaryDirectory(prefix="kvtier-warmup-")
        transfer = write_settings(
            config,
            Path(stack.enter_context(directory)),
            may_remove=self._options.new_cache,
        )
        setup = self._open_engine(self._model, self._arguments, transfer)
        stack.callback(setup.close)
        return WarmupRun(
            options=self._options,
            prompts=self._prompts,
            config=config,
            tiers=tiers,
            identity=identity,
            setup=setup,
            spool=_open_spool(stack),
            pool=pool,
        )


def _open_spool(stack: contextlib.ExitStack) -> PromptSpool:
    return stack.enter_context(contextlib.closing(PromptSpool()))
