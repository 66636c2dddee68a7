"""Order, hashes, coverage and pace of a warm-up."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.coverage import (
    BlockHasher,
    Coverage,
    CoverageReader,
    KeyRules,
    Prompt,
    Scope,
    StoredKeys,
)
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import make_key
from kvtier.manager import GroupReach, Reach
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import Layout
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.types import LayoutFingerprint
from kvtier.warmup import FillState, Work, fill

SIZE = 4
ONE_GROUP = ((0, GroupReach(SIZE)),)


def stored(*keys: bytes) -> StoredKeys:
    return StoredKeys(np.array([hash_key(key) for key in keys], dtype=np.uint64))


def chain(tokens: Sequence[int], scope: Scope | None = None) -> list[bytes]:
    """Return the keys of a prompt's chunks."""
    hashes = BlockHasher(SIZE).hashes(tokens, scope or Scope())
    return [make_key(each, 0) for each in hashes]


def test_a_prompt_comes_before_those_that_continue_it() -> None:
    draw = random.Random(3)
    prompts = [
        Prompt(line, tuple(draw.randrange(3) * 300 for _ in range(draw.randint(1, 6))))
        for line in range(200)
    ]
    ordered = sorted(prompts, key=lambda prompt: prompt.order)
    tokens = [tuple(prompt.tokens) for prompt in ordered]
    assert tokens == sorted(tokens)


def test_prompts_of_lower_numbers_and_one_scope_come_together() -> None:
    prompts = [
        Prompt(1, (1,), priority=1),
        Prompt(2, (1,), cache_salt="s"),
        Prompt(3, (9,)),
        Prompt(4, (1,), lora="l"),
        Prompt(5, (1, 2)),
    ]
    ordered = sorted(prompts, key=lambda prompt: prompt.order)
    assert [prompt.line for prompt in ordered] == [5, 3, 2, 4, 1]


def test_hashes_do_not_depend_on_the_prompt_before() -> None:
    draw = random.Random(5)
    hasher = BlockHasher(SIZE)
    scopes = [Scope(), Scope(cache_salt="s"), Scope("l", "/l")]
    for _ in range(200):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(20))]
        scope = draw.choice(scopes)
        assert hasher.hashes(tokens, scope) == BlockHasher(SIZE).hashes(tokens, scope)
        assert len(hasher.hashes(tokens, scope)) == len(tokens) // SIZE


def test_a_salt_changes_every_hash_and_so_do_the_seed_and_the_algorithm() -> None:
    tokens = range(3 * SIZE)
    found = [
        BlockHasher(SIZE).hashes(tokens),
        BlockHasher(SIZE).hashes(tokens, Scope(cache_salt="s")),
        BlockHasher(SIZE).hashes(tokens, Scope("l", "/l")),
        BlockHasher(SIZE, seed="7").hashes(tokens),
        BlockHasher(SIZE, seed="7", algorithm="xxhash").hashes(tokens),
    ]
    assert len({each for hashes in found for each in hashes}) == 15


def test_hashes_that_no_other_engine_computes_are_refused() -> None:
    with pytest.raises(ConfigError, match="set PYTHONHASHSEED"):
        BlockHasher(SIZE, algorithm="xxhash")


def test_a_prompt_hits_up_to_its_first_missing_chunk() -> None:
    tokens = tuple(range(5 * SIZE + 1))
    keys = chain(tokens)
    reader = CoverageReader(KeyRules(ONE_GROUP, SIZE), {"nvme": stored(*keys[:2], keys[3])})
    found = reader.cover(Prompt(1, tokens))
    assert (found.hit_tokens, found.reusable_tokens) == (2 * SIZE, 5 * SIZE)
    assert found.is_missing.tolist() == [False, False, True, False, True]
    assert not found.is_stored


def test_the_last_token_is_always_computed() -> None:
    tokens = tuple(range(2 * SIZE))
    reader = CoverageReader(KeyRules(ONE_GROUP, SIZE), {"nvme": stored(*chain(tokens))})
    found = reader.cover(Prompt(1, tokens))
    assert (found.hit_tokens, found.reusable_tokens, found.is_stored) == (SIZE, SIZE, True)


def test_tokens_count_for_the_fastest_tier_that_has_them() -> None:
    tokens = tuple(range(3 * SIZE + 1))
    keys = chain(tokens)
    tiers = {"fast": stored(keys[1]), "slow": stored(*keys)}
    reader = CoverageReader(KeyRules(ONE_GROUP, SIZE), tiers)
    total = Coverage()
    total.add(reader.cover(Prompt(1, tokens)))
    assert total.tier_tokens == {"fast": SIZE, "slow": 2 * SIZE}
    assert (total.prompts, total.whole, total.partly, total.share) == (1, 1, 0, 1.0)


