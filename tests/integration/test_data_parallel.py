"""Data-parallel ranks behind one server: each finds its own store again, or none starts."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.demo.model import BLOCK_TOKENS
from tests.integration.harness import ANSWER_TOKENS, Reference, Site
from tests.integration.serving import (
    Scrape,
    Server,
    Streamed,
    complete,
    first_scrape,
    scrape,
    serving,
)

RANKS = 2
PROMPTS = 12
PLACEHOLDER = "{data_parallel_rank}"

Answers = list[tuple[tuple[int, ...], Streamed]]


def start(site: Site, name: str, *, below: str) -> Server:
    """Start a server whose NVMe tier is ``below`` the site's store."""
    scenario = site.scenario((), ram_blocks=200, nvme_blocks=400)
    assert scenario.config is not None
    site.store.mkdir(exist_ok=True)
    text = scenario.config.read_text()
    scenario.config.write_text(text.replace(str(site.store), str(site.store / below)))
    return Server(
        site.reference.model,
        scenario.config,
        site.directory / f"{name}.log",
        gpu_blocks=200,
        requests=4,
        data_parallel_size=RANKS,
    )


async def ask(server: Server, reference: Reference) -> tuple[Answers, Scrape]:
    """Ask the ranks in turn for the first prompts, each rank always for the same ones."""
    answered: Answers = []
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        await first_scrape(session)
        for number, prompt in enumerate(reference.conversations[0].prompts[:PROMPTS]):
            answer = await complete(
                session, prompt.tokens, max_tokens=ANSWER_TOKENS, rank=number % RANKS
            )
            answered.append((prompt.tokens, answer))
        return answered, await scrape(session)


def serve(site: Site, name: str) -> tuple[Answers, Scrape]:
    """Ask a server from its start to its end, and check that nothing is left."""
    with serving(start(site, name, below=PLACEHOLDER)) as server:
        answered, metrics = asyncio.run(ask(server, site.reference))
        assert server.stop() == 0, server.tail()
        assert server.left_behind() == []
    site.assert_nothing_held()
    return answered, metrics


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_rank_finds_its_own_store_after_a_restart_with_every_token_equal(
    site: Site,
) -> None:
    first, _ = serve(site, "first")
    stores = {path.parent.parent.name for path in site.store.rglob("slots.bin")}
    assert stores == {str(rank) for rank in range(RANKS)}
    again, metrics = serve(site, "again")
    for prompt, answer in (*first, *again):
        assert answer.tokens == site.reference.answers[prompt][:ANSWER_TOKENS]
    for prompt, answer in again:
        assert answer.cached_tokens > len(prompt) - 2 * BLOCK_TOKENS
    for rank in range(RANKS):
        engine = {"engine": str(rank)}
        assert metrics.value("kvtier_hit_tokens_total", tier="nvme", **engine) > 0
        assert metrics.value("kvtier_internal_errors_total", **engine) == 0
        assert metrics.value("kvtier_failed_chunks_total", **engine) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_would_share_a_store_do_not_start_and_the_log_says_what_to_write(
    site: Site,
) -> None:
    server = start(site, "server", below="shared")
    try:
        assert server.wait_until_ended() != 0
        assert server.left_behind() == []
    finally:
        server.kill()
    place = f"{site.directory / 'kvtier.yaml'}:5: tiers[1].path = "
    remedy = f"; write {site.store / 'shared' / PLACEHOLDER}"
    said = [line for line in site.log("server").splitlines() if "ConfigError: " in line]
    assert said
    assert all(place in line and remedy in line for line in said)
    assert list(site.store.iterdir()) == []
    site.assert_nothing_held()
