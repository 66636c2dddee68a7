"""The scheduler half alone, with an engine and workers played by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from kvtier.connector.schedule.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.schedule.tracking import TrackedRequest, chunk_positions

from kvtier.connector.metadata import BlockSpec, WorkerOutput
from kvtier.connector.stats import ConnectorStats
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.keys import make_key
from kvtier.testing.stepped import SteppedEngine
from kvtier.transfer import TransferEngine
from tests.unit.toy_engine import (
    TOKENS,
    Offers,
    ToyBlock,
    ToyBlocks,
    ToyEngine,
    ToyRequest,
)

FULL = (TOKENS, None)
ENGINES = (TransferEngine, SteppedEngine)


# -- what can be loaded ------------------------------------------------------------------------


def test_the_longest_stored_prefix_is_matched() -> None:
    engine = ToyEngine()
    engine.fill("a", 3 * TOKENS + 5)
    assert engine.match(engine.arrive("b", 4 * TOKENS)) == 3 * TOKENS
    assert engine.match(engine.arrive("c", 2 * TOKENS)) == 2 * TOKENS
    assert engine.match(engine.arrive("d", [8] * 64)) == 0


def test_tokens_that_the_engine_has_are_not_matched_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 5 * TOKENS)
    assert engine.match(request, local=TOKENS) == 3 * TOKENS
    assert engine.match(request, local=4 * TOKENS) == 0


def test_asking_changes_nothing_that_is_resident() -> None:
    engine = ToyEngine(slots=(4, 16))
    engine.fill("a", 4 * TOKENS)
    engine.match(engine.arrive("x", 80))  # What went down is taken note of with a question.
    before = engine.cache.bench.resident(), engine.cache.bench.resident(1)
    for _ in range(3):
        assert engine.match(engine.arrive("b", 5 * TOKENS)) == 4 * TOKENS
    assert (engine.cache.bench.resident(), engine.cache.bench.resident(1)) == before


def test_a_chunk_on_its_way_up_makes_the_request_wait() -> None:
    engine = ToyEngine(slots=(2, 16), slowest_steps=3)
    engine.fill("a", 2 * TOKENS)
    for _ in range(4):
        engine.step()
    engine.fill("b", [8] * (2 * TOKENS))
    request = engine.arrive("c", 3 * TOKENS)
    answers = [engine.match(request)]
    while answers[-1] is None:
        engine.step()
        answers.append(engine.match(request))
    assert answers[0] is None
    assert answers[-1] == 2 * TOKENS


def test_a_request_can_refuse_what_is_cached_or_limit_it() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    assert engine.match(engine.arrive("b", 64, skip_reading_prefix_cache=True)) == 0
    limit = {"max_load_tokens": 2 * TOKENS + 3}
    assert engine.match(engine.arrive("c", 80, kv_transfer_params=limit)) == 2 * TOKENS
    limit = {"max_load_tokens": True}
    assert engine.match(engine.arrive("d", 80, kv_transfer_params=limit)) == 4 * TOKENS
    request = engine.arrive("e", 80)
    assert engine.half.get_num_new_matched_tokens(request, 0, 20) == (20, True)


def test_a_window_needs_only_the_chunks_before_the_end() -> None:
    engine = ToyEngine((TOKENS, 2 * TOKENS))
    engine.fill("a", 6 * TOKENS)
    keys = [make_key(value, 0) for value in engine.arrive("x", 96).block_hashes]
    engine.cache.bench.ram.drop(engine.cache.bench.ram.copies[keys[1]])
    request = engine.arrive("b", 6 * TOKENS + 1)
    assert engine.match(request) == 6 * TOKENS
    engine.cache.bench.ram.drop(engine.cache.bench.ram.copies[keys[4]])
    assert engine.match(request) == 4 * TOKENS
    engine.cache.bench.ram.drop(engine.cache.bench.ram.copies[keys[3]])
    # Of the two runs left, one is too short and one begins where the engine begins.
    assert engine.match(request) == TOKENS


def test_groups_agree_on_one_length() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS), (TOKENS, 3 * TOKENS))
    engine.fill("a", 6 * TOKENS)
    ram = engine.cache.bench.ram
    hashes = engine.arrive("x", 96).block_hashes
    assert engine.match(engine.arrive("b", 100)) == 6 * TOKENS
    # The wider window, asked first, could end at 6 chunks and at 1, the narrower one at 4 and
    # at 1.
    ram.drop(ram.copies[make_key(hashes[1], 2)])
    ram.drop(ram.copies[make_key(hashes[4], 1)])
    assert engine.match(engine.arrive("c", 100)) == TOKENS
    ram.drop(ram.copies[make_key(hashes[0], 0)])
    assert engine.match(engine.arrive("d", 100)) == 0


def test_with_a_window_the_last_token_is_left_to_compute() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS))
    engine.fill("a", 6 * TOKENS)
    assert engine.match(engine.arrive("b", 6 * TOKENS)) == 6 * TOKENS - 1


def test_nobody_waits_for_chunks_that_another_group_rules_out() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS), slots=(64, 64), slowest_steps=9)
    engine.fill("a", 6 * TOKENS)
    for _ in range(20):
        engine.step()
    ram, nvme = engine.cache.bench.tiers
    request = engine.arrive("b", 100)
    assert engine.match(request) == 6 * TOKENS
    last, ruled_out = (
        make_key(request.block_hashes[at], group) for at, group in ((5, 0), (4, 1))
    )
    ram.drop(ram.copies[last])
    assert engine.match(engine.arrive("c", 100)) is None
    for tier in (ram, nvme):
        tier.drop(tier.copies[ruled_out])
    assert engine.match(engine.arrive("d", 100)) == 4 * TOKENS


def test_of_what_is_below_only_the_window_comes_up() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS), slots=(24, 96))
    engine.fill("a", 12 * TOKENS)
    engine.fill("others", [8] * (12 * TOKENS))
    request = engine.arrive("b", 13 * TOKENS)
    assert engine.match(request) is None
    engine.step()
    assert engine.match(request) == 12 * TOKENS
    assert engine.cache.bench.tiers[1].counters.promoted == 12 + 2


def test_a_window_whose_last_chunk_is_nowhere_waits_for_none_of_it() -> None:
    engine = ToyEngine((TOKENS, 2 * TOKENS), slots=(64, 64))
    engine.fill("a", 8 * TOKENS)
    ram, nvme = engine.cache.bench.tiers
    keys = [make_key(value, 0) for value in engine.arrive("x", 128).block_hashes]
    engine.step()
    ram.drop(ram.copies[keys[7]])
    for tier in (ram, nvme):
        tier.drop(tier.copies[keys[6]])
    assert engine.match(engine.arrive("b", 8 * TOKENS + 1)) == 6 * TOKENS


def test_a_window_that_ends_inside_a_chunk_may_take_one_chunk_more() -> None:
    engine = ToyEngine(FULL, (2 * TOKENS, 50))
    engine.fill("a", 8 * TOKENS)
    ram = engine.cache.bench.ram
    hashes = engine.arrive("x", 128).block_hashes
    ram.drop(ram.copies[make_key(hashes[7], 0)])
    assert engine.match(engine.arrive("b", 140)) == 7 * TOKENS
    # Token 112 sees token 63, which is in the second of the four chunks.
    ram.drop(ram.copies[make_key(hashes[3], 1)])
    assert engine.match(engine.arrive("c", 140)) == 2 * TOKENS


def test_before_a_gap_the_window_ends_with_a_chunk_and_takes_no_more_than_it_needs() -> None:
    engine = ToyEngine(FULL, (2 * TOKENS, 50))
    engine.fill("a", 10 * TOKENS)
    ram = engine.cache.bench.ram
    hashes = engine.arrive("x", 160).block_hashes
    ram.drop(ram.copies[make_key(hashes[9], 0)])
    for gone in (1, 7):
        ram.drop(ram.copies[make_key(hashes[gone], 1)])
    assert engine.match(engine.arrive("b", 180)) == 6 * TOKENS


def test_the_tokens_of_a_hit_are_those_of_a_group_that_loads_the_whole_prefix() -> None:
    window = (TOKENS, 2 * TOKENS)
    for groups in ((FULL, window), (window, FULL), (window, window, FULL, FULL)):
        engine = ToyEngine(*groups)
        engine.fill("a", 8 * TOKENS)
        request = engine.arrive("b", 9 * TOKENS)
        engine.load(request, engine.match(request) or 0)
        engine.step()
        engine.acknowledge()
        (ram,) = engine.half.statistics().tiers
        assert ram.hit_tokens == 8 * TOKENS


# -- loads -------------------------------------------------------------------------------------


def test_a_load_names_the_fresh_blocks_and_the_slots_of_their_chunks() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS))
    engine.fill("a", 5 * TOKENS)
    request = engine.arrive("b", 90)
    assert engine.match(request, local=TOKENS) == 4 * TOKENS
    engine.load(request, 4 * TOKENS, local=TOKENS)
    (job,) = engine.step().load_jobs.values()
    full, window = engine.tables["b"]
    assert job.request_id == "b"
    assert window[:3] == [0, 0, 0]
    assert job.blocks == BlockSpec((*full[1:5], *window[3:5]), (4, 2), (1, 3))
    copies = engine.cache.bench.ram.copies
    hashes = request.block_hashes
    keys = [make_key(hashes[at], 0) for at in range(1, 5)]
    keys += [make_key(hashes[at], 1) for at in (3, 4)]
    assert list(job.slots.slots) == [copies[key].slot for key in keys]
    assert list(job.slots.generations) == [copies[key].generation for key in keys]
    engine.acknowledge()


def test_a_load_may_begin_inside_a_chunk_of_several_blocks() -> None:
    engine = ToyEngine(blocks_per_chunk=4)
    engine.fill("a", 8 * TOKENS)
    request = engine.arrive("b", 9 * TOKENS)
    assert engine.match(request, local=TOKENS) == 7 * TOKENS
    engine.load(request, 7 * TOKENS, local=TOKENS)
    (job,) = engine.step().load_jobs.values()
    assert job.blocks == BlockSpec(tuple(engine.tables["b"][0][1:]), (7,), (1,))
    assert len(job.slots.slots) == 2
    engine.acknowledge()


def test_what_was_loaded_is_not_stored_again_unless_another_node_needs_it() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    offers = Offers(engine)
    for name, params in (("b", None), ("c", {"do_remote_decode": True})):
        request = engine.arrive(name, 6 * TOKENS, kv_transfer_params=params)
        engine.load(request, engine.match(request) or 0)
        engine.step()
        engine.acknowledge()
        engine.schedule(request)
        engine.step()
        engine.acknowledge()
    assert offers.sizes == [2, 6]


def test_chunks_that_are_being_loaded_are_waited_for_and_not_loaded_twice() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    first, second = engine.arrive("b", 80), engine.arrive("c", 80)
    engine.load(first, engine.match(first) or 0)
    assert engine.match(second) is None
    (job_id,) = engine.step().load_jobs
    assert engine.match(second) is None
    engine.acknowledge(job_id)
    assert engine.match(second) == 4 * TOKENS


def test_an_engine_that_shares_no_blocks_loads_for_each() -> None:
    engine = ToyEngine(shares_blocks=False)
    engine.fill("a", 4 * TOKENS)
    for name in "bc":
        request = engine.arrive(name, 80)
        engine.load(request, engine.match(request) or 0)
    assert len(engine.step().load_jobs) == 2
    engine.acknowledge()


@pytest.mark.parametrize(
    ("blocks", "external", "local"),
    [([1, 2], 48, 0), ([1, 2, 3], 47, 1), ([1, 2, 3, 4, 5], 80, 0)],
)
def test_blocks_that_do_not_fit_the_load_are_an_error(
    blocks: list[int], external: int, local: int
) -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 70)
    engine.match(request, local)
    table = ToyBlocks([[ToyBlock(block) for block in blocks]])
    with pytest.raises(UnsupportedError, match="the engine asks for"):
        engine.half.update_state_after_alloc(request, table, external)


def test_an_allocation_without_anything_to_load_is_none_of_its_business() -> None:
    engine = ToyEngine()
    engine.half.update_state_after_alloc(engine.arrive("a", 20), ToyBlocks([[]]), 0)
    assert not engine.step().load_jobs


def test_a_failed_load_is_not_tried_again_and_what_is_computed_instead_is_stored() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 4 * TOKENS + 1)
    engine.load(request, engine.match(request) or 0)
    engine.step()
    engine.acknowledge(works=False)
    request.num_computed_tokens = 0
    assert engine.match(request) == 0
    del engine.tables["b"]
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    assert len(job.slots.slots) == 4
    engine.acknowledge()
    assert engine.match(engine.arrive("c", 80)) == 4 * TOKENS


def test_a_request_that_is_aborted_while_it_loads_is_remembered_until_the_load_ended() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 80)
    engine.load(request, engine.match(request) or 0)
    engine.step()
    engine.finish(request)
    engine.step()
    assert not engine.is_idle()
    engine.acknowledge()
    assert engine.is_idle()
    assert not any(copy.pins for copy in engine.cache.bench.ram.copies.values())


def test_a_request_of_an_id_that_is_used_again_outlives_the_stores_of_the_first() -> None:
    engine = ToyEngine()
    first = engine.arrive("a", 4 * TOKENS)
    engine.schedule(first)
    engine.step()
    engine.finish(first)
    engine.step()
    engine._known.discard("a")
    del engine.tables["a"]
    second = engine.arrive("a", [9] * 2 * TOKENS)
    assert engine.match(second) == 0
    engine.schedule(second, TOKENS)
    engine.step()
    engine.acknowledge()
    engine.schedule(second)
    assert len(engine.step().store_jobs) == 1
    engine.acknowledge()
    end(engine, second)


def end(engine: ToyEngine, request: ToyRequest) -> None:
    """Let the last request end, after which nothing is left of any."""
    engine.finish(request)
    engine.step()
    assert engine.is_idle()
    assert not engine.half._requests


def use_again(engine: ToyEngine, prompt: int | list[int], **more: Any) -> ToyRequest:
    """Give a request's id to another one before the step that tells the first one's end.

    The first has two chunks, of which the second is still to be offered.
    """
    first = engine.arrive("a", [9] * 2 * TOKENS)
    engine.schedule(first, TOKENS)
    engine.step()
    engine.acknowledge()
    engine.schedule(first)
    engine.half._requests["a"].store_limit = 0
    engine.step()
    engine.half._requests["a"].store_limit = None
    engine.finish(first)
    engine._known.discard("a")
    del engine.tables["a"]
    return engine.arrive("a", prompt, **more)


def test_an_id_may_be_used_again_before_the_step_that_tells_the_end_of_the_first() -> None:
    engine = ToyEngine()
    engine.fill("z", 4 * TOKENS)
    second = use_again(engine, 5 * TOKENS)
    assert engine.match(second) == 4 * TOKENS
    engine.load(second, 4 * TOKENS)
    metadata = engine.step()
    assert len(metadata.load_jobs) == 1
    (stored,) = metadata.store_jobs.values()
    assert len(stored.slots.slots) == 1, "of the first, its last chunk"
    engine.acknowledge()
    engine.schedule(second)
    assert len(engine.step().store_jobs) == 1
    engine.acknowledge()
    end(engine, second)
    assert not any(copy.pins for copy in engine.cache.bench.ram.copies.values())
    assert engine.match(engine.arrive("b", [9] * 3 * TOKENS)) == 2 * TOKENS


def test_each_of_two_requests_of_one_id_has_its_own_wishes() -> None:
    engine = ToyEngine()
    second = use_again(engine, 4 * TOKENS, kv_transfer_params={"kvtier": {"skip_store": True}})
    assert len(engine.step().store_jobs) == 1, "the first has no such wish"
    assert engine.match(second) == 0
    engine.schedule(second)
    assert not engine.step().store_jobs
    engine.acknowledge()
    engine.finish(second)
    engine.step()
    assert engine.is_idle()


def test_blocks_of_the_first_that_the_second_gets_are_stored_before_they_are_written() -> None:
    engine = ToyEngine()
    second = use_again(engine, 2 * TOKENS)
    assert engine.match(second) == 0
    engine.schedule(second, blocks=[[1, 2]])
    metadata = engine.step()
    (job_id,) = set(metadata.store_jobs) & metadata.jobs_to_flush
    assert metadata.store_jobs[job_id].blocks.block_ids == (2,)


def test_a_reset_may_come_between_the_two_requests_of_one_id_and_their_step() -> None:
    engine = ToyEngine()
    second = use_again(engine, 2 * TOKENS)
    engine.half.reset_cache()
    metadata = engine.step()
    assert len(metadata.store_jobs) == 1
    assert set(metadata.store_jobs) <= metadata.jobs_to_flush, "it reads what is void"
    engine.acknowledge()
    assert engine.match(second) == 0
    engine.schedule(second)
    engine.step()
    engine.acknowledge()
    engine.finish(second)
    engine.step()
    assert engine.is_idle()
    assert engine.match(engine.arrive("b", [9] * 3 * TOKENS)) == 0


# -- acknowledgements, reset, figures ----------------------------------------------------------


def test_a_job_ends_when_all_ranks_say_so() -> None:
    engine = ToyEngine(ranks=3)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    engine.acknowledge(job_id, ranks=2)
    assert not engine.is_idle()
    assert engine.match(engine.arrive("b", 48)) is None
    engine.acknowledge(job_id)
    assert engine.match(engine.arrive("c", 48)) == 2 * TOKENS
    engine.acknowledge(job_id)  # One rank too many is nobody's.


def test_the_number_of_ranks_may_change_for_the_jobs_to_come() -> None:
    engine = ToyEngine(ranks=2)
    first = engine.arrive("a", TOKENS)
    engine.schedule(first)
    (job_id,) = engine.step().store_jobs
    engine.half.update_connector_output(WorkerOutput(expected_ranks=1))
    engine.acknowledge(job_id)
    assert not engine.is_idle()
    engine.acknowledge(job_id)
    second = engine.arrive("b", [8] * TOKENS)
    engine.schedule(second)
    engine.step()
    engine.acknowledge()
    assert engine.is_idle()


def test_after_a_reset_nothing_hits_and_late_answers_are_not_listened_to() -> None:
    engine = ToyEngine(slots=(8, 16))
    engine.fill("a", 2 * TOKENS)
    running = engine.arrive("b", [8] * 2 * TOKENS)
    engine.schedule(running, TOKENS)
    (store,) = engine.step().store_jobs
    loading = engine.arrive("c", 40)
    engine.load(loading, engine.match(loading) or 0)
    (load,) = engine.step().load_jobs
    gone = engine.arrive("d", TOKENS)
    engine.finish(gone)
    engine.half.reset_cache()
    assert engine.step().jobs_to_flush == {store, load}
    engine.acknowledge(store, load)
    assert engine.match(engine.arrive("e", 48)) == 0
    engine.schedule(running)
    assert not engine.step().store_jobs, "it has KV of before the reset"


def test_a_reset_between_allocation_and_step_is_an_error() -> None:
    engine = ToyEngine()
    engine.fill("a", 2 * TOKENS)
    request = engine.arrive("b", 40)
    engine.load(request, engine.match(request) or 0)
    with pytest.raises(KvtierError, match="reset between"):
        engine.half.reset_cache()


def test_a_request_nobody_announced_is_followed_from_then_on() -> None:
    engine = ToyEngine()
    announced = engine.arrive("a", 20)
    other = ToyEngine()
    assert other.match(announced) == 0
    announced.over = True
    assert other.half.request_finished(announced, [1]) == (False, None)


def test_copies_are_told_once() -> None:
    engine = ToyEngine()
    assert engine.half.get_stats() is None
    copied = ConnectorStats()
    copied.record_transfer(4096, 0.5, ("gpu", "ram"))
    engine.half.update_connector_output(WorkerOutput(stats=copied.to_dict()))
    told = engine.half.get_stats()
    assert told is not None
    assert told.data == copied.data
    assert engine.half.get_stats() is None


def test_residency_events_pass_through() -> None:
    engine = ToyEngine()
    engine.fill("a", TOKENS)
    (event,) = engine.half.take_events()
    assert (event.tier, event.removed, len(event.keys)) == (0, False, 1)


def test_shutdown_closes_the_cache() -> None:
    engine = ToyEngine()
    engine.half.shutdown()
    engine.half.shutdown()
    assert engine.is_idle()


def test_the_stepped_engine_has_all_that_the_real_one_has() -> None:
    real, stepped = ({name for name in dir(each) if name[0] != "_"} for each in ENGINES)
    assert real <= stepped


# -- groups ------------------------------------------------------------------------------------


def test_a_tracked_request_says_which_chunks_it_has() -> None:
    engine = ToyEngine(blocks_per_chunk=2)
    request = engine.arrive("a", 5 * TOKENS)
    tracked = TrackedRequest(request, build_layouts(engine.options))
    tracked.extend_keys()
    hashes = request.block_hashes
    ends = {make_key(hashes[1], 0): 2 * TOKENS, make_key(hashes[3], 0): 4 * TOKENS}
    assert chunk_positions(tracked) == ends


def test_a_context_of_somebody_else_is_refused() -> None:
    @dataclass(frozen=True)
    class Foreign:
        req_id: str = "a"
        kv_transfer_params: None = None

    with pytest.raises(UnsupportedError, match="Foreign does not say"):
        chunk_positions(Foreign())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SchedulerOptions((), 16), "no KV cache group"),
        (SchedulerOptions((CacheGroup(24),), 16), "whole number of hashes"),
        (
            SchedulerOptions((CacheGroup(16, 32),), 16, 4, retention_tokens=32),
            "no multiple of the 64 tokens",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(options: SchedulerOptions, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        build_layouts(options)


def test_where_tails_cannot_be_told_apart_every_chunk_is_useful() -> None:
    full, other, window = build_layouts(
        SchedulerOptions((CacheGroup(16), CacheGroup(64), CacheGroup(16, 20)), 16)
    )
    assert [layout.is_sparse for layout in (full, other, window)] == [False] * 3
    (odd, window) = build_layouts(SchedulerOptions((CacheGroup(48), CacheGroup(32, 64)), 16))
    assert odd.chunks_needed(100) == 0
    assert window.is_useful(1, ())
