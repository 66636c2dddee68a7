"""``kvtier warmup --server`` over servers without a model and real stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.coverage import BlockHasher
from kvtier.errors import ConfigError, KvtierError
from kvtier.keys import make_key
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_sources
from kvtier.types import Purpose
from kvtier.warmup import Finished, Planned, WarmupEvent, WarmupJob, WarmupOptions, WarmupReport
from kvtier.warmup import _filling as filling
from kvtier.warmup import _server as servers
from tests.unit.stores import BLOCK_TOKENS, SLOTS, Store

URL = "http://one:8000"
MODEL = "some/model"


class Rank:
    """An engine of a server, with a store of its own."""

    def __init__(self, root: Path, pool: IoPool) -> None:
        self.store = Store(root, pool)
        self.store.start(slots=4 * SLOTS)
        self.slots: dict[bytes, int] = {}
        self.computed: list[int] = []
        self.dirty = 0
        self.running = self.most_running = 0
        self.store_chunks = 64
        self.has_reported = False
        self.has_kvtier = True
        self.has_shared_tier = False

    async def compute(self, tokens: list[int]) -> int:
        keys = [make_key(each, 0) for each in BlockHasher(BLOCK_TOKENS).hashes(tokens)]
        new = [key for key in keys if key not in self.slots]
        places = [len(self.slots) + number for number in range(len(new))]
        self.slots.update(zip(new, places, strict=True))
        sources = make_sources(new, self.store.tier.slot_nbytes)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if new:
            await self.store.tier.write(new, places, sources, purpose=Purpose.STORE)
        self.running -= 1
        self.computed.append(tokens[0])
        self.has_reported = self.has_kvtier
        return len(tokens) - len(new) * BLOCK_TOKENS

    def metrics(self, number: int) -> Iterator[str]:
        yield f'vllm:num_requests_running{{engine="{number}"}} 0'
        if self.has_reported:
            place = f'namespace="{self.store.directory.name}",path="{self.store.root}"'
            labels = f'engine="{number}",version="1"'
            capacity = f'kvtier_capacity_chunks{{engine="{number}",tier='
            yield f'kvtier_info{{{labels},tier="host",kind="ram",namespace="",path=""}} 1'
            yield f'kvtier_info{{{labels},tier="disk",kind="nvme",{place}}} 1'
            yield f'kvtier_dirty_chunks{{engine="{number}",tier="host"}} {self.dirty}'
            yield f'{capacity}"host"}} 8'
            yield f'{capacity}"disk"}} {self.store_chunks}'
            if self.has_shared_tier:
                nowhere = 'kind="shared_dir",namespace="",path=""'
                yield f'kvtier_info{{{labels},tier="fleet",{nowhere}}} 1'
                yield f'{capacity}"fleet"}} 65536'


class Servers:
    """The client of a warm-up, which is also the server that answers."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = ranks
        self.refused: set[int] = set()
        self.looked = asyncio.Event()
        self.is_slow = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Servers]:
        yield self

    async def fetch(
        self, url: str, body: Mapping[str, Any] | None = None, rank: str = ""
    ) -> str:
        if body is not None:
            return json.dumps(await self._answer(url, body, rank))
        if not url.startswith(URL):
            raise KvtierError(f"{url}: no answer; check that the server runs")
        if url == f"{URL}/metrics":
            self.looked.set()
            for each in self.ranks:
                each.dirty = max(each.dirty - 1, 0)
            lines = (line for at, each in enumerate(self.ranks) for line in each.metrics(at))
            return "\n".join(lines) + "\n"
        assert url == f"{URL}/v1/models"
        base = {"id": "name", "root": MODEL, "parent": None, "max_model_len": 200}
        return json.dumps({"data": [base, {"id": "fr", "root": "/fr", "parent": "name"}]})

    async def _answer(self, url: str, body: Mapping[str, Any], rank: str) -> dict[str, Any]:
        if url == f"{URL}/tokenize":
            text = body.get("prompt") or body["messages"][0]["content"]
            return {"tokens": list(text.encode())}
        assert url == f"{URL}/v1/completions"
        tokens = body["prompt"]
        assert (body["model"], body["max_tokens"]) == ("name", 1)
        if tokens[0] in self.refused:
            raise ConfigError(f"{url}: 400 no")
        engine = self.ranks[int(rank)]
        if self.is_slow and engine.has_reported:
            await self._pass_the_longest_wait_for_a_disk()
        cached = await engine.compute(tokens)
        engine.dirty = 2
        return {
            "usage": {
                "prompt_tokens": len(tokens),
                "prompt_tokens_details": {"cached_tokens": cached},
            }
        }

    async def _pass_the_longest_wait_for_a_disk(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filling, "STALL_S", -1.0)
            for _ in range(10):
                self.looked.clear()
                await self.looked.wait()


