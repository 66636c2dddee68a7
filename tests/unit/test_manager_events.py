"""Whoever replays the events knows what each tier has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits, ResidencyEvent
from kvtier.manager.reports import EventLog
from kvtier.policies import TieredPlacement
from kvtier.types import Outcome
from tests.support.workbench import Workbench, prefix


class Listener:
    """Somebody who only hears the events."""

    def __init__(self, tiers: int) -> None:
        self.tiers: list[set[ChunkKey]] = [set() for _ in range(tiers)]
        self.heard: list[ResidencyEvent] = []

    def hear(self, bench: Workbench) -> None:
        """Take every event, and compare what they come to with what the tiers hold."""
        while bench.manager.has_events:
            events = bench.manager.take_events()
            assert events
            self.follow(events)
        for tier, listed in zip(bench.tiers, self.tiers, strict=True):
            assert listed == bench.resident(tier.index), tier.name

    def follow(self, events: Iterable[ResidencyEvent]) -> None:
        for event in events:
            self.heard.append(event)
            listed, keys = self.tiers[event.tier], set(event.keys)
            assert len(keys) == len(event.keys) > 0
            if event.removed:
                assert keys <= listed, "what was not there cannot leave"
                listed -= keys
            else:
                assert not keys & listed, "what is there cannot arrive"
                listed |= keys


def recovered(bench: Workbench, chunks: int, *, of: int = 0, tier: int = 1) -> list[ChunkKey]:
    keys = prefix(chunks, of=of)
    bench.manager.recover(tier, [(key, slot) for slot, key in enumerate(keys)])
    return keys


def test_recovered_chunks_are_announced_in_their_order() -> None:
    bench, listener = Workbench(4, 8, 8), Listener(3)
    near = recovered(bench, 3)
    far = recovered(bench, 2, of=1, tier=2)
    listener.hear(bench)
    assert listener.heard == [ResidencyEvent(1, near, False), ResidencyEvent(2, far, False)]


def test_a_victim_leaves_before_what_takes_its_place_arrives() -> None:
    bench, listener = Workbench(2, 2), Listener(2)
    for prompt in range(3):
        bench.store(prefix(2, of=prompt), f"w{prompt}")
        bench.settle()
    listener.hear(bench)
    slots = [2, 2]
    for event in listener.heard:
        slots[event.tier] += len(event.keys) if event.removed else -len(event.keys)
        assert min(slots) >= 0, "more chunks than slots"


def test_a_store_is_announced_when_it_is_whole_and_a_failed_one_never() -> None:
    bench, listener = Workbench(4, 8), Listener(2)
    plan = bench.manager.prepare_store(prefix(3), "w")
    assert plan is not None
    assert not bench.manager.has_events
    bench.slot_status.not_stored = {plan.slots[2]}
    bench.manager.complete_store(set(plan.keys))
    listener.hear(bench)
    assert listener.tiers[0] == set(prefix(2))


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.DONE])
def test_a_demotion_that_failed_is_never_announced(outcome: Outcome) -> None:
    bench, listener = Workbench(4, 8), Listener(2)
    bench.store(prefix(2))
    for job in bench.step():
        bench.finish(job, Outcome.DONE, outcome)
    listener.hear(bench)
    assert listener.tiers == [set(prefix(2)), set(prefix(1))]


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED, Outcome.EXPIRED])
def test_a_corrupt_chunk_leaves_its_tier(outcome: Outcome) -> None:
    bench, listener = Workbench(4, 8), Listener(2)
    recovered(bench, 2)
    bench.look(prefix(2))
    for job in bench.step():
        bench.finish(job, Outcome.DONE, outcome)
    listener.hear(bench)
    damaged = set() if outcome is Outcome.CORRUPT else {prefix(2)[1]}
    assert listener.tiers == [set(prefix(1)), set(prefix(1)) | damaged]


def test_a_moved_chunk_is_announced_as_removed_from_the_slower_tier() -> None:
    bench = Workbench(4, 8, placement=TieredPlacement(tiers=2, write="evict", promote="move"))
    listener = Listener(2)
    recovered(bench, 1)
    bench.look(prefix(1))
    for job in bench.step():
        bench.finish(job)
    listener.hear(bench)
    assert listener.tiers == [set(prefix(1)), set()]


def test_a_reset_announces_that_everything_left_and_late_jobs_change_nothing() -> None:
    bench, listener = Workbench(4, 8), Listener(2)
    recovered(bench, 2)
    bench.store(prefix(2, of=1))
    bench.look(prefix(2))
    jobs = bench.step()
    assert jobs
    bench.manager.reset()
    listener.hear(bench)
    assert listener.tiers == [set(), set()]
    for job in jobs:
        bench.finish(job)
    listener.hear(bench)
    bench.manager.take_corrupt()
    bench.store(prefix(2, of=1))
    bench.settle()
    listener.hear(bench)
    assert listener.tiers[1] == set(prefix(2, of=1))


def test_events_are_not_kept_without_a_listener() -> None:
    silent = Workbench(3, 3, record_events=False)
    silent.store(prefix(3))
    silent.settle()
    assert not silent.manager.has_events
    log = EventLog(has_listener=False)
    log.add(0, prefix(2), removed=False)
    assert not log
    assert log.take() == []


def test_events_in_a_row_are_one_and_kinds_are_kept_apart() -> None:
    log = EventLog(has_listener=True)
    a, b, c, d = prefix(4)
    log.add(1, [a], removed=True)
    log.add(1, [b], removed=True)
    log.add(1, [], removed=False)
    log.add(0, [c], removed=True)
    log.add(0, [d], removed=False)
    assert log.take() == [
        ResidencyEvent(1, [a, b], True),
        ResidencyEvent(0, [c], True),
        ResidencyEvent(0, [d], False),
    ]


def test_a_million_chunks_come_in_small_events_a_few_at_a_time() -> None:
    keys = [number.to_bytes(8, "big") for number in range(100_000)]
    log = EventLog(has_listener=True)
    log.add(1, keys, removed=False)
    log.add(1, keys, removed=True)
    batches = []
    while log:
        batches.append(log.take())
    assert max(len(event.keys) for batch in batches for event in batch) <= 1024
    assert max(sum(len(event.keys) for event in batch) for batch in batches) < 10_000
    assert [key for batch in batches for event in batch for key in event.keys] == keys + keys


def test_later_changes_of_the_callers_list_change_no_event() -> None:
    log, keys = EventLog(has_listener=True), prefix(2)
    log.add(0, keys, removed=False)
    keys.clear()
    assert log.take() == [ResidencyEvent(0, prefix(2), False)]


ACTIONS: dict[str, Callable[[Workbench, int, Outcome], None]] = {}


def action(function: Callable[[Workbench, int, Outcome], None]) -> None:
    ACTIONS[function.__name__] = function


@action
def store(bench: Workbench, prompt: int, outcome: Outcome) -> None:
    bench.store(prefix(3, of=prompt), f"w{prompt}")


@action
def load(bench: Workbench, prompt: int, outcome: Outcome) -> None:
    keys = prefix(3, of=prompt)
    hits = bench.look(keys, f"r{prompt}")
    if hits:
        bench.load(keys[:hits], f"r{prompt}")
        bench.manager.end_request(f"r{prompt}")


@action
def step(bench: Workbench, prompt: int, outcome: Outcome) -> None:
    for job in bench.step():
        bench.finish(job, outcome)
    bench.manager.take_corrupt()


@action
def slow_step(bench: Workbench, prompt: int, outcome: Outcome) -> None:
    for job in bench.step():
        bench.finish(job, Outcome.EXPIRED, settled=False)
        bench.finish(job, outcome)


@action
def reset(bench: Workbench, prompt: int, outcome: Outcome) -> None:
    bench.manager.reset()


@given(
    warm=st.integers(0, 4),
    write=st.sampled_from(["through", "evict"]),
    done=st.lists(
        st.tuples(
            st.sampled_from(sorted(ACTIONS)), st.integers(0, 4), st.sampled_from(Outcome)
        ),
        max_size=30,
    ),
)
def test_the_events_come_to_what_is_resident_whatever_happens(
    warm: int, write: str, done: list[tuple[str, int, Outcome]]
) -> None:
    limits = ManagerLimits(pin_budget=4, reserve=0.25, queue=1024)
    bench = Workbench(4, 6, 6, write="evict" if write == "evict" else "through", limits=limits)
    listener = Listener(3)
    recovered(bench, warm, of=4)
    listener.hear(bench)
    for name, prompt, outcome in done:
        ACTIONS[name](bench, prompt, outcome)
        listener.hear(bench)
