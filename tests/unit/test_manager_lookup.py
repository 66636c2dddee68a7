"""What a waiting request is answered, and which RAM slots are reserved for its load."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.manager import GroupReach, ManagerLimits, Prompt, Reach
from kvtier.policies import RequestTerms
from kvtier.types import Outcome
from tests.support.workbench import Workbench, prefix
from tests.unit.cost_models import CHUNK_S, cost_model, measure

FULL = GroupReach(1)


def warmed(
    *capacities: int, below: int = 8, prompts: int = 1, budget: int = 8, **options: Any
) -> Workbench:
    """Return a bench with direct loads, whose second tier holds ``below`` chunks of prompts."""
    direct_loads = options.pop("direct_loads", True)
    limits = ManagerLimits(pin_budget=budget, reserve=0.0, queue=64, direct_loads=direct_loads)
    bench = Workbench(*capacities, limits=limits, **options)
    keys = [key for prompt in range(prompts) for key in prefix(below, of=prompt)]
    bench.manager.recover(1, zip(keys, range(len(keys)), strict=True))
    return bench


# -- how far ---------------------------------------------------------------------------------


def test_only_what_is_behind_the_local_tokens_is_loaded() -> None:
    bench = warmed(8, 16)
    assert bench.look(prefix(8), local_tokens=3) == 5
    plan = bench.manager.prepare_load(prefix(8)[3:], "reader")
    assert list(plan.origins) == [1] * 5


def test_a_window_is_found_without_the_chunks_before_it() -> None:
    window = prefix(6, group=1)
    bench = warmed(8, 16, below=6, groups=[FULL, GroupReach(1, Reach.WINDOW, 3)])
    bench.manager.recover(1, zip(window[4:], (10, 11), strict=True))
    assert bench.look([*prefix(6), *window]) == 6
    _, jobs = bench.manager.prepare_load([*prefix(6), *window[4:]], "r"), bench.step()
    assert sum(len(job.keys) for job in jobs) == 8


def test_a_hit_reaches_as_far_as_a_state_whatever_else_is_there() -> None:
    states = prefix(6, group=1)
    bench = warmed(8, 16, below=6, groups=[FULL, GroupReach(1, Reach.STATE)])
    bench.manager.recover(1, [(states[3], 10)])
    assert bench.look([*prefix(6), *states]) == 4
    assert bench.look([*prefix(6), *states], "other", local_tokens=4) == 0


def test_one_request_that_is_not_there_as_a_whole_is_one_miss() -> None:
    bench = warmed(8, 16)
    for _ in range(3):
        assert bench.look(prefix(9)) == 8
        bench.step()
    assert bench.look(prefix(8), "whole") == 8
    assert bench.look(prefix(1, of=5), "nothing") == 0
    assert [tier.counters.misses for tier in bench.tiers] == [2, 2]


def test_a_tail_shorter_than_a_chunk_is_no_miss() -> None:
    bench = Workbench(4, groups=[GroupReach(16)])
    bench.store(prefix(2))
    prompt = Prompt([prefix(2)], local_tokens=0, limit_tokens=40)
    assert bench.manager.lookup("reader", prompt) == 32
    assert bench.ram.counters.misses == 0


@pytest.mark.parametrize("direct_loads", [True, False])
def test_a_hit_in_a_slower_tier_was_wanted_in_the_faster(*, direct_loads: bool) -> None:
    bench = warmed(2, 16, below=0, direct_loads=direct_loads)
    for number in range(2):
        bench.store(prefix(2, of=number))
        bench.settle()
    bench.manager.end_step(now=5.0)
    bench.look(prefix(2), "again")
    bench.manager.end_step(now=7.0)
    ram, nvme = bench.manager.take_reuse_gaps()
    assert (len(ram), len(nvme)) == (2, 0)


# -- who waits -------------------------------------------------------------------------------


def test_a_chunk_that_is_being_stored_is_waited_for() -> None:
    bench = warmed(8, 16)
    plan = bench.manager.prepare_store(prefix(1, of=7), "writer")
    assert plan is not None
    assert bench.look(prefix(1, of=7)) is None
    assert bench.step() == []
    assert bench.look(prefix(1, of=7)) is None
    bench.manager.complete_store(plan.keys)
    assert bench.look(prefix(1, of=7)) == 1


def test_a_settled_request_counts_on_ram_alone() -> None:
    bench = warmed(4, 16, direct_loads=False)
    assert bench.look(prefix(4)) is None
    (job,) = bench.step()
    bench.finish(job, Outcome.DONE, Outcome.FAILED, Outcome.DONE)
    assert bench.look(prefix(4)) == 1, "the second is on disk still"
    bench.store(prefix(2)[1:])
    assert bench.look(prefix(4)) == 4, "and now in RAM"


def test_a_tier_out_of_service_has_nothing() -> None:
    bench = warmed(8, 16)
    bench.store(prefix(2))
    bench.manager.set_out_of_service({1})
    assert bench.look(prefix(8)) == 2


def test_the_part_of_a_slow_hit_that_pays_is_loaded_later() -> None:
    gate = cost_model()
    measure(gate, 1, 64, 64 * CHUNK_S * 4)
    bench = warmed(8, 16, cost_model=gate)
    bench.store(prefix(3))
    bench.settle()
    assert bench.look(prefix(8)) is None
    assert bench.step() == []
    assert bench.look(prefix(8)) == 3


# -- what is reserved ------------------------------------------------------------------------


def test_reservations_of_a_step_share_the_pin_budget() -> None:
    bench = warmed(16, 32, prompts=3, budget=10)
    assert bench.look(prefix(8), "a") == 8
    assert bench.look(prefix(3, of=1), "b") is None
    assert bench.look(prefix(2, of=2), "c") == 2


def test_a_reservation_is_given_back_by_the_next_lookup_of_its_request() -> None:
    bench = warmed(8, 32, prompts=2)
    assert bench.look(prefix(8), "a") == 8
    assert bench.look(prefix(1), "a") == 1
    assert bench.look(prefix(7, of=1), "b") == 7


def test_chunks_granted_to_another_request_make_no_room() -> None:
    bench = warmed(4, 32)
    bench.store(prefix(2, of=7))
    bench.settle()
    assert bench.look(prefix(2, of=7), "a") == 2
    assert bench.look(prefix(3), "b") is None
    bench.manager.end_request("b")
    bench.settle()
    assert bench.look(prefix(3), "c") == 3


def test_chunks_pinned_by_another_load_need_no_room() -> None:
    bench = warmed(4, 32)
    bench.store(prefix(2))
    bench.settle()
    bench.manager.prepare_load(prefix(2), "other")
    assert bench.ram.available == 2
    assert bench.look(prefix(4)) == 4
    plan = bench.manager.prepare_load(prefix(4), "reader")
    assert list(plan.origins) == [0, 0, 1, 1]
    assert all(plan.generations)


def test_a_request_that_ended_keeps_its_reservation_until_the_step_ends() -> None:
    bench = warmed(8, 32, prompts=2)
    bench.look(prefix(8), "a")
    bench.manager.end_request("a")
    bench.step()
    assert bench.look(prefix(8, of=1), "b") == 8


# -- for an engine that asks chunk by chunk --------------------------------------------------


def test_a_chunk_is_in_the_fastest_tier_that_has_it() -> None:
    bench = Workbench(4, 8, 8)
    ram, nvme, remote, nowhere = prefix(4)
    bench.store([ram])
    bench.manager.recover(1, [(nvme, 5)])
    bench.manager.recover(2, [(nvme, 5), (remote, 6)])
    found = [bench.manager.residence(key, "r") for key in (ram, nvme, remote, nowhere)]
    assert found == [0, 1, 2, None]
    assert [tier.counters.misses for tier in bench.tiers] == [1, 1, 1]


def test_a_chunk_on_its_way_to_ram_is_not_there_yet() -> None:
    bench = Workbench(4, 8)
    plan = bench.manager.prepare_store(prefix(1), "writer")
    assert plan is not None
    assert bench.manager.residence(prefix(1)[0], "r") == 1
    bench.manager.complete_store(plan.keys)
    assert bench.manager.residence(prefix(1)[0], "r") == 0


def test_residence_counts_only_permitted_tiers_in_service() -> None:
    bench = Workbench(4, 8, 8)
    bench.manager.recover(1, [(prefix(1)[0], 5)])
    bench.manager.recover(2, [(prefix(1)[0], 6)])
    bench.manager.begin_request("far", RequestTerms(load_tiers=frozenset({2})))
    assert bench.manager.residence(prefix(1)[0], "far") == 2
    bench.manager.set_out_of_service({1})
    assert bench.manager.residence(prefix(1)[0], "any") == 2


def test_found_chunks_are_fetched_once_and_then_only_ram_counts() -> None:
    bench = Workbench(4, 8)
    bench.manager.recover(1, zip(prefix(3), range(3), strict=True))
    found = prefix(3)
    assert [bench.manager.residence(key, "r") for key in found] == [1, 1, 1]
    assert not bench.manager.is_deferred("r")
    bench.manager.fetch([*found, *found], "r")
    assert bench.manager.is_deferred("r")
    bench.check()
    (job,) = bench.step()
    bench.manager.fetch(prefix(3, of=1), "r")
    bench.finish(job, Outcome.DONE, Outcome.FAILED, Outcome.DONE)
    assert not bench.manager.is_deferred("r")
    assert [bench.manager.residence(key, "r") for key in found] == [0, None, 0]
    bench.load(found[:1], "r")


def test_a_chunk_found_twice_while_it_is_stored_is_kept_once() -> None:
    bench = Workbench(4, 8)
    plan = bench.manager.prepare_store(prefix(1), "writer")
    assert plan is not None
    bench.manager.residence(prefix(1)[0], "r")
    bench.manager.fetch(prefix(1) * 2, "r")
    bench.step()
    bench.manager.complete_store(plan.keys)
    bench.check()
    bench.load(prefix(1), "r")
    bench.settle()
    assert bench.ram.available == 4


def test_a_request_whose_load_failed_finds_nothing() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(1))
    bench.manager.begin_request("r")
    bench.manager.fail_request("r")
    assert bench.manager.residence(prefix(1)[0], "r") is None
    assert bench.look(prefix(1), "r") == 0
