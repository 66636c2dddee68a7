"""Storing into RAM and loading from it."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.keys import ChunkKey, make_key
from kvtier.manager import ManagerLimits, ResidencyEvent
from kvtier.types import Outcome
from tests.support.invariants import check_manager
from tests.support.workbench import Workbench, prefix


def impatient(**limits: Any) -> ManagerLimits:
    return ManagerLimits(**{"pin_budget": 8, "reserve": 0.0, "queue": 64, **limits})


def test_a_store_that_finds_no_room_at_all_leaves_nothing_behind() -> None:
    bench = Workbench(2, limits=impatient(max_store_refusals=0))
    bench.store(prefix(2), "a")
    bench.look(prefix(2), "b")
    bench.manager.prepare_load(prefix(2), "b")
    plan = bench.manager.prepare_store(prefix(2, of=1), "c")
    assert plan is not None
    assert plan.keys == ()
    check_manager(bench.manager)


def test_a_chunk_is_a_hit_once_its_store_is_complete_and_not_before() -> None:
    bench = Workbench(4, 0)
    plan = bench.manager.prepare_store(prefix(2), "a")
    assert plan is not None
    assert (plan.keys, plan.slots, plan.evicted) == (prefix(2), [0, 1], [])
    assert bench.look(prefix(2), "b") is None
    bench.manager.complete_store(set(plan.keys))
    assert bench.look(prefix(3), "c") == 2


def test_a_store_that_the_workers_did_not_finish_is_a_miss() -> None:
    bench = Workbench(4, 0)
    bench.slot_status.not_stored = {1}
    bench.store(prefix(3))
    assert bench.look(prefix(3)) == 1
    assert bench.resident() == {prefix(3)[0], prefix(3)[2]}
    assert (bench.ram.counters.failed, bench.ram.slots.free) == (1, 2)


def test_a_request_that_waits_for_another_ones_store_gets_its_outcome() -> None:
    bench = Workbench(4, 0)
    plan = bench.manager.prepare_store(prefix(2), "a")
    assert plan is not None
    bench.look(prefix(2), "b")
    bench.step()
    assert bench.manager.snapshot().waiting == 1
    bench.slot_status.not_stored = {plan.slots[1]}
    bench.manager.complete_store(set(plan.keys))
    assert bench.look(prefix(2), "b") == 1
    assert bench.manager.snapshot().granted == 1
    bench.manager.end_request("b")
    assert bench.manager.snapshot().granted == 0


def test_completing_a_store_that_is_not_in_flight_is_ignored() -> None:
    bench = Workbench(4, 0)
    bench.store(prefix(1))
    bench.manager.complete_store(prefix(2))
    bench.manager.complete_load("a")
    assert bench.resident() == {*prefix(1)}


def test_the_deepest_chunks_make_room_and_are_announced_first() -> None:
    bench = Workbench(3, 0)
    bench.store(prefix(3))
    bench.settle()
    plan = bench.store(prefix(2, of=1), "b")
    assert plan is not None
    assert plan.evicted == prefix(3)[:0:-1]
    assert bench.manager.take_events() == [
        ResidencyEvent(0, prefix(3), removed=False),
        ResidencyEvent(0, prefix(3)[:0:-1], removed=True),
        ResidencyEvent(0, prefix(2, of=1), removed=False),
    ]
    assert bench.manager.take_events() == []


def test_a_loading_chunk_is_no_victim_until_the_load_is_complete() -> None:
    bench = Workbench(2, 0)
    bench.store(prefix(2))
    bench.settle()
    bench.manager.begin_request("b")
    plan = bench.manager.prepare_load(prefix(1), "a")
    assert (list(plan.slots), len(plan.generations)) == ([0], 1)
    assert bench.manager.prepare_store(prefix(2, of=1), "b") is None
    bench.manager.complete_load("a")
    assert bench.manager.prepare_store(prefix(2, of=1), "b") is not None


def test_two_loads_of_one_chunk_are_two_pins() -> None:
    bench = Workbench(1, 0)
    bench.store(prefix(1))
    bench.settle()
    for _ in range(2):
        bench.manager.prepare_load(prefix(1), "a")
    bench.manager.complete_load("a")
    assert bench.ram.available == 0
    bench.manager.complete_load("a")
    assert bench.ram.available == 1


def test_loads_of_one_request_id_are_completed_by_their_own_ids() -> None:
    bench = Workbench(2, 0)
    bench.store(prefix(1))
    bench.store(prefix(1, of=1))
    bench.settle()
    bench.manager.begin_request("a")
    first = bench.manager.prepare_load(prefix(1), "a")
    bench.manager.end_request("a")
    bench.manager.begin_request("a")
    second = bench.manager.prepare_load(prefix(1, of=1), "a")
    bench.slot_status.not_loaded = {first.slots[0]}
    bench.manager.complete_load("a", second.load_id)
    assert bench.resident() == {*prefix(1), *prefix(1, of=1)}
    assert bench.ram.available == 1, "the first load keeps its pin"
    bench.manager.complete_load("a", second.load_id)
    assert bench.ram.available == 1, "the second load ended before"
    bench.manager.complete_load("a", first.load_id)
    assert bench.resident() == {*prefix(1, of=1)}
    assert bench.ram.available == 2
    assert bench.look(prefix(1, of=1), "a") == 1, "the load of the former request failed"
    bench.check()


def test_loading_what_is_not_there_is_an_error_and_pins_nothing() -> None:
    bench = Workbench(4, 0)
    bench.store(prefix(1))
    bench.manager.prepare_store(prefix(1, of=1), "w")
    with pytest.raises(KeyError):
        bench.manager.prepare_load([*prefix(1), *prefix(1, of=2)], "a")
    with pytest.raises(KeyError):
        bench.manager.prepare_load([*prefix(1), *prefix(1, of=1)], "a")
    assert bench.ram.copies[prefix(1)[0]].hits == 0


def test_the_generation_of_a_load_is_the_generation_of_the_store() -> None:
    bench = Workbench(4, 0)
    first, second = bench.store(prefix(2)), bench.store(prefix(3))
    assert first is not None
    assert second is not None
    plan = bench.load(prefix(3))
    assert list(plan.generations) == [first.generation, first.generation, second.generation]


def test_nothing_new_is_an_empty_plan_and_counts_as_a_use() -> None:
    bench = Workbench(2, 0)
    bench.store(prefix(1))
    bench.store(prefix(1, of=1))
    bench.settle()
    plan = bench.store(prefix(1))
    assert plan is not None
    assert plan.keys == ()
    bench.store(prefix(1, of=2))
    assert bench.resident() == {*prefix(1), *prefix(1, of=2)}


def crowded() -> Workbench:
    """Return tiers with one free slot in RAM, where request "a" is refused twice at most."""
    bench = Workbench(2, 0, limits=impatient(max_store_refusals=2))
    bench.store(prefix(1))
    bench.settle()
    bench.manager.prepare_load(prefix(1), "reader")
    bench.manager.begin_request("a")
    return bench


def test_no_room_now_is_none_a_bounded_number_of_times_and_changes_nothing() -> None:
    bench = crowded()
    new = prefix(2, of=1)
    assert [bench.manager.prepare_store(new, "a") for _ in range(2)] == [None, None]
    plan = bench.store(new, "a")
    assert plan is not None
    assert plan.keys == new[:1], "the tail is refused, for it is useless without its head"
    assert bench.ram.counters.refused == 1


def test_the_last_offer_of_a_request_is_cut_at_once_and_the_rest_counted() -> None:
    bench = crowded()
    new = prefix(2, of=1)
    assert bench.manager.prepare_store(new, "a") is None
    plan = bench.manager.prepare_store(new, "a", is_last=True)
    assert plan is not None
    assert plan.keys == new[:1]
    assert bench.ram.counters.refused == 1


def test_a_store_larger_than_ram_is_cut_at_once() -> None:
    bench = Workbench(2, 0)
    bench.manager.begin_request("a")
    plan = bench.store(prefix(5), "a")
    assert plan is not None
    assert plan.keys == prefix(2)
    assert bench.ram.counters.refused == 3


def test_with_no_room_at_all_the_plan_is_empty() -> None:
    bench = Workbench(0, 0)
    plan = bench.store(prefix(2))
    assert plan is not None
    assert (list(plan.keys), list(plan.slots)) == ([], [])


def test_a_prefix_is_not_evicted_to_store_its_own_tail() -> None:
    bench = Workbench(3, 0, limits=impatient(max_store_refusals=0))
    bench.store(prefix(2))
    bench.settle()
    bench.manager.begin_request("a")
    plan = bench.store(prefix(4), "a")
    assert plan is not None
    assert (plan.keys, plan.evicted) == (prefix(3)[2:], [])


def test_a_chunk_knows_its_place_in_the_prefix_of_its_group() -> None:
    bench = Workbench(8, 0)
    bench.manager.begin_request("a")
    bench.store([*prefix(2), *prefix(1, group=1)], "a")
    bench.store(prefix(4)[2:], "a")
    copies = bench.ram.copies
    assert [copies[key].depth for key in prefix(4)] == [0, 1, 2, 3]
    assert [copies[key].parent for key in prefix(4)] == [None, *prefix(3)]
    assert copies[prefix(1, group=1)[0]].parent is None


def test_a_chunk_follows_on_those_that_another_request_had_stored() -> None:
    bench = Workbench(8, 0)
    bench.store([*prefix(2), *prefix(2, group=1)])
    bench.manager.begin_request("a")
    bench.store([*prefix(2), *prefix(2, group=1)], "a")
    bench.store([prefix(3)[2], prefix(3, group=1)[2]], "a")
    for keys in (prefix(3), prefix(3, group=1)):
        last = bench.ram.copies[keys[2]]
        assert (last.depth, last.parent) == (2, keys[1])


def test_a_chunk_follows_on_a_load_whose_beginning_the_engine_itself_had() -> None:
    bench = Workbench(8, 0)
    bench.store(prefix(4))
    bench.manager.begin_request("a")
    bench.load(prefix(4)[2:], "a")
    bench.store(prefix(5)[4:], "a")
    assert bench.ram.copies[prefix(5)[4]].depth == 4


def test_chunks_offered_again_after_a_load_keep_their_depth() -> None:
    for stored in (5, 6):
        bench = Workbench(8, 0)
        bench.store(prefix(stored))
        bench.manager.begin_request("a")
        bench.load(prefix(4), "a")
        bench.store(prefix(6), "a")
        bench.store(prefix(7)[6:], "a")
        copies = bench.ram.copies
        assert [copies[key].depth for key in prefix(7)] == list(range(7))


def test_chunks_that_survived_a_restart_count_for_the_depth_of_what_follows() -> None:
    bench = Workbench(8, 8)
    bench.manager.recover(1, zip(prefix(3), range(3), strict=True))
    bench.look(prefix(3), "a")
    bench.settle()
    bench.load(prefix(3), "a")
    bench.store(prefix(4)[3:], "a")
    assert bench.ram.copies[prefix(4)[3]].depth == 3


def test_a_preempted_request_begins_again_at_the_root() -> None:
    bench = Workbench(8, 0)
    bench.manager.begin_request("a")
    bench.store(prefix(2), "a")
    bench.settle()
    bench.step(preempted=["a", "unknown"])
    bench.load(prefix(2), "a")
    bench.store(prefix(3), "a")
    assert bench.ram.copies[prefix(3)[2]].parent == prefix(2)[1]
    bench.step(preempted=["a"])
    bench.store([make_key(b"other", 0)], "a")
    assert bench.ram.copies[make_key(b"other", 0)].depth == 0


def test_hits_are_counted_for_the_tier_and_a_miss_once_per_request() -> None:
    bench = Workbench(4, 4)
    bench.store(prefix(2))
    bench.look(prefix(4), "a")
    bench.look(prefix(4), "a")
    bench.load(prefix(2), "a")
    assert (bench.ram.counters.hits, bench.ram.counters.misses) == (2, 1)


def test_requests_are_counted_from_begin_to_end() -> None:
    bench = Workbench(4, 0)
    bench.manager.begin_request("a")
    bench.manager.begin_request("a")
    bench.look(prefix(1), "b")
    assert bench.manager.snapshot().requests == 2
    for req_id in ("a", "b", "b"):
        bench.manager.end_request(req_id)
    assert bench.manager.snapshot().requests == 0


# -- stranded chunks: in a tier, behind a chunk that is in none ----------------------------


def stranded(bench: Workbench) -> list[int]:
    return [tier.counters.stranded for tier in bench.tiers]


def test_chunks_behind_a_missing_chunk_are_stranded_in_their_tier() -> None:
    bench = Workbench(4, 8)
    whole = prefix(5)
    bench.manager.recover(1, [(whole[2], 0), (whole[3], 1)])
    bench.store([whole[4]], "tail")
    bench.store(whole, "reader")
    assert stranded(bench) == [1, 2]


def test_a_gap_in_ram_that_the_disk_fills_strands_nothing() -> None:
    bench = Workbench(4, 8)
    whole = prefix(3)
    bench.manager.recover(1, [(whole[0], 0)])
    bench.store(whole[1:], "tail")
    bench.store(whole, "reader")
    assert stranded(bench) == [0, 0]


def test_a_gap_in_one_step_strands_what_the_next_step_offers() -> None:
    bench = Workbench(8, 0)
    whole = prefix(4)
    bench.store(whole[2:], "tail")
    bench.manager.begin_request("reader")
    bench.store(whole[:2], "reader")
    assert stranded(bench) == [0, 0]
    bench.store(whole[2:], "reader")
    assert stranded(bench) == [2, 0]
    bench.store(whole, "another")
    assert stranded(bench) == [2, 0], "nothing is missing any more"


def test_an_offer_that_is_put_off_is_counted_once_it_is_taken() -> None:
    bench = Workbench(4)
    whole = prefix(3)
    bench.store(whole[1:], "tail")
    held: list[ChunkKey] = prefix(2, of=1)
    bench.store(held, "holder")
    bench.manager.prepare_load(held, "holder")
    bench.manager.prepare_load(whole[1:], "other")
    bench.manager.begin_request("reader")
    assert bench.store(whole, "reader") is None
    assert stranded(bench) == [0]
    bench.manager.complete_load("holder")
    assert bench.store(whole, "reader") is not None
    assert stranded(bench) == [2]


def test_chunks_that_a_preempted_request_offers_again_are_not_stranded() -> None:
    bench = Workbench(4)
    bench.manager.begin_request("reader")
    bench.store(prefix(3), "reader")
    bench.step(preempted=["reader"])
    bench.store(prefix(3), "reader")
    assert stranded(bench) == [0]


def test_a_window_of_another_group_may_have_gaps() -> None:
    bench = Workbench(8, 0)
    window = prefix(3, group=1)
    bench.store(window[1:], "tail")
    bench.store(window, "reader")
    assert stranded(bench) == [0, 0]


def test_a_window_that_comes_first_is_not_what_counts() -> None:
    bench = Workbench(8, 0, counting_group=1)
    for group, gap in ((0, 0), (1, 2)):
        whole = prefix(3, group=group)
        bench.store(whole[1:], "tail")
        bench.store(whole, "reader")
        assert stranded(bench) == [gap, 0]


def test_a_late_transfer_counts_as_expired_once_with_any_outcome() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.finish(job, Outcome.EXPIRED, Outcome.EXPIRED, settled=False)
    bench.finish(job, Outcome.FAILED, Outcome.DONE)
    counters = bench.tiers[1].counters
    assert (counters.expired, counters.failed, bench.ram.counters.demoted) == (2, 0, 1)
