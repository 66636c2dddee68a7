"""Order, hashes, coverage and pace of a warm-up."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import make_key
from kvtier.manager.hits import GroupReach, Reach
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import Layout
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.types import LayoutFingerprint
from kvtier.warmup import (
    BlockHasher,
    CoverageReader,
    KeyRules,
    Prompt,
    PromptSpool,
    Scope,
    StoredKeys,
)
from kvtier.warmup._prefill import PrefillState, prefill

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
    spool = PromptSpool()
    spool.add(prompts)
    ordered = [prompt for _, prompt in spool.in_order()]
    assert [prompt.tokens for prompt in ordered] == sorted(each.tokens for each in prompts)
    ids = [number for number, _ in spool.in_order()]
    assert list(spool.pick(ids[::-1])) == ordered[::-1]
    spool.close()


def test_prompts_of_lower_numbers_and_one_scope_come_together() -> None:
    spool = PromptSpool()
    spool.add(
        [
            Prompt(1, (1,), priority=1),
            Prompt(2, (1,), cache_salt="s"),
            Prompt(3, (9,)),
            Prompt(4, (1,), lora="l"),
            Prompt(5, (1, 2)),
        ]
    )
    assert [prompt.line for _, prompt in spool.in_order()] == [5, 3, 2, 4, 1]
    spool.close()


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
    total = reader.totals()
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


class Machine:
    """An engine whose tier writes one chunk in a step."""

    ram_chunks = 10
    max_requests = 3

    def __init__(self) -> None:
        self.queue: deque[tuple[int, int]] = deque()
        self.unwritten = self.most_unwritten = 0
        self.writes = True
        self.sent: list[int] = []

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        self.sent.append(line)
        self.queue.append((line, len(tokens)))
        return ""

    def step(self) -> Sequence[tuple[int, int, int]]:
        if self.unwritten and self.writes:
            self.unwritten -= 1
        if not self.queue:
            return []
        line, tokens = self.queue.popleft()
        self.unwritten += tokens // SIZE
        self.most_unwritten = max(self.most_unwritten, self.unwritten)
        return [(line, tokens, 0)]

    def has_work(self) -> bool:
        return bool(self.queue or self.unwritten)

    def unwritten_chunks(self) -> int:
        return self.unwritten

    def abort(self) -> None:
        self.queue.clear()


def work(prompts: int, chunks: int) -> list[tuple[Prompt, int, int]]:
    tokens = (0,) * (chunks * SIZE)
    return [(Prompt(line, tokens), chunks, chunks * SIZE) for line in range(1, prompts + 1)]


def test_no_more_is_sent_than_half_of_ram_and_everything_is_written_in_the_end() -> None:
    machine, state = Machine(), PrefillState()
    prefill(machine, iter(work(20, 2)), state, stop=threading.Event())
    assert machine.most_unwritten <= 5
    assert (state.prompts, state.tokens, state.computed_tokens) == (20, 160, 160)
    assert (machine.unwritten, state.unwritten_chunks) == (0, 0)


def test_a_prompt_larger_than_ram_is_sent_alone() -> None:
    machine, state = Machine(), PrefillState()
    prefill(machine, iter([*work(1, 2), *work(2, 30)]), state, stop=threading.Event())
    assert state.prompts == 3


def test_a_stop_drops_what_runs() -> None:
    machine, state, stop = Machine(), PrefillState(), threading.Event()

    def prompts() -> Iterator[tuple[Prompt, int, int]]:
        for number, each in enumerate(work(9, 2)):
            if number == 2:
                stop.set()
            yield each

    prefill(machine, prompts(), state, stop=stop)
    assert 0 < state.prompts < 9
    assert not machine.queue


def test_a_disk_that_writes_nothing_ends_the_wait_after_minutes() -> None:
    machine, state = Machine(), PrefillState()
    machine.writes = False
    now = iter(range(0, 10_000, 10))
    with pytest.raises(TierUnavailableError, match="nothing was written for 300 s"):
        prefill(
            machine,
            iter(work(3, 2)),
            state,
            stop=threading.Event(),
            clock=lambda: float(next(now)),
        )


def test_a_namespace_of_an_earlier_kvtier_cannot_be_looked_into(tmp_path: Path) -> None:
    layout = Layout(LayoutFingerprint({"model": "m"}), 4096)
    with pytest.raises(ConfigError, match="start an engine with this kvtier once"):
        KeyRules.of(StoredNamespace(tmp_path, layout))
