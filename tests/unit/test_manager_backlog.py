"""The backlog of a tier that is slower than the stores."""

from __future__ import annotations

from kvtier.manager import ManagerLimits
from tests.support.workbench import Workbench, prefix


def slow_disk(*, backlog: int) -> Workbench:
    return Workbench(
        16, 64, limits=ManagerLimits(pin_budget=16, reserve=0.0, queue=2, backlog=backlog)
    )


def test_beyond_the_backlog_the_newest_chunks_stay_in_ram_only() -> None:
    bench = slow_disk(backlog=4)
    keys = prefix(6)
    bench.store(keys)
    assert bench.look(keys) == 6
    bench.settle()
    assert bench.resident(1) == set(keys[:4])
    assert bench.manager.dropped == [0, 2]
    assert bench.manager.snapshot().tiers[0].counters.lost == 2


def test_chunks_in_flight_are_part_of_the_backlog() -> None:
    bench = slow_disk(backlog=4)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.store(prefix(4, of=1))
    assert bench.manager.dropped == [0, 2]
    bench.finish(job)
    bench.settle()
    assert bench.resident(1) == {*prefix(2), *prefix(2, of=1)}


def test_dropped_chunks_are_ordinary_victims() -> None:
    bench = slow_disk(backlog=4)
    bench.store(prefix(6))
    assert bench.manager.snapshot().tiers[0].dirty == 4
    plan = bench.store(prefix(12, of=1))
    assert plan is not None
    assert set(plan.evicted) == set(prefix(6)[4:])


def test_once_the_disk_has_caught_up_new_chunks_are_demoted_again() -> None:
    bench = slow_disk(backlog=4)
    bench.store(prefix(6))
    bench.settle()
    bench.store(prefix(3, of=1))
    bench.settle()
    assert bench.resident(1) >= set(prefix(3, of=1))


def test_without_a_bound_nothing_is_dropped() -> None:
    bench = Workbench(16, 64)
    bench.store(prefix(16))
    bench.settle()
    assert bench.manager.dropped == [0, 0]
    assert len(bench.resident(1)) == 16
