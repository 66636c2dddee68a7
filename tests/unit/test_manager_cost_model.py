"""Loads that the cost model cuts or skips."""

from __future__ import annotations

from kvtier.manager import GroupReach, ManagerLimits, Reach
from kvtier.types import Job, Outcome, TransferResult
from tests.support.workbench import Workbench, prefix
from tests.unit.cost_models import CHUNK_S, TOKENS, cost_model, measure


def slow_bench(*, ram: int = 16, seconds: float = 1.0, window: int = 0) -> Workbench:
    """Return a bench whose disk was seen to take ``seconds`` for a chunk, and holds a prompt.

    Args:
        ram: Slots of the RAM tier.
        seconds: What a chunk took.
        window: Chunks that a second KV cache group reads; 0 for no such group.
    """
    groups = [GroupReach(1), GroupReach(1, Reach.WINDOW, window + 1)]
    bench = Workbench(
        ram,
        64,
        cost_model=cost_model(),
        groups=groups if window else groups[:1],
        limits=ManagerLimits(pin_budget=ram, reserve=0.0, queue=1024),
    )
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(8))])
    tail = prefix(8, group=1)[8 - window :]
    bench.manager.recover(1, [(key, 40 + slot) for slot, key in enumerate(tail)])
    probe = [key for group in range(2) for key in prefix(1, of=9, group=group)]
    bench.manager.recover(1, zip(probe, (60, 61), strict=True))
    bench.look(probe[: 1 + bool(window)], "probe")
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
    assert bench.look(prefix(8)) is None
    assert bench.step() == []
    assert bench.look(prefix(8)) == 0
    snapshot = bench.manager.snapshot()
    assert snapshot.cost_model.skipped_chunks[1] == 8
    assert (snapshot.granted, snapshot.waiting) == (0, 0)


def test_a_prefix_on_a_fast_disk_is_brought_up() -> None:
    bench = slow_bench(seconds=CHUNK_S / 10)
    bench.look(prefix(8))
    (job,) = bench.step()
    assert len(job.keys) == 8
    assert bench.manager.snapshot().cost_model.skipped_chunks[1] == 0


def test_the_cost_of_a_window_is_weighed_against_the_tokens_of_the_prefix() -> None:
    bench = slow_bench(seconds=CHUNK_S * 0.7, window=2)
    bench.look([*prefix(8), *prefix(8, group=1)])
    assert sum(len(job.keys) for job in bench.step()) == 10


def test_a_window_with_smaller_blocks_than_the_prefix_adds_no_tokens() -> None:
    model = cost_model()
    measure(model, 1, 4, 2 * CHUNK_S)
    groups = [GroupReach(4), GroupReach(1, Reach.WINDOW, window_tokens=5)]
    bench = Workbench(16, 16, cost_model=model, groups=groups)
    keys = [*prefix(1), *prefix(4, group=1)]
    bench.manager.recover(1, zip(keys, range(5), strict=True))
    assert bench.look(keys) is None
    assert bench.step() == [], "five chunks load in 2.5 times the time to compute the prompt"
    assert bench.look(keys) == 0
    figures = bench.manager.snapshot().cost_model
    assert (figures.skipped_chunks[1], figures.skipped_tokens[1]) == (5, TOKENS)


def test_the_part_in_ram_is_loaded_and_the_part_on_a_slow_disk_is_not() -> None:
    bench = slow_bench()
    bench.store(prefix(3))
    bench.settle()
    bench.look(prefix(8))
    assert bench.step() == []
    assert bench.look(prefix(8)) == 3
    assert bench.manager.snapshot().cost_model.skipped_chunks[1] == 5


def test_a_request_that_waits_for_room_is_counted_once() -> None:
    bench = slow_bench(ram=4, seconds=CHUNK_S * 2)
    bench.look(prefix(8))
    for _ in range(5):
        bench.step()
    bench.look(prefix(8))
    assert bench.manager.snapshot().cost_model.skipped_chunks[1] == 8


def test_a_reset_forgets_what_is_on_its_way_and_keeps_the_estimates() -> None:
    bench = slow_bench(seconds=CHUNK_S / 10)
    bench.look(prefix(8))
    bench.manager.end_step()
    bench.manager.reset()
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(8, of=3))])
    before = bench.manager.snapshot().cost_model.load_costs[1]
    assert before is not None
    bench.look(prefix(8, of=3), "other")
    (job,) = bench.step()
    assert len(job.keys) == 8
