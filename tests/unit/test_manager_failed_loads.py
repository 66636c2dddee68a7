"""A load that did not work: its chunks leave, its request asks for no more, nothing leaks."""

from __future__ import annotations

from kvtier.manager import ManagerLimits
from tests.support.workbench import Workbench, prefix


def loading(bench: Workbench, *, chunks: int = 3, fails: int = 1) -> None:
    """Store a prefix, let "reader" load it, and let a worker fail at chunk ``fails``."""
    bench.store(prefix(chunks))
    bench.settle()
    assert bench.look(prefix(chunks)) == chunks
    plan = bench.manager.prepare_load(prefix(chunks), "reader")
    bench.step(started=["reader"])
    bench.slot_status.not_loaded = {plan.slots[fails]}


def test_a_chunk_that_a_worker_could_not_load_leaves_ram_and_the_rest_stays() -> None:
    bench = Workbench(4, 0)
    loading(bench)
    bench.manager.complete_load("reader")
    bench.check()
    first, second, third = prefix(3)
    assert bench.resident() == {first, third}
    assert bench.ram.counters.load_failed == 1
    assert bench.ram.available == 4
    events = [(event.removed, *event.keys) for event in bench.manager.take_events()]
    assert events[-1] == (True, second)


def test_the_request_is_answered_miss_until_it_ends_and_others_are_not() -> None:
    bench = Workbench(4, 8)
    loading(bench)
    bench.manager.complete_load("reader")
    assert bench.look(prefix(3)) == 0
    bench.step(preempted=["reader"])
    assert bench.look(prefix(3)) == 0
    assert bench.step() == []
    # The copy on the disk is whole: another request has it brought up.
    assert bench.look(prefix(3), "other") is None
    bench.manager.end_request("reader")
    assert bench.look(prefix(3)) is None


def test_chunks_offered_after_a_failed_load_begin_at_the_root_again() -> None:
    bench = Workbench(4, 0)
    loading(bench, chunks=2, fails=0)
    bench.manager.complete_load("reader")
    bench.store(prefix(2), "reader")
    first = bench.ram.copies[prefix(1)[0]]
    assert (first.depth, first.parent) == (0, None)


def test_a_request_that_ended_meanwhile_is_forgotten_and_its_chunk_dropped_all_the_same() -> (
    None
):
    bench = Workbench(4, 0)
    loading(bench)
    bench.manager.end_request("reader")
    assert bench.ram.available == 1
    bench.manager.complete_load("reader")
    bench.check()
    assert len(bench.resident()) == 2
    assert bench.ram.available == 4
    assert bench.look(prefix(1), "reader") == 1


def test_a_chunk_that_was_granted_to_others_is_a_miss_for_them() -> None:
    bench = Workbench(
        4, 8, limits=ManagerLimits(pin_budget=4, reserve=0.0, queue=8, retained=2)
    )
    bench.store(prefix(2))
    bench.settle()
    bench.store(prefix(4, of=1), "w")
    bench.settle()
    bench.look(prefix(2), "waits")
    bench.settle()
    assert bench.manager.snapshot().granted == 2
    assert bench.manager.retain(prefix(2), 1e9) == 2
    plan = bench.manager.prepare_load(prefix(2), "reader")
    bench.slot_status.not_loaded = set(plan.slots)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.manager.snapshot().granted == 0
    assert bench.manager.snapshot().retained == 0
    assert bench.look(prefix(2), "waits") == 0


def test_a_chunk_loaded_by_two_leaves_once_and_its_slot_waits_for_both() -> None:
    bench = Workbench(2, 0)
    loading(bench, chunks=2)
    bench.manager.prepare_load(prefix(2), "second")
    bench.manager.complete_load("reader")
    assert bench.resident() == {prefix(1)[0]}
    assert bench.ram.slots.free == 0
    bench.manager.complete_load("second")
    bench.check()
    assert bench.ram.slots.free == 1


def test_a_load_ends_with_its_own_pins_although_its_chunk_came_back_meanwhile() -> None:
    bench = Workbench(3)
    loading(bench, chunks=1, fails=0)
    bench.manager.prepare_load(prefix(1), "second")
    bench.manager.complete_load("reader")
    # Gone for the second load as well; a third request stores it afresh and loads that.
    bench.slot_status.not_loaded = set()
    bench.store(prefix(1), "writer")
    bench.manager.prepare_load(prefix(1), "third")
    bench.manager.complete_load("second")
    bench.check()
    (copy,) = bench.ram.copies.values()
    assert copy.pins == 1
    bench.manager.complete_load("third")
    assert copy.pins == 0


def test_after_a_reset_a_failed_load_of_an_earlier_epoch_is_ignored() -> None:
    bench = Workbench(4, 0)
    loading(bench)
    bench.manager.reset()
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.ram.counters.load_failed == 0
    bench.step()
    assert bench.ram.slots.free == 4


def hits(bench: Workbench) -> list[tuple[int, int]]:
    """Return each tier's hits, all and those of the counting group."""
    return [(tier.counters.hits, tier.counters.prompt_hits) for tier in bench.tiers]


def test_only_what_came_before_the_failure_was_a_hit() -> None:
    bench = Workbench(4, 0)
    loading(bench)
    assert hits(bench) == [(0, 0), (0, 0)], "what is on its way may fail"
    bench.manager.complete_load("reader")
    assert hits(bench) == [(1, 1), (0, 0)]
    bench.slot_status.not_loaded = set()
    bench.load(prefix(1), "other")
    assert hits(bench) == [(2, 2), (0, 0)]


def test_with_several_groups_a_load_that_fails_hits_nothing() -> None:
    bench = Workbench(8, 0)
    keys = [*prefix(2), *prefix(2, group=1)]
    bench.store(keys)
    bench.load(keys, "lucky")
    assert hits(bench) == [(4, 2), (0, 0)]
    plan = bench.manager.prepare_load(keys, "reader")
    bench.slot_status.not_loaded = {plan.slots[3]}
    bench.manager.complete_load("reader")
    assert hits(bench) == [(4, 2), (0, 0)]


def test_a_load_counts_for_the_tiers_it_was_planned_from() -> None:
    bench = Workbench(8, 8)
    bench.manager.recover(1, zip(prefix(2), range(2), strict=True))
    bench.look(prefix(2), "first")
    bench.settle()
    bench.store(prefix(3), "writer")
    bench.manager.prepare_load(prefix(3), "first")
    bench.manager.prepare_load(prefix(3), "second")
    bench.manager.complete_load("second")
    bench.manager.complete_load("first")
    assert hits(bench) == [(2, 2), (4, 4)]
