"""The checks that the manager's tests rely on do find what they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.manager import ManagerLimits, TierState
from kvtier.policies import CopyState
from tests.support.fakes import FakeSlotStatus, SlotStatusError
from tests.support.invariants import InvariantError, check_manager, eviction_order
from tests.support.workbench import Workbench, prefix


def busy() -> Workbench:
    """A bench with a bit of everything: jobs both ways, grants, queues and quarantine."""
    limits = ManagerLimits(pin_budget=4, reserve=0.0, queue=1)
    bench = Workbench(8, 8, limits=limits)
    bench.slot_status.not_acknowledged = {0}
    bench.manager.prepare_store(prefix(1, of=5), "old")
    bench.manager.reset()
    bench.manager.recover(1, [(prefix(1)[0], 4)])
    bench.store(prefix(2, of=1))
    bench.look(prefix(1), "a")
    bench.step()
    check_manager(bench.manager)
    return bench


def lose_a_slot(tier: TierState) -> None:
    tier.slots.allocate(1)


def own_a_slot_twice(tier: TierState) -> None:
    tier.slots.release([next(iter(tier.copies.values())).slot])


def miscount_free(tier: TierState) -> None:
    tier.slots.free += 1


def miscount_idle(tier: TierState) -> None:
    tier.idle += 1


def miscount_dirty(tier: TierState) -> None:
    tier.dirty -= 1


def miscount_writing(tier: TierState) -> None:
    tier.writing += 1


def forget_a_pin(tier: TierState) -> None:
    next(copy for copy in tier.copies.values() if copy.grants).pins = 0


def pin_too_often_back(tier: TierState) -> None:
    next(copy for copy in tier.copies.values() if copy.dirty).pins = -1


def leave_without_leaving(tier: TierState) -> None:
    next(iter(tier.copies.values())).state = CopyState.GONE
    tier.idle = sum(
        not copy.pins and not copy.dirty and copy.state == CopyState.RESIDENT
        for copy in tier.copies.values()
    )
    tier.writing = sum(copy.state != CopyState.RESIDENT for copy in tier.copies.values())


def lose_the_order(tier: TierState) -> None:
    copy = next(copy for copy in tier.copies.values() if copy.state == CopyState.RESIDENT)
    tier.leaving.add(copy)


def leave_clean(tier: TierState) -> None:
    tier.leaving.add(next(copy for copy in tier.copies.values() if not copy.dirty))


def grant_by_hand(tier: TierState) -> None:
    copy = next(copy for copy in tier.copies.values() if copy.dirty)
    copy.grants += 1
    copy.pins += 1


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (lose_a_slot, "every slot has one owner"),
        (own_a_slot_twice, "every slot has one owner"),
        (miscount_free, "free + used = capacity"),
        (miscount_idle, "idle equals a recount"),
        (miscount_dirty, "dirty equals a recount"),
        (miscount_writing, "writing equals a recount"),
        (forget_a_pin, "no copy is evictable and in a job"),
        (pin_too_often_back, "nothing is negative"),
        (leave_without_leaving, "members are not gone"),
        (lose_the_order, "the eviction order holds what is resident and stays"),
        (leave_clean, "who leaves is a dirty member"),
        (grant_by_hand, "grants equal a recount"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_damage_is_named(
    damage: Callable[[TierState], None], invariant: str
) -> None:
    bench = busy()
    damage(bench.ram)
    with pytest.raises(InvariantError) as caught:
        check_manager(bench.manager)
    assert caught.value.invariant == invariant


# No call of the manager leaves its grants inconsistent, so the next two tests damage the
# private state that the checker recounts.


def test_a_waiting_request_without_a_waiter_is_found() -> None:
    bench = busy()
    bench.manager._grants._waiters.clear()
    with pytest.raises(InvariantError, match="who waits is told"):
        check_manager(bench.manager)


def test_the_sum_of_grants_is_recounted() -> None:
    bench = busy()
    bench.manager._grants.granted += 1
    with pytest.raises(InvariantError, match="granted equals a recount"):
        check_manager(bench.manager)


def test_the_order_of_an_lru_is_oldest_first_and_skips_stale_entries() -> None:
    bench = Workbench(3, 0)
    bench.store(prefix(3))
    bench.settle()
    bench.load(prefix(1))
    order = eviction_order(bench.ram.eviction)
    assert order is not None
    assert [copy.key for copy in order] == [*prefix(3)[:0:-1], *prefix(1)]


def test_a_workbench_that_never_settles_says_so() -> None:
    bench = Workbench(2, 0)
    bench.slot_status.not_acknowledged = {0}
    bench.manager.prepare_store(prefix(1), "a")
    bench.manager.reset()
    with pytest.raises(TimeoutError):
        bench.settle(steps=3)


def test_a_slot_status_refuses_a_generation_of_a_former_owner() -> None:
    slot_status = FakeSlotStatus(driven=True)
    slot_status.set_generation([1], 5)
    with pytest.raises(SlotStatusError, match="has generation 5 and is given 4"):
        slot_status.set_generation([1], 4)
    with pytest.raises(SlotStatusError, match="has generation 5 and is given 5"):
        slot_status.publish([1], [5])
    slot_status.publish([1], [6])
    assert slot_status.published == [(1, 6)]


def test_a_slot_status_knows_when_every_job_was_acknowledged() -> None:
    slot_status = FakeSlotStatus(driven=True)
    slot_status.issue([1, 2])
    slot_status.acknowledge([1])
    slot_status.not_acknowledged = {3}
    assert slot_status.all_acknowledged([1, 2, 3]) == [True, False, False]
    with pytest.raises(SlotStatusError, match="more often"):
        slot_status.acknowledge([1])
    with pytest.raises(SlotStatusError, match="twice"):
        slot_status.issue([1, 1])


def test_a_driven_slot_status_has_stored_what_has_its_generation() -> None:
    slot_status = FakeSlotStatus(driven=True)
    slot_status.set_generation([1, 2], 5)
    slot_status.not_stored = {2}
    assert slot_status.stored([1, 2, 3], [5, 5, 5]) == [True, False, False]
    assert slot_status.stored([1], [4]) == [False]
