"""The scheduler side alone: what can be loaded, loads, resets, and what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.metadata import BlockSpec, WorkerOutput
from kvtier.connector.requests import TrackedRequest, chunk_positions
from kvtier.connector.scheduler import NOTHING_TO_DO
from kvtier.connector.transfers import Transfers
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.keys import make_key
from kvtier.manager import Reach
from kvtier.transfer import TransferEngine
from tests.support.stepped import SteppedEngine
from tests.unit.toy_engine import (
    FULL,
    TOKENS,
    ToyBlock,
    ToyBlocks,
    ToyEngine,
    ToyRequest,
    window,
)

ENGINES = (TransferEngine, SteppedEngine)


# -- what can be loaded ------------------------------------------------------------------------


def test_the_longest_stored_prefix_is_matched() -> None:
    engine = ToyEngine()
    engine.fill("a", 3 * TOKENS + 5)
    assert engine.match(engine.arrive("b", 4 * TOKENS)) == 3 * TOKENS
    assert engine.match(engine.arrive("c", 2 * TOKENS)) == 2 * TOKENS
    assert engine.match(engine.arrive("d", [8] * 64)) == 0


def test_a_request_that_was_not_announced_loads_and_stores_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ToyEngine()
    engine.fill("a", 3 * TOKENS)
    engine.arrive("b", [8] * (2 * TOKENS))
    for name in ("b", "c"):  # one is announced as another request, one not at all
        stranger = ToyRequest(name, [7] * (4 * TOKENS), 4 * TOKENS)
        engine.add_unannounced(stranger)
        assert engine.match(stranger) == 0
        with pytest.raises(UnsupportedError, match="not announced"):
            engine.connector.update_state_after_alloc(stranger, ToyBlocks([[]]), TOKENS)
        engine.schedule(stranger)
        assert not engine.step().store_jobs
        engine.connector.request_finished(stranger)
        assert not engine.step().store_jobs
    assert caplog.text.count("not announced") == 1


def test_tokens_that_the_engine_has_are_not_matched_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 5 * TOKENS)
    assert engine.match(request, local=TOKENS) == 3 * TOKENS
    assert engine.match(request, local=4 * TOKENS) == 0


def test_a_request_is_looked_up_with_one_call_however_long_it_is() -> None:
    engine = ToyEngine(FULL, window(2 * TOKENS))
    engine.fill("a", 20 * TOKENS)
    before = engine.counted.calls["lookup"]
    assert engine.match(engine.arrive("b", 21 * TOKENS)) == 20 * TOKENS
    assert engine.counted.calls["lookup"] == before + 1


def test_a_chunk_that_is_being_promoted_makes_the_request_wait() -> None:
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


def test_with_a_window_the_chunk_of_the_last_token_is_computed() -> None:
    engine = ToyEngine(FULL, window(2 * TOKENS))
    engine.fill("a", 6 * TOKENS)
    assert engine.match(engine.arrive("b", 6 * TOKENS)) == 5 * TOKENS
    assert engine.match(engine.arrive("c", 6 * TOKENS + 1)) == 6 * TOKENS


def test_the_tokens_of_a_hit_are_those_of_a_group_that_loads_the_whole_prefix() -> None:
    groups = (window(2 * TOKENS, index=0), CacheGroup(TOKENS, 1))
    for some in ((FULL, window(2 * TOKENS)), groups):
        engine = ToyEngine(*some)
        engine.fill("a", 8 * TOKENS)
        request = engine.arrive("b", 9 * TOKENS)
        engine.load(request, engine.match(request) or 0)
        assert engine.connector.load_sources("b") == {0: 8 * TOKENS}
        engine.step()
        engine.acknowledge()
        (ram,) = engine.cache.service.statistics().tiers
        assert ram.hit_tokens == 8 * TOKENS


# -- loads -------------------------------------------------------------------------------------


def test_a_load_names_the_fresh_blocks_and_the_slots_of_their_chunks() -> None:
    engine = ToyEngine(FULL, window(2 * TOKENS))
    engine.fill("a", 5 * TOKENS)
    request = engine.arrive("b", 90)
    assert engine.match(request, local=TOKENS) == 4 * TOKENS
    engine.load(request, 4 * TOKENS, local=TOKENS)
    (job,) = engine.step().load_jobs.values()
    full, windowed = engine.tables["b"]
    assert job.request_id == "b"
    assert windowed[:3] == [0, 0, 0]
    assert job.blocks == BlockSpec((*full[1:5], *windowed[3:5]), (4, 2), (1, 3))
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


def test_loaded_chunks_are_not_offered_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 6 * TOKENS)
    engine.load(request, engine.match(request) or 0)
    engine.step()
    engine.acknowledge()
    engine.counted.offers.clear()
    engine.schedule(request)
    engine.step()
    assert engine.counted.offers == [2]


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
    [([1, 2], 48, 0), ([1, 2, 3], 47, 2), ([1, 2, 3, 4, 5], 80, 0)],
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
        engine.connector.update_state_after_alloc(request, table, external)


def test_an_allocation_without_anything_to_load_starts_no_load() -> None:
    engine = ToyEngine()
    engine.connector.update_state_after_alloc(engine.arrive("a", 20), ToyBlocks([[]]), 0)
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


def test_a_request_that_goes_on_from_the_first_bad_block_offers_everything_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 4 * TOKENS + 1)
    engine.load(request, engine.match(request) or 0)
    engine.step()
    engine.acknowledge(works=False)
    request.num_computed_tokens = 2 * TOKENS
    engine.counted.offers.clear()
    engine.schedule(request)
    engine.step()
    assert engine.counted.offers == [4]
    engine.acknowledge()


def test_a_request_aborted_while_it_loads_offers_nothing_and_ends_with_its_load() -> None:
    engine = ToyEngine()
    engine.fill("a", 4 * TOKENS)
    request = engine.arrive("b", 80)
    engine.load(request, engine.match(request) or 0)
    engine.step()
    engine.counted.offers.clear()
    engine.finish(request)
    assert not any(engine.counted.offers)
    assert not engine.step().store_jobs
    assert not engine.is_idle()
    engine.acknowledge()
    assert engine.is_idle()
    assert not any(copy.pins for copy in engine.cache.bench.ram.copies.values())


def test_a_request_of_an_id_that_is_used_again_is_another_one() -> None:
    engine = ToyEngine()
    first = engine.arrive("a", 4 * TOKENS)
    engine.schedule(first)
    engine.step()
    engine.finish(first)
    second = engine.arrive("a", [9] * 2 * TOKENS)
    assert engine.match(second) == 0, "the stores of the first are not waited for"
    engine.schedule(second, TOKENS)
    engine.step()
    engine.acknowledge()
    engine.schedule(second)
    assert len(engine.step().store_jobs) == 1
    engine.acknowledge()
    engine.finish(second)
    engine.step()
    assert engine.is_idle()


def test_each_of_two_requests_of_one_id_has_its_own_hints() -> None:
    engine = ToyEngine()
    first = engine.arrive("a", 2 * TOKENS)
    engine.schedule(first)
    assert len(engine.step().store_jobs) == 1
    params = {"kvtier": {"skip_store": True}}
    second = engine.arrive("a", [9] * 4 * TOKENS, kv_transfer_params=params)
    engine.connector.request_finished(first)  # too late: the id is the second one's
    engine.acknowledge()
    engine.tables.clear()
    engine.schedule(second)
    assert not engine.step().store_jobs
    engine.finish(second)
    assert engine.is_idle()
    assert not engine.cache.bench.manager.requests


def test_a_load_of_a_former_request_may_end_after_one_of_the_same_id() -> None:
    engine = ToyEngine()
    loads = {}
    prompts = {number: [number] * (4 * TOKENS + 1) for number in (7, 9)}
    for number, prompt in prompts.items():
        engine.fill(f"writer {number}", prompt)
    for number, prompt in prompts.items():
        request = engine.arrive("a", prompt)
        assert engine.match(request) == 4 * TOKENS
        engine.load(request, 4 * TOKENS)
        loads[number] = engine.step().load_jobs
        if number == 7:
            engine.finish(request)
    ram = engine.cache.bench.ram
    (first,), (second,) = loads.values()
    engine.acknowledge(second)
    pinned = {copy.slot for copy in ram.copies.values() if copy.pins}
    assert pinned == {*loads[7][first].slots.slots}
    engine.acknowledge(first)
    assert not any(copy.pins for copy in ram.copies.values())


# -- acknowledgements, reset, figures ----------------------------------------------------------


def test_a_job_ends_when_all_ranks_acknowledged_it() -> None:
    engine = ToyEngine(ranks=3)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    engine.acknowledge(job_id, ranks=2)
    assert not engine.is_idle()
    assert engine.match(engine.arrive("b", 48)) is None
    engine.acknowledge(job_id)
    assert engine.match(engine.arrive("c", 48)) == 2 * TOKENS
    engine.acknowledge(job_id)  # one rank too many is ignored


def test_after_a_reset_nothing_hits_and_late_answers_are_ignored() -> None:
    engine = ToyEngine(slots=(8, 16))
    engine.fill("a", 2 * TOKENS)
    running = engine.arrive("b", [8] * 2 * TOKENS)
    engine.schedule(running, TOKENS)
    (store,) = engine.step().store_jobs
    loading = engine.arrive("c", 40)
    engine.load(loading, engine.match(loading) or 0)
    (load,) = engine.step().load_jobs
    engine.finish(engine.arrive("d", TOKENS))
    engine.connector.reset_cache()
    assert engine.step().jobs_to_flush == {store}, "a load's blocks are given to nobody"
    engine.acknowledge(store, load)
    assert engine.match(engine.arrive("e", 48)) == 0
    engine.schedule(running)
    assert not engine.step().store_jobs, "it has KV of before the reset"


def test_a_store_that_a_reset_finds_unsent_is_sent_and_ends_in_the_same_step() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, TOKENS)
    engine.step()
    engine.acknowledge()
    request.num_computed_tokens += TOKENS
    engine.tables["a"][0].append(engine.take())
    engine.finish(request)
    engine.connector.reset_cache()
    metadata = engine.step()
    assert len(metadata.store_jobs) == 1
    assert set(metadata.store_jobs) == metadata.jobs_to_flush
    engine.acknowledge()
    assert engine.match(engine.arrive("b", 3 * TOKENS)) == 0
    engine.step()
    assert engine.is_idle()


def test_a_reset_between_allocation_and_step_is_an_error() -> None:
    engine = ToyEngine()
    engine.fill("a", 2 * TOKENS)
    request = engine.arrive("b", 40)
    engine.load(request, engine.match(request) or 0)
    with pytest.raises(KvtierError, match="cannot reset the cache"):
        engine.connector.reset_cache()


def test_a_request_may_be_finished_twice() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 20)
    assert engine.cache.service.is_active
    request.over = True
    engine.connector.request_finished(request)
    engine.connector.request_finished(request)
    assert not engine.cache.service.is_active


def test_copies_are_reported_once() -> None:
    engine = ToyEngine()
    assert not engine.cache.service.take_transfers()
    copied = Transfers()
    copied.record("gpu", "ram", nbytes=4096, seconds=0.5)
    engine.connector.update_connector_output(WorkerOutput(transfers=copied))
    assert engine.cache.service.take_transfers().totals() == {"gpu_to_ram": (4096, 0.5)}
    assert not engine.cache.service.take_transfers()


def test_the_stepped_engine_has_all_that_the_real_one_has() -> None:
    real, stepped = ({name for name in dir(each) if name[0] != "_"} for each in ENGINES)
    assert real <= stepped


# -- what a step costs -------------------------------------------------------------------------


def test_a_step_in_which_requests_only_generate_calls_nothing() -> None:
    engine = ToyEngine(slots=(512,), store_decode=True)
    requests = [engine.arrive(str(number), [number] * 20) for number in range(64)]
    for request in requests:
        engine.schedule(request)
    engine.step()
    engine.acknowledge()
    list(engine.cache.service.take_events())
    engine.step()
    for _ in range(10):
        engine.counted.calls.clear()
        for request in requests:
            request.tokens.append(8)
            engine.schedule(request)
        assert engine.step() is NOTHING_TO_DO
        assert not engine.counted.calls, "of prepare_store, get_blocks, end_step or any other"
    request = requests[0]
    for stores in (0, 1):
        request.tokens.append(8)
        engine.schedule(request)
        assert len(engine.step().store_jobs) == stores, "of the chunk that 32 tokens complete"
    assert engine.counted.calls == {"get_blocks": 1, "prepare_store": 1}


def test_a_step_that_only_generates_ends_the_jobs_of_earlier_steps() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS + 4)
    engine.schedule(request)
    engine.step()
    engine.acknowledge()
    engine.counted.calls.clear()
    request.tokens.append(8)
    engine.schedule(request)
    engine.step()
    assert engine.counted.calls["end_step"] == 1


def test_a_step_that_only_generates_flushes_the_stores_that_a_reset_found() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS + 4)
    engine.schedule(request)
    (store,) = engine.step().store_jobs
    engine.connector.reset_cache()
    request.tokens.append(8)
    engine.schedule(request)
    assert engine.step().jobs_to_flush == {store}


def test_where_answers_are_not_stored_no_step_of_theirs_calls_anything() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    engine.step()
    engine.acknowledge()
    list(engine.cache.service.take_events())
    engine.step()
    engine.counted.calls.clear()
    for _ in range(3 * TOKENS):
        request.tokens.append(8)
        engine.schedule(request)
        assert engine.step() is NOTHING_TO_DO
    assert not engine.counted.calls


# -- groups ------------------------------------------------------------------------------------


def test_a_tracked_request_says_which_chunks_it_has() -> None:
    engine = ToyEngine(blocks_per_chunk=2)
    request = engine.arrive("a", 5 * TOKENS)
    tracked = TrackedRequest(request, build_layouts(engine.options))
    tracked.extend_keys()
    hashes = request.block_hashes
    ends = {make_key(hashes[1], 0): 2 * TOKENS, make_key(hashes[3], 0): 4 * TOKENS}
    assert chunk_positions(tracked) == ends


def test_keys_of_tokens_that_an_engine_replaced_are_replaced() -> None:
    engine = ToyEngine(FULL, CacheGroup(2 * TOKENS, 1))
    request = engine.arrive("a", 4 * TOKENS)
    tracked = TrackedRequest(request, build_layouts(engine.options))
    tracked.extend_keys()
    for tokens in ([7] * 3 * TOKENS + [9] * TOKENS, [7] * 2 * TOKENS + [9], [7] * 5 * TOKENS):
        request.tokens = list(tokens)
        tracked.extend_keys()
        wanted = TrackedRequest(request, build_layouts(engine.options))
        wanted.extend_keys()
        assert tracked.keys == wanted.keys


def test_a_context_of_a_foreign_class_is_refused() -> None:
    @dataclass(frozen=True)
    class Foreign:
        req_id: str = "a"
        kv_transfer_params: None = None

    with pytest.raises(UnsupportedError, match="Foreign has no list"):
        chunk_positions(Foreign())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SchedulerOptions((), 16), "no KV cache group"),
        (SchedulerOptions((CacheGroup(24),), 16), "whole number of hashes"),
        (
            SchedulerOptions((CacheGroup(16, 0, Reach.STATE),), 16, blocks_per_chunk=4),
            "set engine.blocks_per_chunk: 1",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(options: SchedulerOptions, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        build_layouts(options)
