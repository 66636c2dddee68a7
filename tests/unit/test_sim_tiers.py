"""All tiers in model time: what is hit, what it costs, and that everything ends."""

from __future__ import annotations

import csv
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import build
from kvtier.build import build_manager, build_tiers
from kvtier.config import KvtierConfig, parse_config
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits, TieredOffloadingManager, TierState
from kvtier.policies import Admission, Placement, TieredPlacement, build_eviction
from kvtier.policies.admission import SecondTouch
from kvtier.sim._engine import ModelRequest, ReliableSlotStatus
from kvtier.sim._sequential_engine import SequentialEngine
from kvtier.sim.cache import simulate_cache
from kvtier.sim.single import chunk_keys
from kvtier.sim.time_model import Device, TierSpeed, TimeModel, TransferModel, parse_speed
from kvtier.sim.traces import generate, read_trace
from tests.support.invariants import check_manager
from tests.unit.instant_tiers import replay_references
from tests.unit.sim_traces import ROOT, TRACES, needs_traces, trace_of
from tests.unit.textbook import TwoLevels

CHUNK = 1 << 20
RATE = 1000.0
RAM = TierSpeed(1e9, 1e9, 0.001)
NVME = TierSpeed(1e8, 5e7, 0.01)
MODEL = TimeModel(prefill_tokens_per_s=RATE, speeds={"ram": RAM, "nvme": NVME})


def tiers_of(
    ram: int, nvme: int = 0, *, load_path: str = "direct", **placement: object
) -> KvtierConfig:
    """Return a configuration of tiers of that many chunks."""
    lines = ["tiers:", f"  - {{kind: ram, capacity: {ram}MiB, eviction: lru}}"]
    if nvme:
        lines.append(f"  - {{kind: nvme, path: /nowhere/at/all, capacity: {nvme}MiB}}")
    if placement:
        lines += ["placement:", *(f"  {key}: {value}" for key, value in placement.items())]
    lines.append(f"transfer: {{load_path: {load_path}}}")
    return parse_config("\n".join(lines), source="test")


# -- hits

CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=30).map(
    lambda drawn: [[root * 100 + depth for depth in range(size)] for root, size in drawn]
)


