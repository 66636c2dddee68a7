"""Several simulated engines: what they share, and what the shared tier carries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import KvtierConfig, parse_config
from kvtier.sim.cache import CacheResult, SharedResult, StepModel, simulate_cache
from kvtier.sim.shared_cache import Meter, SharedCache, SharedClient
from kvtier.sim.single import chunk_keys, simulate_single
from kvtier.sim.time_model import TierSpeed, TimeModel, TransferModel
from kvtier.sim.traces import Trace, generate
from kvtier.types import Job, Outcome, Purpose
from tests.unit.sim_traces import trace_of

CHUNK = 1 << 20
KEYS = chunk_keys(8)
MODEL = TimeModel(
    prefill_tokens_per_s=1000.0,
    speeds={
        "ram": TierSpeed(1e9, 1e9, 0.001),
        "nvme": TierSpeed(1e8, 5e7, 0.01),
        "shared_dir": TierSpeed(1e9, 1e9, 0.002),
    },
)
CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=30).map(
    lambda drawn: [[root * 100 + depth for depth in range(size)] for root, size in drawn]
)


def tiers_of(ram: int, shared: int = 0, *, nvme: int = 0) -> KvtierConfig:
    """Return a configuration of tiers of that many chunks."""
    lines = ["tiers:", f"  - {{kind: ram, capacity: {ram}MiB, eviction: lru}}"]
    if nvme:
        lines.append(f"  - {{kind: nvme, path: /nowhere/at/all, capacity: {nvme}MiB}}")
    if shared:
        lines.append(
            f"  - {{kind: shared_dir, path: /nowhere/at/all, capacity: {shared}MiB, "
            "known_chunks: 1000, lookup_timeout: 50ms}"
        )
    return parse_config("\n".join(lines), source="test")


def simulate(
    trace: Trace,
    config: KvtierConfig,
    engines: int,
    *,
    routing: str = "round-robin",
    model: TimeModel | None = MODEL,
) -> CacheResult:
    return simulate_cache(
        trace, config, engines=engines, routing=routing, chunk_bytes=CHUNK, model=model
    )


def shared_of(result: CacheResult) -> SharedResult:
    assert result.shared is not None
    return result.shared


def figures(result: Any) -> dict[str, Any]:
    """Return the fields of a result that do not depend on this machine's speed."""
    return {
        name: value
        for name, value in asdict(result).items()
        if name not in {"seconds", "refs_per_second"}
    }


# -- engines


def test_chunks_that_one_engine_stores_are_hits_of_another() -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 2]], every_s=100.0)
    result = simulate(trace, tiers_of(20, 100), 2)
    assert [tier.hits for tier in result.tiers] == [0, 3]
    assert [engine.hit_tokens["shared_dir"] for engine in result.engines] == [0, 3 * 16]
    assert [engine.saved_tokens for engine in result.engines] == [0, 3 * 16]
    assert asdict(shared_of(result).traffic) == {
        "questions": 2,
        "keys_asked": 6,
        "keys_found": 3,
        "chunks_read": 3,
        "chunks_missing": 0,
        "chunks_written": 3,
        "chunks_already_there": 0,
    }
    assert shared_of(result).written_bytes_per_s.mean == 3 * CHUNK / 100
    assert shared_of(result).questions_per_s.mean == 2 / 100
    assert shared_of(result).chunks_at_end == 3


def test_engines_without_a_shared_tier_share_nothing() -> None:
    trace = trace_of([[0, 1, 2]] * 4, every_s=100.0)
    result = simulate(trace, tiers_of(20), 2)
    assert result.shared is None
    assert [engine.requests for engine in result.engines] == [2, 2]
    assert [engine.hit_tokens["ram"] for engine in result.engines] == [3 * 16] * 2
    assert result.tiers[0].capacity_chunks == 2 * 20


def test_wear_and_load_are_those_of_one_engine_on_average() -> None:
    trace = trace_of([[0], [1], [2]], every_s=43_200.0)
    one, two = (simulate(trace, tiers_of(9, nvme=50), engines) for engines in (1, 2))
    assert one.tiers[1].bytes_written_per_day == two.tiers[1].bytes_written_per_day == 3 * CHUNK
    assert (one.tiers[1].dwpd, two.tiers[1].dwpd) == (3 / 50, 3 / 100)
    assert two.peak_load_no_cache == one.peak_load_no_cache / 2