@pytest.fixture
def world(tmp_path: Path, pool: IoPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(servers, "_LOOK_S", 0.01)
    monkeypatch.setattr(servers, "_FIRST_REPORT_S", 0.1)
    ranks = [Rank(tmp_path / f"store{number}", pool) for number in range(2)]
    yield Servers(*ranks)
    for rank in ranks:
        rank.store.stop()


def write(path: Path, *lines: Mapping[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    shared = list(range(2 * BLOCK_TOKENS))
    path = tmp_path / "prompts.jsonl"
    write(path, *({"prompt_token_ids": [own, *shared, 1]} for own in range(5)))
    return path


def job(world: Servers, prompts: Path, url: str = URL, **options: Any) -> WarmupJob:
    return WarmupJob(
        prompts.with_name("kvtier.yaml"),
        model=options.pop("model", MODEL),
        prompts=prompts,
        arguments=options.pop("arguments", ()),
        options=WarmupOptions(servers=(url,), **options),
        open_client=world.open,
    )


async def events_of(job: WarmupJob) -> list[WarmupEvent]:
    async with asyncio.timeout(60):
        return [event async for event in job]


async def report_of(job: WarmupJob) -> WarmupReport:
    last = (await events_of(job))[-1]
    assert isinstance(last, Finished)
    return last.report


async def test_every_rank_of_a_server_computes_every_prompt(
    world: Servers, prompts: Path
) -> None:
    report = await report_of(job(world, prompts))
    assert report.is_complete
    assert report.prompts + 2 == 10  # one was sent to each rank for its first report
    for rank in world.ranks:
        assert sorted(set(rank.computed)) == list(range(5))
        assert rank.dirty == 0
    assert report.coverage is not None
    assert (report.coverage.prompts, report.coverage.whole) == (10, 10)


async def test_stored_prompts_are_not_sent_again(world: Servers, prompts: Path) -> None:
    await report_of(job(world, prompts))
    for rank in world.ranks:
        rank.computed.clear()
    report = await report_of(job(world, prompts))
    assert [rank.computed for rank in world.ranks] == [[], []]
    assert (report.planned.stored, report.is_complete) == (10, True)


async def test_a_dry_run_computes_nothing(world: Servers, prompts: Path) -> None:
    await report_of(job(world, prompts))
    *_, planned = await events_of(job(world, prompts, dry_run=True))
    assert isinstance(planned, Planned)
    assert (planned.prompts, planned.stored) == (0, 10)


async def test_chunks_that_wait_fit_in_half_of_ram_beside_a_shared_tier(
    world: Servers, prompts: Path
) -> None:
    for rank in world.ranks:
        rank.has_shared_tier = True
    assert (await report_of(job(world, prompts))).is_complete
    assert max(rank.most_running for rank in world.ranks) <= 2  # of 2 chunks each


async def test_no_more_is_sent_than_the_disk_holds_beside_a_shared_tier(
    world: Servers, prompts: Path
) -> None:
    for rank in world.ranks:
        rank.has_shared_tier, rank.store_chunks = True, 4
    assert (await report_of(job(world, prompts))).planned.left_out == 6


async def test_texts_are_turned_into_tokens_by_the_server(
    world: Servers, prompts: Path
) -> None:
    write(prompts, {"prompt": "a long text " * 9})
    report = await report_of(job(world, prompts))
    assert report.is_complete
    assert report.planned.before.tokens == 2 * 108


async def test_a_prompt_that_the_server_refuses_is_reported(
    world: Servers, prompts: Path
) -> None:
    world.refused = {3}
    report = await report_of(job(world, prompts))
    assert [bad.line for bad in report.failed] == [4, 4]
    assert not report.is_complete


async def test_a_server_may_take_longer_for_a_prompt_than_a_disk_for_a_chunk(
    world: Servers, prompts: Path
) -> None:
    world.ranks, world.is_slow = world.ranks[:1], True
    write(prompts, *({"prompt_token_ids": [own] * 2 * BLOCK_TOKENS} for own in range(2)))
    assert (await report_of(job(world, prompts))).is_complete


async def test_a_server_of_another_model_is_refused(world: Servers, prompts: Path) -> None:
    with pytest.raises(ConfigError, match="serves name; write that as --model"):
        await events_of(job(world, prompts, model="other"))


async def test_a_server_without_kvtier_is_named(world: Servers, prompts: Path) -> None:
    world.ranks[1].has_kvtier = False
    with pytest.raises(ConfigError, match=f"{URL}: an engine reports no kvtier; start it"):
        await events_of(job(world, prompts))


async def test_a_server_that_does_not_answer_is_named(world: Servers, prompts: Path) -> None:
    with pytest.raises(KvtierError, match="http://two:1/v1/models: no answer"):
        await events_of(job(world, prompts, "http://two:1"))


@pytest.mark.parametrize(
    "options", [{"retain_s": 9.0}, {"arguments": ["--x"]}], ids=["retain", "arguments"]
)
async def test_options_without_effect_on_a_server_are_refused(
    world: Servers, prompts: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="not with --server"):
        await events_of(job(world, prompts, **options))
