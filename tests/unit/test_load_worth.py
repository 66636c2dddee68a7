"""Which loads are worth their time."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.manager import LoadChoice, LoadWorth, Lookup, ManagerLimits, SkipCause
from kvtier.testing.workbench import Workbench, prefix
from kvtier.types import Job, Outcome, TransferResult

CHUNK = 1 << 20
TOKENS = 16
US_PER_TOKEN = 100e-6
CHUNK_S = TOKENS * US_PER_TOKEN
"""What computing a chunk takes: a tier is as fast as computing at 655 MB/s."""


def worth(*, margin: float = 1.0, recompute_s: float | None = US_PER_TOKEN) -> LoadWorth:
    return LoadWorth(
        tiers=3,
        chunk_nbytes=CHUNK,
        chunk_tokens=TOKENS,
        recompute_s_per_token=recompute_s,
        margin=margin,
    )


def measure(
    gate: LoadWorth, tier: int, chunks: int, seconds: float, *, now: float = 0.0, job: int = 1
) -> None:
    """Let a load of ``chunks`` chunks take ``seconds``, a third of it in the queue."""
    gate.sent(job, tier, chunks)
    result = TransferResult(
        job, [Outcome.DONE] * chunks, queued_s=seconds / 3, seconds=seconds * 2 / 3
    )
    gate.returned(result, timeout_s=10.0, now=now)


def expire(
    gate: LoadWorth, job: int, chunks: int, *, ran: bool = True, now: float = 0.0
) -> None:
    """Let a load that was sent reach its deadline of ten seconds, running or in the queue."""
    late = TransferResult(job, [Outcome.EXPIRED] * chunks, settled=not ran)
    gate.returned(late, timeout_s=10.0, now=now)


def kept(gate: LoadWorth, sources: Sequence[int], *, groups: int = 1, now: float = 0.0) -> int:
    choice = gate.choose(sources, counted=len(sources) // groups, now=now)
    return len(sources) if choice is None else choice.kept


def choice_of(gate: LoadWorth, sources: Sequence[int], *, now: float = 0.0) -> LoadChoice:
    choice = gate.choose(sources, counted=len(sources), now=now)
    assert choice is not None
    return choice


# -- estimates ------------------------------------------------------------------------------


def test_a_start_up_time_is_told_from_a_rate() -> None:
    gate = worth()
    for job, chunks in enumerate((1, 4, 16, 64, 2, 32)):
        measure(gate, 1, chunks, 0.05 + chunks * 0.002, job=job)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.start_s == pytest.approx(0.05)
    assert price.s_per_byte * CHUNK == pytest.approx(0.002)
    assert gate.figures().prices[2] is None


def test_loads_of_one_size_have_a_rate_and_no_start_up_time() -> None:
    gate = worth()
    for job in range(4):
        measure(gate, 1, 8, 0.08, job=job)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.start_s == 0.0
    assert price.s_per_byte * CHUNK == pytest.approx(0.01)


def test_loads_that_all_take_the_same_time_have_no_rate() -> None:
    gate = worth()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, 0.05 / (1 + chunks / 1000), job=job)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.s_per_byte == 0.0
    assert price.start_s == pytest.approx(0.05, rel=0.1)


def test_what_waited_in_the_queue_counts_as_bytes_too() -> None:
    """Two jobs at once on a disk of one chunk a second: the second one waits for the first."""
    gate = worth()
    gate.sent(1, 1, 4)
    gate.sent(2, 1, 4)
    done = [Outcome.DONE] * 4
    gate.returned(TransferResult(1, done, seconds=4.0), timeout_s=10.0, now=0.0)
    gate.returned(TransferResult(2, done, queued_s=4.0, seconds=4.0), timeout_s=10.0, now=0.0)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.seconds(CHUNK) == pytest.approx(1.0)


def test_a_tier_is_as_fast_as_it_was_lately() -> None:
    gate = worth()
    for job in range(20):
        measure(gate, 1, 8, 0.8, job=job, now=float(job))
    for job in range(20, 30):
        measure(gate, 1, 8, 0.008, job=job, now=float(job))
    price = gate.figures().prices[1]
    assert price is not None
    assert price.seconds(8 * CHUNK) < 0.1


@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.CANCELLED, Outcome.REFUSED]
)
def test_a_load_that_failed_says_nothing_about_speed(outcome: Outcome) -> None:
    gate = worth()
    gate.sent(1, 1, 2)
    gate.returned(TransferResult(1, [outcome] * 2, seconds=9.0), timeout_s=10.0, now=0.0)
    assert gate.figures().prices[1] is None


def test_a_load_that_expired_took_its_deadline_at_least() -> None:
    gate = worth()
    gate.sent(1, 1, 2)
    late = TransferResult(1, [Outcome.EXPIRED] * 2, settled=False)
    gate.returned(late, timeout_s=10.0, now=0.0)
    gate.returned(TransferResult(1, [Outcome.DONE] * 2, seconds=30.0), timeout_s=10.0, now=1.0)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.seconds(2 * CHUNK) == pytest.approx(10.0)


def test_a_load_that_expired_while_more_was_expected_of_it_changes_nothing() -> None:
    gate = worth()
    measure(gate, 1, 4, 8.0, job=1)
    gate.sent(2, 1, 6)
    expire(gate, 2, 6)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.seconds(6 * CHUNK) == pytest.approx(12.0)


def test_a_load_that_expired_too_soon_for_the_estimate_raises_all_of_it() -> None:
    gate = worth()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, 0.5 + chunks * 0.125, job=job)
    gate.sent(9, 1, 16)
    expire(gate, 9, 16)
    price = gate.figures().prices[1]
    assert price is not None
    assert price.seconds(16 * CHUNK) == pytest.approx(10.0)
    assert price.start_s == pytest.approx(2.0)


def test_a_load_that_expired_in_the_queue_says_nothing_about_its_bytes() -> None:
    fresh, known = worth(), worth()
    measure(known, 1, 4, 0.1)
    for gate in (fresh, known):
        gate.sent(2, 1, 64)
        expire(gate, 2, 64, ran=False)
    assert fresh.figures().prices[1] is None
    price = known.figures().prices[1]
    assert price is not None
    assert price.seconds(4 * CHUNK) == pytest.approx(0.1)


def test_a_tier_that_let_a_try_expire_is_not_tried_again_at_once() -> None:
    for ran in (True, False):
        gate = worth()
        measure(gate, 1, 16, 60.0)
        assert kept(gate, [1] * 16, now=120.0) == 16
        gate.sent(2, 1, 16)
        expire(gate, 2, 16, ran=ran, now=130.0)
        assert kept(gate, [1] * 16, now=130.0) == 0


def test_computing_is_measured_by_steps_of_many_tokens() -> None:
    gate = worth(recompute_s=None)
    gate.computed(1, 0.03, 0.0)
    assert gate.recompute_s_per_token is None
    for _ in range(100):
        gate.computed(2048, 0.2, 0.0)
        gate.computed(16, 0.1, 0.0)
    assert gate.recompute_s_per_token == pytest.approx(0.2 / 2048)
    for _ in range(100):
        gate.computed(2048, 0.4, 0.0)
    assert gate.recompute_s_per_token == pytest.approx(0.4 / 2048, rel=0.02)


# -- decisions ------------------------------------------------------------------------------


def test_what_was_never_measured_is_loaded() -> None:
    assert kept(worth(), [1] * 8) == 8
    unpaced = worth(recompute_s=None)
    measure(unpaced, 1, 8, 1000.0)
    assert kept(unpaced, [1] * 8) == 8


def test_a_load_that_is_faster_than_computing_is_done_and_a_slower_one_is_not() -> None:
    fast, slow = worth(), worth()
    measure(fast, 1, 8, 8 * CHUNK_S * 0.9)
    measure(slow, 1, 8, 8 * CHUNK_S * 1.1)
    assert kept(fast, [1] * 8) == 8
    assert kept(slow, [1] * 8) == 0


def test_any_load_is_worth_it_with_an_infinite_margin() -> None:
    gate = worth(margin=math.inf)
    measure(gate, 1, 8, 1e6)
    assert kept(gate, [1] * 8) == 8


def test_a_queue_makes_a_load_not_worth_it() -> None:
    gate = worth()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.5)
    assert kept(gate, [1] * 8) == 8
    gate.sent(7, 1, 7)
    assert kept(gate, [1] * 8) == 8
    gate.sent(8, 1, 2)
    choice = choice_of(gate, [1] * 8)
    assert choice.kept == 0
    assert choice.queued_nbytes == 9 * CHUNK
    assert choice.load_s == pytest.approx(17 * CHUNK_S * 0.5)
    assert choice.recompute_s == pytest.approx(8 * CHUNK_S)


@pytest.mark.parametrize(
    ("busy", "worth_times"), [(0.0, 1.0), (0.25, 1.33), (0.5, 2.0), (0.75, 4.0), (1.0, 10.0)]
)
def test_an_engine_that_is_busy_makes_slower_loads_worth_it(
    busy: float, worth_times: float
) -> None:
    gate = worth()
    for second in range(600):
        gate.computed(1000, busy, float(second))
    measure(gate, 1, 8, 8 * CHUNK_S * worth_times * 0.97, now=599.0)
    assert kept(gate, [1] * 8, now=599.0) == 8
    measure(gate, 2, 8, 8 * CHUNK_S * worth_times * 1.04, now=599.0)
    assert kept(gate, [2] * 8, now=599.0) == 0
    measure(gate, 1, 8, 8 * CHUNK_S * 2, now=2000.0)
    assert kept(gate, [1] * 8, now=2000.0) == 0, "it has been idle for long"


def test_a_long_prefix_is_worth_a_start_up_time_that_a_short_one_is_not() -> None:
    gate = worth()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, CHUNK_S * (8 + chunks * 0.5), job=job)
    assert kept(gate, [1] * 8) == 0
    assert kept(gate, [1] * 24) == 24


def test_the_head_is_loaded_and_the_tail_computed_where_the_tail_is_in_a_slow_tier() -> None:
    gate = worth()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.1, job=1)
    measure(gate, 2, 8, 8 * CHUNK_S * 10, job=2)
    choice = choice_of(gate, [1, 1, 1, 1, 2, 2, 1, 1])
    assert choice.kept == 4
    assert choice.skipped == {1: 2, 2: 2}
    assert choice.tokens == 4 * TOKENS


def test_a_slow_chunk_is_loaded_for_the_sake_of_those_in_ram_behind_it() -> None:
    gate = worth()
    measure(gate, 2, 1, 3 * CHUNK_S)
    assert kept(gate, [2, 0, 0]) == 0
    assert kept(gate, [2, 0, 0, 0]) == 4


def test_chunks_in_ram_before_the_first_slow_one_are_always_loaded() -> None:
    gate = worth()
    measure(gate, 1, 1, 100.0)
    assert kept(gate, [0, 0, 0, 1, 1, 0]) == 3


def test_a_window_beside_the_prefix_saves_no_tokens_and_costs_its_bytes() -> None:
    gate = worth()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.8)
    assert gate.choose([1] * 14, counted=12, now=0.0) is None
    choice = gate.choose([1] * 24, counted=12, now=0.0)
    assert choice is not None
    assert choice.kept == 0
    assert choice.tokens == 12 * TOKENS
    gate.skip(choice)
    assert gate.figures().skipped_tokens[1] == 12 * TOKENS


def test_of_several_groups_all_is_loaded_or_nothing() -> None:
    gate = worth()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.1, job=1)
    measure(gate, 2, 8, 8 * CHUNK_S * 10, job=2)
    assert kept(gate, [1, 1, 1, 1, 1, 2], groups=2) == 0
    assert kept(gate, [1, 1, 1, 1, 1, 1], groups=2) == 6


def test_what_was_not_loaded_is_counted_by_tier() -> None:
    gate = worth()
    measure(gate, 1, 1, 100.0)
    choice = choice_of(gate, [0, 1, 1])
    gate.skip(choice)
    gate.skip(None)
    figures = gate.figures()
    assert figures.skipped_chunks == (0, 2, 0)
    assert figures.skipped_tokens == (0, 2 * TOKENS, 0)
    assert figures.last == choice


def test_a_slow_tier_is_tried_again_with_little_and_one_load_at_a_time() -> None:
    gate = worth()
    measure(gate, 1, 64, 64 * CHUNK_S * 4)
    assert kept(gate, [1] * 64, now=19.0) == 0
    assert kept(gate, [1] * 64, now=21.0) == 16
    gate.sent(9, 1, 16)
    assert kept(gate, [1] * 64, now=21.0) == 0
    result = TransferResult(9, [Outcome.DONE] * 16, seconds=16 * CHUNK_S * 0.1)
    gate.returned(result, timeout_s=10.0, now=22.0)
    gate.sent(10, 1, 16)
    result = TransferResult(10, [Outcome.DONE] * 16, seconds=16 * CHUNK_S * 0.1)
    gate.returned(result, timeout_s=10.0, now=22.0)
    for job in range(11, 20):
        measure(gate, 1, 16, 16 * CHUNK_S * 0.1, now=23.0, job=job)
    assert kept(gate, [1] * 64, now=23.0) == 64


def test_a_tier_is_tried_again_behind_one_that_is_fast() -> None:
    gate = worth()
    measure(gate, 2, 64, 64 * CHUNK_S * 4, job=1)
    measure(gate, 1, 64, 64 * CHUNK_S * 0.1, job=2, now=60.0)
    assert kept(gate, [1] * 64 + [2] * 64, now=60.0) == 64 + 16


def test_a_tier_known_by_its_deadline_only_is_tried_by_one_request_at_a_time() -> None:
    gate = worth(recompute_s=1.0)
    gate.sent(1, 1, 64)
    expire(gate, 1, 64)
    assert kept(gate, [0] * 4 + [1] * 32) == 4 + 16
    assert gate.plain_chunks(1) == 0
    gate.sent(2, 1, 16)
    assert kept(gate, [0] * 4 + [1] * 32) == 4
    gate.returned(TransferResult(2, [Outcome.DONE] * 16, seconds=1.0), timeout_s=10.0, now=0.0)
    assert kept(gate, [0] * 4 + [1] * 32) == 4 + 32
    assert gate.plain_chunks(1) > 32


def test_no_more_is_plain_than_arrives_in_time() -> None:
    gate = worth(recompute_s=1.0)
    assert gate.plain_chunks(1) == sys.maxsize
    measure(gate, 1, 10, 1.0)
    assert gate.plain_chunks(1) == 80
    assert kept(gate, [1] * 100) == 80
    assert choice_of(gate, [1] * 100).cause is SkipCause.LATE
    gate.sent(2, 1, 50)
    assert gate.plain_chunks(1) == 30
    gate.sent(3, 1, 30)
    assert gate.plain_chunks(1) == 0


@pytest.mark.parametrize("chunks", [8, 16, 2000])
def test_a_try_is_no_larger_for_several_groups(chunks: int) -> None:
    gate = worth()
    measure(gate, 1, 64, 64 * CHUNK_S * 4)
    assert kept(gate, [1] * chunks, groups=2) == 0
    assert kept(gate, [1] * chunks, groups=2, now=100.0) == min(chunks, 16)


def test_a_load_that_would_not_be_done_in_time_is_cut_to_what_is() -> None:
    gate = worth(recompute_s=1.0)
    measure(gate, 1, 8, 0.8)
    assert kept(gate, [1] * 100) == 80
    assert kept(gate, [1] * 100, groups=2) == 0
    assert kept(gate, [1] * 80, groups=2) == 80
    gate.sent(2, 1, 30)
    assert kept(gate, [1] * 100) == 50
    assert kept(gate, [2] * 40 + [1] * 100) == 90, "each tier has the time to itself"


# -- against a tier of its own ----------------------------------------------------------------

BIG_CHUNK = 2 << 20
BATCH = 256
TIMEOUT_S = 10.0


class SlowTier:
    """A tier that does one job after the other, each until its deadline, and what judges it.

    Args:
        s_per_byte: What it takes.
        recompute_s_per_byte: What computing takes instead.
    """

    def __init__(self, s_per_byte: float, recompute_s_per_byte: float) -> None:
        self._chunk_s = BIG_CHUNK * s_per_byte
        self.now = 0.0
        self._jobs = 0
        self.gate = LoadWorth(
            tiers=2,
            chunk_nbytes=BIG_CHUNK,
            chunk_tokens=TOKENS,
            recompute_s_per_token=recompute_s_per_byte * BIG_CHUNK / TOKENS,
        )

    def load(self, chunks: int) -> tuple[int, int, float]:
        """Load what is worth it; return the chunks kept, those that came and the wait."""
        wanted = kept(self.gate, [1] * chunks, now=self.now)
        jobs = [min(BATCH, wanted - at) for at in range(0, wanted, BATCH)]
        for job, size in enumerate(jobs, start=self._jobs):
            self.gate.sent(job, 1, size)
        free_s, arrived = 0.0, 0
        for job, size in enumerate(jobs, start=self._jobs):
            began_s, free_s = free_s, free_s + size * self._chunk_s
            if free_s <= TIMEOUT_S:
                result = TransferResult(
                    job,
                    [Outcome.DONE] * size,
                    queued_s=began_s,
                    seconds=size * self._chunk_s,
                )
                self.gate.returned(result, timeout_s=TIMEOUT_S, now=self.now + free_s)
                arrived += size
            else:
                ran = began_s < TIMEOUT_S
                expire(self.gate, job, size, ran=ran, now=self.now + TIMEOUT_S)
        self._jobs += len(jobs)
        waited_s = min(free_s, TIMEOUT_S)
        self.now += max(free_s, TIMEOUT_S)
        return wanted, arrived, waited_s

    def ns_per_byte(self) -> float:
        price = self.gate.figures().prices[1]
        assert price is not None
        return price.seconds(10**9)


def test_a_tier_slower_than_computing_is_found_out_although_most_jobs_expire() -> None:
    tier = SlowTier(10e-9, 6.1e-9)
    assert tier.load(2048) == (2048, 256, TIMEOUT_S)
    assert tier.ns_per_byte() == pytest.approx(10.0)
    for _ in range(6):
        wanted, arrived, waited_s = tier.load(2048)
        assert wanted == arrived <= 8, "it is tried at most"
        assert waited_s < 0.2
    assert tier.ns_per_byte() == pytest.approx(10.0)


def test_what_is_kept_of_a_long_prefix_on_a_slow_tier_arrives() -> None:
    tier = SlowTier(10e-9, 20e-9)
    tier.load(2048)
    for _ in range(6):
        wanted, arrived, waited_s = tier.load(2048)
        assert 256 < wanted == arrived
        assert waited_s < TIMEOUT_S
    assert tier.ns_per_byte() == pytest.approx(10.0)


@pytest.mark.parametrize("ns_per_byte", [20, 50, 100, 400])
def test_a_tier_that_never_finished_a_job_is_given_a_small_one_first(
    ns_per_byte: int,
) -> None:
    tier = SlowTier(ns_per_byte * 1e-9, 4 * ns_per_byte * 1e-9)
    assert tier.load(2048) == (2048, 0, TIMEOUT_S)
    assert tier.load(2048)[:2] == (8, 8)
    for _ in range(10):
        wanted, arrived, _ = tier.load(2048)
        assert wanted == arrived > 0
    assert tier.ns_per_byte() == pytest.approx(ns_per_byte, rel=0.01)


# -- properties -----------------------------------------------------------------------------

LOADS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 64), st.floats(1e-6, 100.0)), max_size=8
)
SOURCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def measured(
    loads: Sequence[tuple[int, int, float]], *, slower: int = 0, times: float = 1.0
) -> LoadWorth:
    gate = worth()
    for job, (tier, chunks, seconds) in enumerate(loads):
        measure(gate, tier, chunks, seconds * (times if tier == slower else 1.0), job=job)
    return gate


@given(
    loads=LOADS,
    sources=SOURCES,
    slower=st.integers(1, 2),
    times=st.floats(1.0, 1e3),
    queued=st.integers(0, 64),
)
def test_a_slower_tier_never_makes_more_be_loaded(
    loads: list[tuple[int, int, float]],
    sources: list[int],
    slower: int,
    times: float,
    queued: int,
) -> None:
    before, after = measured(loads), measured(loads, slower=slower, times=times * (1 + 1e-9))
    for gate in (before, after):
        gate.sent(100, slower, queued)
    assert kept(after, sources) <= kept(before, sources)


@given(loads=LOADS, sources=SOURCES, queued=st.integers(0, 64), more=st.integers(0, 64))
def test_a_longer_queue_never_makes_more_be_loaded(
    loads: list[tuple[int, int, float]], sources: list[int], queued: int, more: int
) -> None:
    before, after = measured(loads), measured(loads)
    for gate, chunks in ((before, queued), (after, queued + more)):
        for tier in (1, 2):
            gate.sent(100 + tier, tier, chunks)
    assert kept(after, sources) <= kept(before, sources)


@given(loads=LOADS, sources=SOURCES)
def test_every_tier_is_tried_again_in_the_end(
    loads: list[tuple[int, int, float]], sources: list[int]
) -> None:
    gate = measured(loads)
    slow = sum(map(bool, sources))
    loaded = sum(map(bool, sources[: kept(gate, sources, now=1000.0)]))
    assert loaded >= min(slow, 1)


@given(loads=LOADS, sources=SOURCES, now=st.floats(0, 1e4))
def test_a_choice_keeps_a_head_and_accounts_for_the_rest(
    loads: list[tuple[int, int, float]], sources: list[int], now: float
) -> None:
    choice = measured(loads).choose(sources, counted=len(sources), now=now)
    if choice is None:
        return
    assert 0 <= choice.kept < len(sources)
    tail = sources[choice.kept :]
    assert choice.skipped == {tier: tail.count(tier) for tier in {*tail} - {0}}
    assert choice.tokens == len(tail) * TOKENS
    leading = next((at for at, tier in enumerate(sources) if tier), len(sources))
    assert choice.kept >= leading, "what is in RAM costs nothing"


# -- in the manager -------------------------------------------------------------------------


def slow_bench(*, ram: int = 16, seconds: float = 1.0) -> Workbench:
    """A ladder whose disk was seen to take ``seconds`` for a chunk, and that holds a prompt."""
    bench = Workbench(
        ram,
        64,
        worth=worth(),
        limits=ManagerLimits(pin_budget=ram, reserve=0.0, queue=1024),
    )
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(8))])
    bench.manager.recover(1, [(prefix(1, of=9)[0], 60)])
    bench.look(prefix(1, of=9), "probe")
    for job in bench.step():
        finish_in(bench, job, seconds)
    bench.manager.end_request("probe")
    return bench


def finish_in(bench: Workbench, job: Job, seconds: float) -> None:
    done = [Outcome.DONE] * len(job.keys)
    bench.manager.apply(TransferResult(job.job_id, done, seconds=seconds))
    bench.check()


def test_a_prefix_on_a_slow_disk_is_a_miss_at_the_second_lookup() -> None:
    bench = slow_bench()
    assert bench.look(prefix(8)) == [Lookup.PENDING] * 8
    assert bench.step() == []
    assert bench.look(prefix(8)) == [Lookup.MISS]
    snapshot = bench.manager.snapshot()
    assert snapshot.worth.skipped_chunks[1] == 8
    assert (snapshot.granted, snapshot.waiting) == (0, 0)


def test_a_prefix_on_a_fast_disk_is_brought_up() -> None:
    bench = slow_bench(seconds=CHUNK_S / 10)
    bench.look(prefix(8))
    (job,) = bench.step()
    assert len(job.keys) == 8
    assert bench.manager.snapshot().worth.skipped_chunks[1] == 0


def test_what_a_window_costs_is_weighed_against_the_tokens_of_the_prefix() -> None:
    bench = slow_bench(seconds=CHUNK_S * 0.7)
    window = prefix(2, group=1)
    bench.manager.recover(1, [(key, 40 + at) for at, key in enumerate(window)])
    bench.look([*prefix(8), *window])
    assert sum(len(job.keys) for job in bench.step()) == 10


def test_the_part_in_ram_is_loaded_and_the_part_on_a_slow_disk_is_not() -> None:
    bench = slow_bench()
    bench.store(prefix(3))
    bench.settle()
    bench.look(prefix(8))
    assert bench.step() == []
    assert bench.look(prefix(8)) == [Lookup.HIT] * 3 + [Lookup.MISS]
    assert bench.manager.snapshot().worth.skipped_chunks[1] == 5


def test_a_request_that_waits_for_room_is_counted_once() -> None:
    bench = slow_bench(ram=4, seconds=CHUNK_S * 2)
    bench.look(prefix(8))
    for _ in range(5):
        bench.step()
    bench.look(prefix(8))
    assert bench.manager.snapshot().worth.skipped_chunks[1] == 8


def test_a_reset_forgets_what_is_on_its_way_and_keeps_the_estimates() -> None:
    bench = slow_bench(seconds=CHUNK_S / 10)
    bench.look(prefix(8))
    bench.manager.end_step()
    bench.manager.reset()
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(8, of=3))])
    before = bench.manager.snapshot().worth.prices[1]
    assert before is not None
    bench.look(prefix(8, of=3), "other")
    (job,) = bench.step()
    assert len(job.keys) == 8