def test_a_chunk_that_another_engine_put_meanwhile_is_not_put_again() -> None:
    # Each prompt takes 48 ms. The second engine asks before the first one has put its chunks,
    # and is done after that.
    trace = trace_of([[0, 1, 2], [0, 1, 2]], every_s=0.02)
    traffic = shared_of(simulate(trace, tiers_of(20, 100), 2)).traffic
    assert (traffic.chunks_written, traffic.chunks_already_there) == (3, 3)


def test_an_answer_that_comes_too_late_is_no_hit() -> None:
    slow = replace(MODEL, speeds={**MODEL.speeds, "shared_dir": TierSpeed(1e9, 1e9, 0.06)})
    trace = trace_of([[0, 1, 2], [0, 1, 2]], every_s=100.0)
    result = simulate(trace, tiers_of(20, 100), 2, model=slow)
    assert result.total_hit_ratio == 0
    assert result.ttft_s["p50"] == pytest.approx(0.048 + 0.05)


def test_an_engine_that_computes_in_steps_asks_the_shared_tier_too() -> None:
    model = StepModel(prefill_tokens_per_s=1000.0, speeds=MODEL.speeds)
    others = [[100 * number + depth for depth in range(9)] for number in range(1, 4)]
    trace = trace_of([[0, 1, 2], *others, [0, 1, 2]], every_s=100.0)
    result = simulate_cache(trace, tiers_of(12, 100), chunk_bytes=CHUNK, model=model)
    assert [tier.hits for tier in result.tiers] == [0, 3]


@pytest.mark.untraced
@given(chains=CHAINS.filter(any), capacity=st.integers(1, 30), engines=st.integers(1, 4))
def test_a_run_can_be_repeated_and_keeps_within_the_capacity(
    chains: list[list[int]], capacity: int, engines: int
) -> None:
    trace = trace_of(chains, every_s=0.05)
    config = tiers_of(14, capacity)
    result = simulate(trace, config, engines)
    shared = shared_of(result)
    assert shared.chunks_at_end <= capacity
    assert shared.traffic.chunks_read <= shared.traffic.keys_asked
    assert sum(engine.requests for engine in result.engines) == trace.requests
    assert figures(result) == figures(simulate(trace, config, engines))


@pytest.mark.untraced
@given(chains=CHAINS.filter(any), capacity=st.integers(1, 30))
def test_belady_at_the_shared_size_is_no_worse_than_lru(
    chains: list[list[int]], capacity: int
) -> None:
    trace = trace_of(chains)
    best = shared_of(simulate(trace, tiers_of(14, capacity), 2)).belady_hit_ratio
    lru = simulate_single(trace, policy="lru", capacity=capacity, touch_order="forward")
    assert best >= lru.block_hit_ratio


def test_a_shared_tier_finds_what_private_tiers_of_many_engines_miss() -> None:
    trace = generate("chat", sessions=60, per_s=0.2, chunk_tokens=64, seed=1)
    alone = simulate(trace, tiers_of(200), 4, model=None)
    together = simulate(trace, tiers_of(200, 4000), 4, model=None)
    assert together.prefix_hit_ratio > 1.5 * alone.prefix_hit_ratio
    assert together.ttft_s["p50"] < alone.ttft_s["p50"]


# -- routing


def test_routing_by_prefix_keeps_a_conversation_on_its_engine() -> None:
    turns = [
        [root * 100 + depth for depth in range(size)] for size in (2, 3) for root in (1, 2)
    ]
    trace = trace_of([[100], *turns], every_s=100.0)
    result = simulate(trace, tiers_of(20), 2, routing="prefix")
    assert [engine.requests for engine in result.engines] == [3, 2]
    assert result.tiers[0].hits == 1 + 2 + 2


def test_routing_by_prefix_spreads_prompts_that_share_only_their_beginning() -> None:
    trace = trace_of([[0, 10 * root, 10 * root + 1] for root in range(1, 7)])
    result = simulate(trace, tiers_of(20), 3, routing="prefix")
    assert [engine.requests for engine in result.engines] == [2, 2, 2]


# -- the service


def job_of(
    keys: Sequence[bytes], source: str, destination: str, purpose: Purpose = Purpose.DEMOTE
) -> Job:
    numbers = range(len(keys))
    return Job(1, purpose, source, destination, keys, numbers, numbers, timeout_s=1.0)


def transfers_of(cache: SharedCache) -> TransferModel:
    client = SharedClient(cache, "shared_dir")
    return TransferModel(MODEL, ram="ram", slot_nbytes=CHUNK, shared=client)


