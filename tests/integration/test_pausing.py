"""A server that is paused, or sleeps: what is stored survives the one and not the other."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.demo.model import BLOCK_TOKENS
from tests.demo.scenario import Prompt
from tests.integration.harness import ANSWER_TOKENS, Reference, Site
from tests.integration.serving import Scrape, Server, complete, first_scrape, scrape, serving

PROMPTS = 8


async def ask(
    session: aiohttp.ClientSession, reference: Reference, prompts: tuple[Prompt, ...]
) -> list[int]:
    """Ask for all ``prompts`` at once; return how much of each was not computed."""
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(complete(session, prompt.tokens, max_tokens=ANSWER_TOKENS))
            for prompt in prompts
        ]
    answers = [each.result() for each in asked]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference.answers[prompt.tokens][:ANSWER_TOKENS]
    return [answer.cached_tokens for answer in answers]


async def call(session: aiohttp.ClientSession, what: str) -> None:
    async with session.post(what) as response:
        response.raise_for_status()


async def through_pauses(
    server: Server, reference: Reference
) -> tuple[list[list[int]], Scrape]:
    """Ask the same again and again, with pauses in between and while it is answered."""
    prompts = reference.conversations[0].prompts[:PROMPTS]
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        await first_scrape(session)
        found = [await ask(session, reference, prompts)]
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask(session, reference, prompts))
            await call(session, "/pause?mode=keep&clear_cache=false")
            await call(session, "/resume")
        found.append(asking.result())
        await call(session, "/sleep?level=1&mode=wait")
        await call(session, "/wake_up")
        found.append(await ask(session, reference, prompts))
        found.append(await ask(session, reference, prompts))
        return found, await scrape(session)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chunks_survive_a_pause_but_not_a_sleep_and_every_token_is_right(
    site: Site,
) -> None:
    scenario = site.scenario((), ram_blocks=200, nvme_blocks=400)
    assert scenario.config is not None
    server = Server(
        site.reference.model,
        scenario.config,
        site.directory / "server.log",
        gpu_blocks=80,
        requests=4,
        settings={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with serving(server):
        found, metrics = asyncio.run(through_pauses(server, site.reference))
        assert server.stop() == 0, server.tail()
        assert server.left_behind() == []
    site.assert_nothing_held()
    whole = [
        len(prompt.tokens) - 2 * BLOCK_TOKENS
        for prompt in site.reference.conversations[0].prompts[:PROMPTS]
    ]
    first, paused, slept, again = found
    for tokens in (paused, again):
        assert all(cached > most for cached, most in zip(tokens, whole, strict=True))
    for tokens in (first, slept):
        assert sum(tokens) < sum(whole) // 2
    assert metrics.value("kvtier_internal_errors_total") == 0
    assert metrics.value("kvtier_failed_chunks_total") == 0
