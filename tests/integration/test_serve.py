"""A real server under many streaming clients: every token right, and numbers that add up."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from kvtier.connector.metrics import METRICS
from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK
from tests.docs.test_dashboard import TARGET, VLLM, expressions, selected
from tests.integration.harness import (
    ANSWER_TOKENS,
    CONVERSATIONS,
    TURNS,
    Reference,
    Site,
)
from tests.integration.serving import (
    Scrape,
    Server,
    Streamed,
    complete,
    first_scrape,
    scrape,
    serving,
)

logger = logging.getLogger(__name__)

OURS = ("kvtier_", "vllm:")
SETTLE_S = 30.0
QUIET_S = 1.0
GPU_BLOCKS = 200
RAM_SHARE = 0.2
SCRAPE_EVERY = 10
NIGHT_S = 180.0

Answered = list[tuple[tuple[int, ...], Streamed]]


class Traffic:
    """Clients that go through conversations turn by turn, one after the other.

    Args:
        session: Where to.
        reference: The prompts.
        queue: Conversations to hold; a client takes the next when it is through with one.
    """

    def __init__(
        self, session: aiohttp.ClientSession, reference: Reference, queue: Iterator[int]
    ) -> None:
        self._session = session
        self._turns = by_conversation(reference)
        self._queue = queue
        self.answered: Answered = []
        self.scrapes: list[Scrape] = []
        self._scraping = asyncio.Lock()  # so that the scrapes are in their order

    async def run(self, clients: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._converse())

    async def _converse(self) -> None:
        for conversation in self._queue:
            for prompt in self._turns[conversation]:
                answer = await complete(self._session, prompt, max_tokens=ANSWER_TOKENS)
                self.answered.append((prompt, answer))
                if not len(self.answered) % SCRAPE_EVERY:
                    async with self._scraping:
                        self.scrapes.append(await scrape(self._session))


def by_conversation(reference: Reference) -> list[list[tuple[int, ...]]]:
    """Return the prompts of each conversation, turn by turn."""
    turns = [[prompt.tokens] for prompt in reference.conversations[0].prompts]
    for wave in reference.conversations[1:]:
        for prompt in wave.prompts:
            (conversation,) = (each for each in turns if continues(prompt.tokens, each[-1]))
            conversation.append(prompt.tokens)
    assert {len(prompts) for prompts in turns} == {TURNS}
    return turns


def continues(prompt: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return prompt[: len(before)] == before


def once_each() -> Iterator[int]:
    return iter(random.Random(3).sample(range(CONVERSATIONS), CONVERSATIONS))


def until(deadline_s: float) -> Iterator[int]:
    """Yield conversations, each pass in another order, until the deadline."""
    draw = random.Random(5)
    passes = (draw.sample(range(CONVERSATIONS), CONVERSATIONS) for _ in itertools.count())
    return itertools.takewhile(
        lambda _: time.monotonic() < deadline_s, itertools.chain.from_iterable(passes)
    )


async def talk(
    server: Server, reference: Reference, conversations: Iterator[int], clients: int
) -> tuple[Answered, list[Scrape]]:
    """Run the traffic and scrape once more when everything came to rest."""
    timeout = aiohttp.ClientTimeout(total=120)
    connections = aiohttp.TCPConnector(limit=clients + 1)
    async with aiohttp.ClientSession(
        server.url, timeout=timeout, connector=connections
    ) as session:
        first = await first_scrape(session)
        traffic = Traffic(session, reference, conversations)
        await traffic.run(clients)
        last = await rest(session)
    return traffic.answered, [first, *traffic.scrapes, last]


async def rest(session: aiohttp.ClientSession) -> Scrape:
    """Scrape until nothing is on its way, and has not been for a while.

    Figures are kept back for a moment while the engine works, so one look may see those of
    before the last chunks were stored.
    """
    deadline_s = time.monotonic() + SETTLE_S
    before, since_s = await scrape(session), time.monotonic()
    while True:
        now = await scrape(session)
        at_s = time.monotonic()
        if on_its_way(now) or ours(now) != ours(before):
            before, since_s = now, at_s
        elif at_s - since_s >= QUIET_S:
            return now
        assert at_s < deadline_s, f"{on_its_way(now):.0f} chunks or bytes do not arrive"


def on_its_way(now: Scrape) -> float:
    """Return what is neither in its place nor given up."""
    held = now.value("kvtier_held_chunks")
    return (
        held + now.value("kvtier_dirty_chunks", tier="ram") + now.value("kvtier_queued_bytes")
    )


def ours(now: Scrape) -> dict[Any, float]:
    """Return the counters that the cache and its engine count up."""
    return {
        series: value for series, value in now.counters.items() if series[0].startswith(OURS)
    }


def assert_consistent(answered: Answered, scrapes: Sequence[Scrape]) -> None:
    """Compare what the metrics say with what happened."""
    last = scrapes[-1]
    assert set(METRICS) <= last.declared
    for before, after in itertools.pairwise(scrapes):
        for (name, labels), value in before.counters.items():
            if name.startswith(OURS):
                assert after.counters[name, labels] >= value, (name, labels)
    by_tier = {
        tier: last.value("kvtier_hit_tokens_total", tier=tier) for tier in ("ram", "nvme")
    }
    assert all(by_tier.values()), by_tier
    cached = sum(answer.cached_tokens for _, answer in answered)
    saved = cached - last.value("vllm:prefix_cache_hits_total")
    assert saved == last.value("vllm:external_prefix_cache_hits_total")
    # A request that lost its blocks loads again what neither its answer nor vLLM counts twice.
    again = last.value("vllm:num_preemptions_total") * max(
        len(prompt) for prompt, _ in answered
    )
    assert saved <= sum(by_tier.values()) <= saved + again
    assert last.value("vllm:prompt_tokens_total") == sum(len(p) for p, _ in answered)
    assert_bytes_add_up(last)
    assert_dashboard_fits(last)
    for trouble in ("failed_chunks", "internal_errors", "expired_jobs"):
        assert last.value(f"kvtier_{trouble}_total") == 0, trouble
    for tier in ("ram", "nvme"):
        assert last.value("kvtier_held_chunks", tier=tier) == 0
        used = last.value("kvtier_used_chunks", tier=tier)
        assert 0 < used <= last.value("kvtier_capacity_chunks", tier=tier)


def assert_bytes_add_up(last: Scrape) -> None:
    """Every chunk is one slot of bytes, wherever it was moved."""
    nbytes = KV_NBYTES_PER_BLOCK
    hits = last.value("kvtier_hit_chunks_total")
    assert last.value("kvtier_hit_tokens_total") == hits * BLOCK_TOKENS
    moved = "kvtier_kv_offload_total_bytes_total"
    assert last.value(moved, transfer_type="ram_to_gpu") == hits * nbytes
    stored = last.value("kvtier_stored_chunks_total", tier="ram")
    promoted = last.value("kvtier_read_bytes_total", tier="nvme") / nbytes
    assert last.value(moved, transfer_type="gpu_to_ram") == (stored - promoted) * nbytes
    down, up = ({"transfer_type": way} for way in ("ram_to_nvme", "nvme_to_ram"))
    written = last.value("kvtier_written_bytes_total", tier="nvme")
    assert written == last.value("kvtier_stored_chunks_total", tier="nvme") * nbytes
    assert written == last.value("kvtier_demoted_chunks_total", tier="ram") * nbytes
    assert written == last.value(moved, **down)
    assert written == last.value("kvtier_kv_offload_size_sum", **down)
    read = last.value("kvtier_read_bytes_total", tier="nvme")
    assert read == last.value(moved, **up)
    assert read >= last.value("kvtier_promoted_chunks_total", tier="nvme") * nbytes
    assert read >= last.value("kvtier_hit_chunks_total", tier="nvme") * nbytes


def assert_dashboard_fits(last: Scrape) -> None:
    """A histogram that observed nothing, and a shadow that nobody asked for, have no series."""
    asked = [pair for expression in expressions().values() for pair in selected(expression)]
    there = {name for name, _ in asked if last.labels(name)}
    assert {*VLLM, "kvtier_hit_tokens_total", "kvtier_followed_chunks_total"} <= there
    for name, compared in asked:
        if name in there:
            assert compared - TARGET <= last.labels(name), name


def serve(
    reference: Reference, site: Site, conversations: Callable[[], Iterator[int]], clients: int
) -> tuple[Answered, list[Scrape]]:
    """Start a server, run the traffic, stop the server, and check that nothing is left."""
    blocks = reference.footprint_blocks
    scenario = site.scenario((), ram_blocks=int(RAM_SHARE * blocks), nvme_blocks=blocks)
    assert scenario.config is not None
    log = site.directory / "server.log"
    started = Server(
        reference.model, scenario.config, log, gpu_blocks=GPU_BLOCKS, requests=clients
    )
    with serving(started) as server:
        answered, scrapes = asyncio.run(talk(server, reference, conversations(), clients))
        assert_equal(reference, answered)
        assert_consistent(answered, scrapes)
        assert server.stop() == 0, server.tail()
        assert server.left_behind() == []
    site.assert_nothing_held()
    served, _, stopped = site.log("server").partition("[shutdown]")
    assert " ERROR " not in served
    # vLLM's own front end may log that its engine is gone, after the request to stop.
    assert not [line for line in stopped.splitlines() if "ERROR" in line and "kvtier" in line]
    return answered, scrapes


def assert_equal(reference: Reference, answered: Answered) -> None:
    """Compare every answer with what vLLM says without kvtier."""
    for prompt, answer in answered:
        assert answer.tokens == reference.answers[prompt][:ANSWER_TOKENS]
        assert answer.prompt_tokens == len(prompt)
    # One by one, unless the front end is behind and hands over several at once.
    assert sum(answer.pieces for _, answer in answered) > 2 * len(answered)


def test_eight_streaming_clients_get_the_right_tokens_and_metrics_that_add_up(
    reference: Reference, site: Site
) -> None:
    answered, _ = serve(reference, site, once_each, clients=8)
    assert len(answered) == CONVERSATIONS * TURNS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_two_streaming_clients_for_three_minutes(
    reference: Reference, site: Site
) -> None:
    answered, scrapes = serve(
        reference, site, lambda: until(time.monotonic() + NIGHT_S), clients=32
    )
    assert len(answered) > CONVERSATIONS * TURNS, "every conversation was held more than once"
    logger.info("%s", figures(answered, scrapes))


@pytest.mark.slow
@pytest.mark.skipif(
    "kvtier" not in importlib.metadata.entry_points(group="vllm.general_plugins").names,
    reason="kvtier is not installed, so vLLM does not know its connector by name",
)
def test_beside_another_connector_the_server_lives_and_every_token_is_right(
    reference: Reference, site: Site
) -> None:
    blocks = reference.footprint_blocks
    scenario = site.scenario((), ram_blocks=blocks // 5, nvme_blocks=blocks)
    assert scenario.config is not None
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(site.directory / "example")},
    }
    log = site.directory / "server.log"
    started = Server(
        reference.model, scenario.config, log, gpu_blocks=72, requests=2, beside=[example]
    )
    with serving(started) as server:
        few = itertools.islice(once_each(), 6)
        answered, scrapes = asyncio.run(talk(server, reference, few, 2))
        assert_equal(reference, answered)
        assert scrapes[-1].value("kvtier_hit_tokens_total") > 0
        assert server.stop() == 0, server.tail()
    site.assert_nothing_held()


def figures(answered: Answered, scrapes: Sequence[Scrape]) -> str:
    last = scrapes[-1]
    named = {
        "answers": len(answered),
        "scrapes": len(scrapes),
        "prompt tokens": last.value("vllm:prompt_tokens_total"),
        "GPU": last.value("vllm:prefix_cache_hits_total"),
        "RAM": last.value("kvtier_hit_tokens_total", tier="ram"),
        "NVMe": last.value("kvtier_hit_tokens_total", tier="nvme"),
        "preemptions": last.value("vllm:num_preemptions_total"),
    }
    return ", ".join(f"{name} {value:.0f}" for name, value in named.items())