def test_a_put_is_found_when_it_ends_and_not_before() -> None:
    cache = SharedCache(8)
    first, second = transfers_of(cache), transfers_of(cache)
    ((done_s, _),) = first.run(job_of(KEYS[:2], "ram", "shared_dir"), 0.0)
    question = job_of(KEYS[:3], "shared_dir", "shared_dir", Purpose.QUESTION)
    ((_, early),) = second.run(question, done_s - 0.001)
    ((answered_s, answer),) = second.run(question, done_s)
    assert set(early.outcomes) == {Outcome.MISSING}
    assert answer.outcomes == [Outcome.DONE, Outcome.DONE, Outcome.MISSING]
    assert answered_s == done_s + 0.002
    assert answer.nbytes == 0


def test_a_chunk_that_was_evicted_is_missing_when_it_is_read() -> None:
    cache = SharedCache(2)
    transfers = transfers_of(cache)
    transfers.run(job_of(KEYS[:2], "ram", "shared_dir"), 0.0)
    transfers.run(job_of(KEYS[2:3], "ram", "shared_dir"), 1.0)
    get = job_of(KEYS[:3], "shared_dir", "ram", Purpose.PROMOTE)
    ((done_s, result),) = transfers.run(get, 2.0)
    assert result.outcomes == [Outcome.MISSING, Outcome.DONE, Outcome.DONE]
    assert result.nbytes == 2 * CHUNK
    assert done_s == pytest.approx(2.0 + 0.002 + 2 * CHUNK / 1e9)


def test_a_get_is_a_use_and_a_question_is_none() -> None:
    cache = SharedCache(2)
    cache.put(KEYS[:2], 0.0, done_s=0.0)
    assert cache.get(KEYS[:1], 1.0) == KEYS[:1]
    assert cache.contains(KEYS[1:2], 2.0) == [True]
    cache.put(KEYS[2:3], 3.0, done_s=3.0)
    assert cache.contains(KEYS[:3], 4.0) == [True, False, True]
    assert cache.evicted == 1


@given(
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60),
    capacity=st.integers(1, 5),
)
def test_the_service_is_an_lru_cache(calls: list[tuple[bool, int]], capacity: int) -> None:
    cache = SharedCache(capacity)
    known: OrderedDict[bytes, None] = OrderedDict()
    for now, (is_put, number) in enumerate(calls):
        key = KEYS[number]
        if is_put:
            cache.put([key], now, done_s=now)
            known[key] = None
            known.move_to_end(key)
            if len(known) > capacity:
                known.popitem(last=False)
        else:
            assert cache.get([key], now) == ([key] if key in known else [])
            if key in known:
                known.move_to_end(key)
        assert cache.contains(KEYS, now) == [each in known for each in KEYS]
        assert len(cache) == len(known)


def test_the_busiest_minute_is_the_peak() -> None:
    meter = Meter()
    for now_s, amount in ((0.0, 60), (59.0, 60), (60.0, 30), (600.0, 90)):
        meter.add(amount, now_s)
    assert (meter.total, meter.peak_per_s(601.0)) == (240, 2.0)


def test_the_peak_of_a_trace_of_seconds_is_no_lower_than_its_mean() -> None:
    trace = trace_of([[root * 10, root * 10 + 1] for root in range(11)], every_s=1.0)
    asked = shared_of(simulate(trace, tiers_of(20, 100), 1)).questions_per_s
    assert asked.mean == pytest.approx(1.1)
    assert asked.peak == pytest.approx(1.1)


def test_puts_that_outlast_the_trace_count_at_the_end() -> None:
    slow = replace(MODEL, speeds={**MODEL.speeds, "shared_dir": TierSpeed(1e9, 1e3, 0.002)})
    trace = trace_of([[0, 1, 2]], every_s=100.0)
    shared = shared_of(simulate(trace, tiers_of(20, 100), 1, model=slow))
    assert shared.chunks_at_end == shared.traffic.chunks_written == 3


@pytest.mark.parametrize(("stored", "rounds"), [(0, 1), (40, 3), (100, 1)])
def test_a_question_takes_one_latency_for_each_round(stored: int, rounds: int) -> None:
    cache, keys = SharedCache(100), chunk_keys(100)
    cache.put(keys[:stored], 0.0, done_s=0.0)
    for gallops in (False, True):
        client = SharedClient(cache, "shared_dir", gallops=gallops)
        transfers = TransferModel(MODEL, ram="ram", slot_nbytes=CHUNK, shared=client)
        question = job_of(keys, "shared_dir", "shared_dir", Purpose.QUESTION)
        ((answered_s, _),) = transfers.run(question, 1.0)
        assert answered_s == pytest.approx(1.0 + 0.002 * (rounds if gallops else 1))
