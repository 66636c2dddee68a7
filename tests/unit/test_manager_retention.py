"""Keeping chunks in RAM until a deadline, within a quota."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.manager import ManagerLimits
from kvtier.policies import TieredPlacement
from tests.support.workbench import Workbench, prefix


def keeping(*capacities: int, quota: int, max_store_refusals: int = 16) -> Workbench:
    limits = ManagerLimits(
        pin_budget=8,
        reserve=0.0,
        queue=64,
        retained=quota,
        max_queue_steps=1,
        max_store_refusals=max_store_refusals,
    )
    return Workbench(*capacities, limits=limits)


def end_step(bench: Workbench, now: float) -> None:
    bench.manager.end_step(now=now)
    bench.check()


def test_a_retained_chunk_outlives_what_was_used_later() -> None:
    bench = keeping(3, quota=1)
    bench.store(prefix(1))
    assert bench.manager.retain(prefix(1), 10.0) == 1
    for prompt in range(1, 5):
        bench.store(prefix(1, of=prompt))
    assert prefix(1)[0] in bench.resident()
    assert bench.manager.snapshot().retained == 1


def test_a_chunk_is_evictable_after_its_deadline() -> None:
    bench = keeping(1, quota=1)
    bench.store(prefix(1))
    bench.manager.retain(prefix(1), 10.0)
    end_step(bench, 9.9)
    assert bench.ram.available == 0
    end_step(bench, 10.0)
    assert (bench.ram.available, bench.manager.snapshot().retained) == (1, 0)


def test_a_deadline_is_put_off_and_never_brought_forward() -> None:
    bench = keeping(1, quota=1)
    bench.store(prefix(1))
    for until in (10.0, 30.0, 20.0):
        assert bench.manager.retain(prefix(1), until) == 1
    end_step(bench, 29.0)
    assert bench.ram.available == 0
    end_step(bench, 30.0)
    assert bench.ram.available == 1


def test_beyond_the_quota_the_tail_is_refused_and_counted() -> None:
    bench = keeping(4, quota=2)
    bench.store(prefix(3))
    assert bench.manager.retain(prefix(3), 10.0) == 2
    assert bench.ram.counters.unretained == 1
    assert bench.manager.retain(prefix(2), 20.0) == 2, "what is kept may be kept longer"
    bench.store(prefix(2, of=1))
    assert {*prefix(2)} <= bench.resident()


def test_without_a_quota_nothing_is_retained() -> None:
    bench = keeping(2, quota=0)
    bench.store(prefix(1))
    assert bench.manager.retain(prefix(1), 10.0) == 0
    assert bench.ram.available == 2


def test_only_whole_chunks_in_ram_are_retained() -> None:
    bench = keeping(2, 4, quota=2)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.manager.prepare_store(prefix(1, of=1), "writer")
    assert bench.manager.retain([*prefix(1), *prefix(1, of=1), *prefix(1, of=2)], 9.0) == 0
    assert bench.ram.counters.unretained == 0


def test_a_store_waits_before_it_takes_what_is_retained_the_earliest_deadline_first() -> None:
    bench = keeping(3, quota=3, max_store_refusals=1)
    bench.store(prefix(3))
    for key, until in zip(prefix(3), (30.0, 10.0, 20.0), strict=True):
        bench.manager.retain([key], until)
    bench.manager.begin_request("w")
    assert bench.store(prefix(2, of=1), "w") is None
    assert bench.manager.snapshot().retained == 3
    assert bench.store(prefix(2, of=1), "w") is not None
    assert bench.resident() == {prefix(1)[0], *prefix(2, of=1)}
    assert bench.ram.counters.unretained == 2


def test_a_promotion_that_waited_its_turn_takes_what_is_retained() -> None:
    bench = keeping(1, 4, quota=1)
    bench.store(prefix(1))
    bench.settle()
    bench.manager.retain(prefix(1), 1e9)
    bench.manager.recover(1, [(prefix(1, of=1)[0], 3)])
    bench.look(prefix(1, of=1))
    bench.settle()
    assert bench.look(prefix(1, of=1)) == 1
    assert bench.ram.counters.unretained == 1


def test_a_reset_forgets_what_was_retained() -> None:
    bench = keeping(2, quota=2)
    bench.store(prefix(2))
    bench.manager.retain(prefix(2), 1e9)
    bench.manager.reset()
    bench.step()
    assert (bench.ram.slots.free, bench.manager.snapshot().retained) == (2, 0)


@given(
    quota=st.integers(0, 6),
    actions=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 9)), max_size=60
    ),
)
def test_no_pin_is_left_when_every_deadline_has_passed(
    quota: int, actions: list[tuple[int, int, int]]
) -> None:
    bench = keeping(6, quota=quota, max_store_refusals=0)
    now = 0.0
    for prompt, chunks, seconds in actions:
        bench.store(prefix(chunks, of=prompt))
        bench.manager.retain(prefix(chunks, of=prompt), now + seconds)
        bench.check()
        now += seconds / 3
        end_step(bench, now)
    end_step(bench, now + 10)
    assert bench.manager.snapshot().retained == 0
    assert bench.ram.idle == len(bench.resident())


def test_retained_chunks_stay_when_only_their_own_prompt_needs_room() -> None:
    bench = keeping(2, quota=2, max_store_refusals=0)
    bench.store(prefix(2))
    bench.manager.retain(prefix(2), 10.0)
    assert bench.store(prefix(3)) is not None
    assert (bench.ram.counters.refused, bench.ram.counters.unretained) == (1, 0)
    assert bench.manager.snapshot().retained == 2


def recovered_and_retained(bench: Workbench, chunks: int, *, until: float) -> None:
    """Let a slower tier have the chunks of a prefix, the first of which are retained."""
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(4))])
    bench.manager.retain_recovered(1, dict.fromkeys(range(chunks), until))
    bench.check()


def test_recovered_retained_chunks_outlive_later_demotions() -> None:
    bench = keeping(4, 4, quota=0)
    recovered_and_retained(bench, 2, until=10.0)
    for prompt in range(1, 5):
        bench.store(prefix(2, of=prompt))
        bench.settle()
    assert {*prefix(2)} <= bench.resident(1)
    assert not {*prefix(4)[2:]} & bench.resident(1)
    end_step(bench, 10.0)
    for prompt in range(5, 8):
        bench.store(prefix(2, of=prompt))
        bench.settle()
    assert not {*prefix(2)} & bench.resident(1)


def test_a_retained_chunk_is_promoted_as_a_copy_where_others_are_moved() -> None:
    moving = TieredPlacement(2, write="evict", promote="move")
    bench = Workbench(4, 4, placement=moving)
    recovered_and_retained(bench, 2, until=10.0)
    assert bench.look(prefix(4)) is None
    bench.settle()
    assert bench.look(prefix(4)) == 4
    assert bench.resident(1) == {*prefix(2)}


def test_a_reset_retains_nothing() -> None:
    bench = keeping(4, 4, quota=0)
    recovered_and_retained(bench, 4, until=10.0)
    bench.manager.reset()
    bench.check()
    assert not bench.resident(1)
    assert bench.tiers[1].available == 4


def test_slots_without_a_chunk_are_not_retained() -> None:
    bench = keeping(4, 4, quota=0)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.manager.retain_recovered(1, {3: 10.0})
    bench.check()
    assert bench.tiers[1].available == 4