def test_a_window_needs_only_the_end_of_a_prefix() -> None:
    groups = (*ONE_GROUP, (1, GroupReach(SIZE, Reach.WINDOW, SIZE + 1)))
    tokens = tuple(range(4 * SIZE + 1))
    hashes = BlockHasher(SIZE).hashes(tokens)
    full = [make_key(each, 0) for each in hashes]
    window = [make_key(each, 1) for each in hashes]
    rules = KeyRules(groups, SIZE)
    found = CoverageReader(rules, {"nvme": stored(*full, window[3])}).cover(Prompt(1, tokens))
    assert found.hit_tokens == 4 * SIZE
    found = CoverageReader(rules, {"nvme": stored(*full, window[1])}).cover(Prompt(1, tokens))
    assert found.hit_tokens == 2 * SIZE


def test_a_prompt_without_a_whole_chunk_is_too_short_to_be_covered() -> None:
    reader = CoverageReader(KeyRules(ONE_GROUP, SIZE), {"nvme": stored()})
    total = Coverage()
    total.add(reader.cover(Prompt(1, tuple(range(SIZE - 1)))))
    assert (total.prompts, total.short, total.whole, total.share) == (1, 1, 0, 0.0)


class Machine:
    """An engine that ends one prompt at a time, and whose tier writes one chunk meanwhile."""

    ram_chunks = 10
    most_requests = 3
    prompt_timeout_s = 3600.0

    def __init__(self) -> None:
        self.queue: deque[tuple[Prompt, asyncio.Event]] = deque()
        self.unwritten_chunks = self.most_unwritten = 0
        self.writes = self.computes = True
        self.now_s = 0.0
        self.problem: Exception | None = None

    @property
    def is_idle(self) -> bool:
        return not self.unwritten_chunks

    async def compute(self, prompt: Prompt) -> int:
        ended = asyncio.Event()
        self.queue.append((prompt, ended))
        await ended.wait()
        return len(prompt.tokens)

    async def work(self) -> None:
        self.now_s += 10
        await asyncio.sleep(0)
        if self.problem:
            raise self.problem
        if self.unwritten_chunks and self.writes:
            self.unwritten_chunks -= 1
        if self.queue and self.computes:
            prompt, ended = self.queue.popleft()
            self.unwritten_chunks += len(prompt.tokens) // SIZE
            self.most_unwritten = max(self.most_unwritten, self.unwritten_chunks)
            ended.set()
        await asyncio.sleep(0)


def work(prompts: int, chunks: int) -> list[Work]:
    tokens = (0,) * (chunks * SIZE)
    return [Work(Prompt(line, tokens), chunks, chunks * SIZE) for line in range(1, prompts + 1)]


async def run(machine: Machine, works: list[Work]) -> FillState:
    state = FillState()
    async with asyncio.timeout(30):
        async for _ in fill([(machine, works)], state, clock=lambda: machine.now_s):
            pass
    return state


async def test_no_more_is_sent_than_half_of_ram_and_everything_is_written_in_the_end() -> None:
    machine = Machine()
    state = await run(machine, work(20, 2))
    assert machine.most_unwritten <= 5
    assert (state.prompts, state.tokens, state.computed_tokens) == (20, 160, 160)
    assert machine.unwritten_chunks == 0


async def test_a_prompt_larger_than_ram_is_sent_alone() -> None:
    machine = Machine()
    assert (await run(machine, [*work(1, 2), *work(2, 30)])).prompts == 3


async def test_an_engine_that_fails_ends_the_work_with_its_error() -> None:
    machine = Machine()
    machine.problem = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await run(machine, work(5, 2))


async def test_a_disk_that_writes_nothing_ends_the_wait_after_minutes() -> None:
    machine = Machine()
    machine.writes = False
    with pytest.raises(TierUnavailableError, match="nothing was written for 300 s"):
        await run(machine, work(3, 2))


async def test_a_prompt_may_take_as_long_as_its_engine_allows() -> None:
    machine = Machine()
    machine.computes = False
    with pytest.raises(TierUnavailableError, match=r"no prompt ended .* for 3600 s"):
        await run(machine, work(3, 2))
    assert machine.now_s > 3600


def test_a_namespace_of_an_earlier_kvtier_cannot_be_looked_into(tmp_path: Path) -> None:
    layout = Layout(LayoutFingerprint({"model": "m"}), 4096)
    with pytest.raises(ConfigError, match="start an engine on it once"):
        KeyRules.of(StoredNamespace(tmp_path, layout))
