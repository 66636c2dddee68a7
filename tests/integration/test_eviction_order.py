"""A hybrid model's prefix in a full tier, against vLLM's own manager of one RAM tier."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, takewhile

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.support.workbench import Workbench, prefix

CHUNKS = 12
CAPACITY = 150
"""Of six prompts and a piece."""

pytestmark = pytest.mark.skipif(
    not hasattr(ReqContext, "set_offload_key_position"),
    reason="this vLLM orders chunks group after group",
)


class Native:
    """vLLM's manager, driven as its scheduler does."""

    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(num_chunks=CAPACITY, cache_policy="lru")

    def serve(self, prompt: int, parts: Sequence[int], name: str) -> None:
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        hits = self.usable(prompt)
        loaded = _keys(prompt, 0, hits, context)
        if loaded:
            self.manager.prepare_load(loaded, context)
            self.manager.complete_load(loaded, context)
        for begin, end in _steps(hits, parts):
            keys = _keys(prompt, begin, end, context)
            assert self.manager.prepare_store(keys, context) is not None
            self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)

    def usable(self, prompt: int) -> int:
        """Return how many leading chunks of ``prompt`` all groups have."""
        context = ReqContext(req_id="probe")
        here = [
            all(self.manager.lookup(key, context).name == "HIT" for key in keys)
            for keys in zip(*_groups(prompt, 0, CHUNKS), strict=True)
        ]
        return sum(takewhile(bool, here))


class Ours:
    """kvtier's manager, driven in the same way."""

    def __init__(self) -> None:
        self.bench = Workbench(CAPACITY, eviction="lru")

    def serve(self, prompt: int, parts: Sequence[int], name: str) -> None:
        self.bench.manager.begin_request(name)
        hits = self.usable(prompt)
        if hits:
            self.bench.load([*chain(*_groups(prompt, 0, hits))], name)
        for begin, end in _steps(hits, parts):
            assert self.bench.store([*chain(*_groups(prompt, begin, end))], name) is not None
        self.bench.manager.end_request(name)

    def usable(self, prompt: int) -> int:
        here = self.bench.resident()
        both = zip(*_groups(prompt, 0, CHUNKS), strict=True)
        return sum(1 for _ in takewhile(here.issuperset, both))


def _steps(hits: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield from and up to which chunk each step computes."""
    for begin, end in pairwise([0, *parts]):
        if hits < end:
            yield max(begin, hits), end


def _groups(prompt: int, begin: int, end: int) -> list[list[bytes]]:
    return [prefix(end, of=prompt, group=group)[begin:] for group in (0, 1)]


def _keys(prompt: int, begin: int, end: int, context: ReqContext) -> list[OffloadKey]:
    """Return keys of a prompt, group after group, and tell ``context`` where they end."""
    keys = [[OffloadKey(key) for key in group] for group in _groups(prompt, begin, end)]
    for group in keys:
        for depth, key in enumerate(group, begin):
            context.set_offload_key_position(key, (depth + 1) * 16)
    return [*chain(*keys)]


@pytest.mark.parametrize("parts", [[CHUNKS], [4, 8, CHUNKS]], ids=["at once", "in parts"])
def test_as_much_of_all_prompts_can_be_used_as_with_vllm(parts: list[int]) -> None:
    rng = random.Random(3)
    native, ours = Native(), Ours()
    usable: list[list[int]] = []
    for number in range(200):
        prompt = min(rng.randrange(12), rng.randrange(12))
        native.serve(prompt, parts, f"{number}")
        ours.serve(prompt, parts, f"{number}")
        usable.append([sum(map(manager.usable, range(12))) for manager in (ours, native)])
    assert all(mine >= theirs for mine, theirs in usable), usable