def leading_hits(chains: Iterable[Sequence[int]], capacity: int) -> int:
    """Count what a manager of one LRU tier hits when requests come one after another.

    A request uses its chunks leaf to root, whether they were there or are new; the prefix that
    is offered along is no victim for its own tail.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        lead = 0
        while lead < len(chain) and chain[lead] in cache:
            lead += 1
        hits += lead
        for chunk in reversed(chain[:lead]):
            cache.move_to_end(chunk)
        offered = chain[lead:]
        there = [chunk for chunk in offered if chunk in cache]
        missing = [chunk for chunk in offered if chunk not in cache]
        for _ in range(len(cache) + len(missing) - capacity):
            del cache[next(chunk for chunk in cache if chunk not in there)]
        for chunk in reversed(chain):
            cache[chunk] = None
            cache.move_to_end(chunk)
    return hits


@pytest.mark.untraced
@given(chains=CHAINS.filter(any), capacity=st.integers(6, 20))
def test_ram_alone_at_leisure_is_one_lru(chains: list[list[int]], capacity: int) -> None:
    trace = trace_of(chains, every_s=1000.0)
    result = simulate_cache(trace, tiers_of(capacity), chunk_bytes=CHUNK, model=MODEL)
    assert result.tiers[0].hits == leading_hits(chains, capacity)
    assert result.total_hit_ratio == result.tiers[0].hits / trace.refs
    assert result.writes_per_ref == result.promotions_per_ref == 0


@pytest.mark.untraced
@given(chains=CHAINS.filter(any), write=st.sampled_from(["through", "evict"]))
def test_a_disk_that_holds_everything_forgets_nothing_at_leisure(
    chains: list[list[int]], write: str
) -> None:
    trace = trace_of(chains, every_s=1000.0)
    config = tiers_of(14, 1000, write=write, pin_budget="100%")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_RESERVE", 0.5)  # so that every chain finds room
        result = simulate_cache(trace, config, chunk_bytes=CHUNK, model=MODEL)
    assert sum(tier.hits for tier in result.tiers) == leading_hits(chains, 10**6)
    nvme = result.tiers[1]
    assert nvme.chunks_promoted == nvme.hits
    if write == "through":
        assert nvme.chunks_written == trace.distinct
        assert result.writes_per_ref == trace.distinct / trace.refs


def test_retained_chunks_are_hits_until_their_time_is_over() -> None:
    chains = [[0], [1], [2], [3], [0], [4], [5], [6], [0]]
    trace = trace_of(chains, every_s=10.0)
    forgetful = simulate_cache(trace, tiers_of(3), chunk_bytes=CHUNK, model=MODEL)
    assert forgetful.tiers[0].hits == 0
    for retain, hits in (("45s", 2), ("15s", 0)):
        config = tiers_of(3, retain_quota="34%", retain=retain)
        result = simulate_cache(trace, config, chunk_bytes=CHUNK, model=MODEL)
        assert result.tiers[0].hits == hits


def exclusive() -> Placement:
    """A chunk found below moves up and leaves nothing behind; a victim moves down."""
    return TieredPlacement(tiers=2, write="evict", promote="move")


class TwoTiers(NamedTuple):
    """A manager of two LRU tiers, the upper with one slot free ahead of need."""

    manager: TieredOffloadingManager
    tiers: Sequence[TierState]


def two_tiers(
    upper: int, lower: int, placement: Placement, *conditions: Admission, spare: int = 1
) -> TwoTiers:
    tiers = [
        TierState("ram", 0, upper + spare, build_eviction("lru", capacity=upper)),
        TierState("nvme", 1, lower, build_eviction("lru", capacity=lower)),
    ]
    limits = ManagerLimits(
        pin_budget=upper, reserve=spare * 1.5 / (upper + spare), queue=1 << 20
    )
    return TwoTiers(
        TieredOffloadingManager(
            tiers,
            placement=placement,
            conditions=conditions,
            limits=limits,
            slot_status=ReliableSlotStatus(),
        ),
        tiers,
    )


def lru_hits(keys: Iterable[ChunkKey], capacity: int) -> int:
    cache: OrderedDict[ChunkKey, None] = OrderedDict()
    hits = 0
    for key in keys:
        hits += key in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(
    chunks=st.lists(st.integers(0, 14), min_size=1, max_size=120),
    upper=st.integers(1, 5),
    lower=st.integers(1, 8),
)
def test_two_exclusive_lru_tiers_are_one_lru_of_the_sum(
    chunks: list[int], upper: int, lower: int
) -> None:
    keys = chunk_keys(15)
    references = [keys[chunk] for chunk in chunks]
    manager, tiers = two_tiers(upper, lower, exclusive())
    replay_references(references, manager)
    check_manager(manager)
    hits = [tier.counters.hits for tier in tiers]
    assert hits[0] == lru_hits(references, upper)
    assert sum(hits) == lru_hits(references, upper + lower)


def reference_rows() -> list[dict[str, str]]:
    path = TRACES / "reference_two_tier.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


SCHEMES: dict[str, Callable[[], tuple[Placement, *tuple[Admission, ...]]]] = {
    "exclusive": lambda: (exclusive(),),
    "write_through": lambda: (TieredPlacement(tiers=2, write="through"),),
    "demote_keep": lambda: (TieredPlacement(tiers=2, write="evict"),),
    "demote_keep_admit2": lambda: (
        TieredPlacement(tiers=2, write="evict"),
        SecondTouch(1 << 20),
    ),
}
SMALL = ROOT / "tests/data/small_chat.jsonl"
MOST_REFERENCES = 3000


@cache
def references_of(trace: str) -> Sequence[ChunkKey]:
    read = read_trace(TRACES / f"{trace}.jsonl")
    keys = chunk_keys(read.distinct)
    return [keys[chunk] for chunk in read.ids.tolist()]


@pytest.mark.untraced
@pytest.mark.parametrize("sizes", [(2, 10), (10, 40), (39, 100)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_the_small_trace_two_tiers_do_what_the_textbook_says(
    scheme: str, sizes: tuple[int, int]
) -> None:
    trace = read_trace(SMALL)
    chunks = trace.ids.tolist()[:MOST_REFERENCES]
    keys = chunk_keys(trace.distinct)
    levels = TwoLevels(scheme, *sizes)
    for chunk in chunks:
        levels.access(chunk)
    spare = scheme != "write_through"
    manager, (ram, nvme) = two_tiers(*sizes, *SCHEMES[scheme](), spare=spare)
    replay_references([keys[chunk] for chunk in chunks], manager)
    assert min(*levels.hits, levels.writes, levels.promotions) > 0
    assert [ram.counters.hits, nvme.counters.hits] == levels.hits
    assert nvme.counters.stored == levels.writes
    assert nvme.counters.promoted == levels.promotions


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row['trace']}-{row['l1_fraction']}-{row['l2_fraction']}-{row['scheme']}",
        )
        for row in reference_rows()
        if row["trace"].startswith("mooncake") and row["scheme"] in SCHEMES
    ],
)
def test_two_tiers_do_what_the_reference_did(row: dict[str, str]) -> None:
    references = references_of(row["trace"])
    manager, (ram, nvme) = two_tiers(
        int(row["l1_blocks"]),
        int(row["l2_blocks"]),
        *SCHEMES[row["scheme"]](),
        spare=row["scheme"] != "write_through",
    )
    replay_references(references, manager)
    expected = {
        "l1_hit_ratio": ram.counters.hits,
        "l2_hit_ratio": nvme.counters.hits,
        "total_hit_ratio": ram.counters.hits + nvme.counters.hits,
        "l2_writes_per_ref": nvme.counters.stored,
        "promotions_per_ref": nvme.counters.promoted,
    }
    assert {name: round(count / len(references), 6) for name, count in expected.items()} == {
        name: float(row[name]) for name in expected
    }


# -- times


def test_a_hit_in_ram_costs_its_copy_and_the_rest_is_computed() -> None:
    trace = trace_of([[0, 1], [0, 1, 2]], tokens=[32, 48], every_s=100.0)
    result = simulate_cache(trace, tiers_of(9), chunk_bytes=CHUNK, model=MODEL)
    first, second = 32 / RATE, 2 * CHUNK / 1e9 + 0.001 + 16 / RATE
    assert result.ttft_s["p50"] == pytest.approx((first + second) / 2)
    assert result.ttft_no_cache_s["p50"] == pytest.approx((32 + 48) / 2 / RATE)
    assert result.prefix_hit_ratio == 32 / 80


def test_the_busiest_tenth_says_how_much_an_engine_without_a_cache_is_asked_for() -> None:
    busy = [1600 if 40 <= number < 50 else 16 for number in range(101)]
    trace = trace_of([[number] for number in range(101)], tokens=busy)
    result = simulate_cache(trace, tiers_of(9), chunk_bytes=CHUNK, model=MODEL)
    assert result.peak_load_no_cache == pytest.approx(10 * 1600 / (10 * RATE))
    at_once = trace_of([[0], [1]], every_s=0.0)
    result = simulate_cache(at_once, tiers_of(9), chunk_bytes=CHUNK, model=MODEL)
    assert result.peak_load_no_cache == 0


@pytest.mark.parametrize("load_path", ["staged", "direct"])
def test_a_hit_on_disk_waits_for_the_disk_first(load_path: str) -> None:
    # The third request needs the room of the first one's chunks; the fourth brings them back.
    chains = [[0, 1], [2, 3], [4, 5], [0, 1]]
    config = tiers_of(4, 50, pin_budget="100%", load_path=load_path)
    trace = trace_of(chains, every_s=100.0)
    result = simulate_cache(trace, config, chunk_bytes=CHUNK, model=MODEL)
    assert result.tiers[1].hits == 2
    copy_s = 2 * CHUNK / 1e9 + 0.001
    promotion_s = 2 * CHUNK / 1e8 + 0.01
    load_s = promotion_s + copy_s if load_path == "staged" else max(promotion_s, copy_s)
    # An engine computes at least the last token.
    waits = [32 / RATE] * 3 + [load_s + 1 / RATE]
    assert result.ttft_s["p50"] == pytest.approx(np.quantile(waits, 0.5))
    assert result.ttft_s["p99"] == pytest.approx(np.quantile(waits, 0.99))


def test_the_load_path_changes_the_wait() -> None:
    trace = generate("agents", sessions=12, per_s=0.2, chunk_tokens=512, seed=2)
    direct, staged = (
        asdict(
            replace(
                simulate_cache(
                    trace,
                    tiers_of(60, 300, load_path=path, pin_budget="100%"),
                    chunk_bytes=CHUNK,
                    model=MODEL,
                ),
                seconds=0.0,
                refs_per_second=0.0,
            )
        )
        for path in ("direct", "staged")
    )
    assert direct["load_path"] == "direct"
    assert staged["load_path"] == "staged"
    assert staged["ttft_s"] != direct["ttft_s"]


def test_requests_wait_for_each_other() -> None:
    trace = trace_of([[0], [1], [2]], tokens=[1000, 1000, 1000], every_s=0.0)
    result = simulate_cache(trace, tiers_of(9), chunk_bytes=CHUNK, model=MODEL)
    assert result.ttft_s["p50"] == pytest.approx(2.0)
    assert result.ttft_s == result.ttft_no_cache_s


def test_wear_is_what_was_written_at_the_traces_pace() -> None:
    trace = trace_of([[0], [1], [2]], every_s=43_200.0)
    result = simulate_cache(trace, tiers_of(9, 50), chunk_bytes=CHUNK, model=MODEL)
    ram, nvme = result.tiers
    assert ram.bytes_written_per_day is None
    assert nvme.bytes_written_per_day == 3 * CHUNK
    assert nvme.dwpd == 3 / 50
    hurried = simulate_cache(trace_of([[0]]), tiers_of(9, 50), chunk_bytes=CHUNK, model=MODEL)
    assert hurried.tiers[1].dwpd is None


@pytest.mark.parametrize("load_path", ["staged", "direct"])
def test_a_disk_too_slow_for_the_deadline_means_computing_again(load_path: str) -> None:
    stuck = TimeModel(RATE, speeds={"ram": RAM, "nvme": TierSpeed(1e3, 1e9, 0.0)})
    chains = [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    trace = trace_of(chains, every_s=100.0)
    config = tiers_of(4, 50, pin_budget="100%", load_path=load_path)
    result = simulate_cache(trace, config, chunk_bytes=CHUNK, model=stuck)
    assert result.tiers[1].hits == 0
    assert 9.0 < result.ttft_s["p99"] < 11.0
    # What the stuck read is to bring keeps its slots, so the last request finds nothing either.
    assert result.prefix_hit_ratio == result.total_hit_ratio == 0


def test_a_device_serves_one_job_after_another() -> None:
    device = Device(100.0, 1.0)
    assert device.occupy(200, since_s=0.0) == 3.0
    assert device.occupy(100, since_s=0.5) == 4.0
    assert device.occupy(100, since_s=10.0) == 12.0


def test_a_speed_is_read_with_its_units() -> None:
    assert parse_speed("nvme=6GB/s,3GB/s,200us") == ("nvme", TierSpeed(6e9, 3e9, 200e-6))
    for wrong in ("nvme", "nvme=6GB/s", "nvme=6GB/s,3GB/s,5", "nvme=6GB,3GB/s,1ms"):
        with pytest.raises(ConfigError, match=f"--tier-speed {wrong}"):
            parse_speed(wrong)


# -- everything ends


class Load(NamedTuple):
    """Traffic, and tiers that may be much too small or slow for it."""

    chains: list[list[int]]
    ram: int
    nvme: int
    write: str
    bytes_per_s: float
    every_s: float
    load_path: str


LOADS = st.builds(
    Load,
    chains=CHAINS.filter(any),
    ram=st.integers(1, 8),
    nvme=st.integers(1, 20),
    write=st.sampled_from(["through", "evict"]),
    bytes_per_s=st.sampled_from([1e4, 1e6, 1e9]),
    every_s=st.sampled_from([0.0, 0.01, 5.0]),
    load_path=st.sampled_from(["staged", "direct"]),
)


@pytest.mark.untraced
@given(load=LOADS)
def test_every_request_gets_its_first_token_and_nothing_is_kept_for_any(load: Load) -> None:
    config = tiers_of(
        load.ram,
        load.nvme,
        load_path=load.load_path,
        write=load.write,
    )
    tiers = build_tiers(config, [load.ram, load.nvme])
    slot_status = ReliableSlotStatus()
    manager = build_manager(
        config,
        tiers,
        slot_nbytes=CHUNK,
        chunk_tokens=16,
        slot_status=slot_status,
        record_events=False,
    )
    speed = TierSpeed(load.bytes_per_s, load.bytes_per_s, 0.001)
    model = TimeModel(RATE, concurrency=4, speeds={"ram": RAM, "nvme": speed})
    engine = SequentialEngine(
        manager,
        model=model,
        transfers=TransferModel(model, ram="ram", slot_nbytes=CHUNK),
        slot_status=slot_status,
        chunk_tokens=16,
    )
    keys = chunk_keys(1000)
    requests = [
        ModelRequest(
            number, number * load.every_s, 16 * len(chain) + 1, [keys[at] for at in chain]
        )
        for number, chain in enumerate(load.chains)
    ]
    served = list(engine.serve(requests))
    assert sorted(request.number for request in served) == list(range(len(load.chains)))
    assert all(request.first_token_s > request.arrival_s for request in served)
    check_manager(manager)
    after = manager.snapshot()
    assert (after.requests, after.waiting, after.granted) == (0, 0, 0)


def test_a_tier_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\].capacity"):
        simulate_cache(trace_of([[0]]), tiers_of(9, 1), chunk_bytes=2 * CHUNK)
