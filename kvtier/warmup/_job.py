"""Computes known prompts once, so that their KV is stored before the first user asks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import Protocol

from kvtier.coverage import (
    BadLine,
    Coverage,
    Prompt,
    PromptLine,
    Stores,
    load_prompts,
    open_vllm,
)
from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.warmup._engine import OpenEngine
from kvtier.warmup._events import (
    Finished,
    LineSkipped,
    Planned,
    WarmupEvent,
    WarmupOptions,
    WarmupReport,
)
from kvtier.warmup._filling import FillState, Target, fill
from kvtier.warmup._offline import OfflineSite
from kvtier.warmup._plan import Work, cover, plan_prompts
from kvtier.warmup._server import OpenClient, ServerSite, open_aiohttp

__all__ = ["WarmupJob"]


class _Site(Protocol):
    """The engines that compute a warm-up's prompts."""

    async def to_prompt(self, number: int, line: PromptLine) -> Prompt:
        """Convert a line to a prompt; raise ConfigError if the engines cannot compute it."""

    def stores(self) -> Sequence[Stores]:
        """Return the known namespaces of each engine. This call blocks."""

    def targets(self) -> AbstractAsyncContextManager[Sequence[Target]]:
        """Open the engines; close them when the ``with`` block ends."""


class WarmupJob:
    """Computes the prompts of a file and stores their KV, while a caller iterates the job.

    A job can be iterated once and yields events. The job skips stored prompts. So after an
    interruption, even by SIGKILL, another job with the same arguments continues the work.

    Args:
        file: The configuration of kvtier.
        model: The model, as in ``vllm serve MODEL``.
        prompts: A file with one prompt per line.
        arguments: The other arguments of ``vllm serve``.
        options: Settings of the warm-up.
        open_engine: Opens the engine.
        open_client: Opens a client that sends requests to servers.

    Cancellation:
        The job stops computing prompts. It spends at most ``transfer.close_timeout`` on writing
        the computed chunks, and ends the engine. Then the cancellation continues.
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
        self._path = Path(prompts)
        self._arguments = arguments
        self._options = options or WarmupOptions()
        self._open_engine = open_engine
        self._open_client = open_client

    async def __aiter__(self) -> AsyncGenerator[WarmupEvent, None]:
        """Run the job and yield its events; :class:`Finished` is the last one.

        Raises:
            ConfigError: A file or an argument is wrong, or the engine would not fill the
                deployment's cache.
            KvtierError: The engine cannot start, or makes no progress.
        """
        pool = IoPool(1, name="kvtier-warmup")
        opened = self._open_servers() if self._options.servers else self._open_offline(pool)
        try:
            async with opened as site, aclosing(self._events(site, pool)) as events:
                async for event in events:
                    yield event
        finally:
            pool.close(timeout_s=0.0)

    async def _events(self, site: _Site, pool: IoPool) -> AsyncGenerator[WarmupEvent, None]:
        bad: list[BadLine] = []
        on_bad = bad.append if self._options.skip_bad_lines else None
        prompts = await load_prompts(self._path, site.to_prompt, on_bad=on_bad)
        for line in bad:
            yield LineSkipped(line)
        planned, state = Planned(), FillState()
        plan = partial(self._plan, site, prompts, planned)
        if self._options.dry_run:
            await pool.run(plan, priority=0)
            yield planned
            return
        async with site.targets() as targets:
            works = await pool.run(plan, priority=0)
            yield planned
            async with aclosing(
                fill(list(zip(targets, works, strict=True)), state)
            ) as progress:
                async for event in progress:
                    yield event
        report = partial(_report, site, prompts, planned, state)
        yield Finished(await pool.run(report, priority=0))

    def _plan(
        self, site: _Site, prompts: Sequence[Prompt], planned: Planned
    ) -> list[list[Work]]:
        plan = partial(plan_prompts, prompts, budget_bytes=self._options.budget_bytes)
        return [plan(stores, planned) for stores in site.stores()]

    @contextlib.asynccontextmanager
    async def _open_servers(self) -> AsyncIterator[_Site]:
        if self._options.retain_s is not None or self._arguments:
            what = "arguments after --" if self._arguments else "--retain"
            raise ConfigError(f"{what}: not with --server, whose engine runs; leave it out")
        async with self._open_client() as client:
            urls = self._options.servers
            yield await ServerSite.open(client, urls, self._model)

    @contextlib.asynccontextmanager
    async def _open_offline(self, pool: IoPool) -> AsyncIterator[_Site]:
        with contextlib.ExitStack() as resources:

            def open_site() -> OfflineSite:
                site = OfflineSite(
                    self._file,
                    model=self._model,
                    arguments=self._arguments,
                    options=self._options,
                    open_engine=self._open_engine,
                    pool=pool,
                )
                resources.enter_context(contextlib.closing(site))
                site.check()
                return site

            yield await pool.run(open_site, priority=0)


def _report(
    site: _Site, prompts: Sequence[Prompt], planned: Planned, state: FillState
) -> WarmupReport:
    """Return the warm-up's report, with the prompts' present coverage. This call blocks."""
    coverage, ranks = Coverage(), dict[int, int]()
    readable = [stores for stores in site.stores() if stores.spaces]
    for stores in readable:
        ranks = cover(prompts, stores, coverage)
    report = WarmupReport(
        planned=planned,
        prompts=state.prompts,
        failed=tuple(state.failed),
        computed_tokens=state.computed_tokens,
        seconds=state.seconds,
        coverage=coverage if readable else None,
        nbytes_per_token=readable[0].nbytes_per_token if readable else 0.0,
    )
    return site.finish(report, ranks) if isinstance(site, OfflineSite) else report
