"""Chunks that were there and had to be computed: behind a chunk that no tier had."""

from __future__ import annotations

from kvtier.keys import ChunkKey
from kvtier.types import Outcome
from tests.support.workbench import Workbench, prefix


def stranded(bench: Workbench) -> list[int]:
    return [tier.counters.stranded for tier in bench.tiers]


def test_what_follows_a_chunk_that_no_tier_has_is_stranded_in_the_tier_that_has_it() -> None:
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


def test_what_a_preempted_request_offers_again_is_not_stranded() -> None:
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


def test_a_late_transfer_counts_as_expired_once_whatever_becomes_of_it() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.finish(job, Outcome.EXPIRED, Outcome.EXPIRED, settled=False)
    bench.finish(job, Outcome.FAILED, Outcome.DONE)
    counters = bench.tiers[1].counters
    assert (counters.expired, counters.failed, bench.ram.counters.demoted) == (2, 0, 1)
