"""Which chunks the scheduler side stores, and which stores end before a block is reused."""

from __future__ import annotations

import pytest

from kvtier.connector.groups import CacheGroup
from kvtier.connector.metadata import BlockSpec
from kvtier.connector.protocols import BoundaryState
from kvtier.manager import Reach
from tests.unit.toy_engine import FULL, TOKENS, ToyEngine, ToyRequest, window


def stored_blocks(engine: ToyEngine) -> list[int]:
    """Return the blocks that the next step stores."""
    jobs = engine.step().store_jobs.values()
    return [block for job in jobs for block in job.blocks.block_ids]


# -- stores ------------------------------------------------------------------------------------


def test_chunks_are_stored_as_they_become_whole() -> None:
    engine = ToyEngine(blocks_per_chunk=2, store_decode=True)
    request = engine.arrive("a", 5 * TOKENS)
    engine.schedule(request, 3 * TOKENS)
    (first,) = engine.step().store_jobs.values()
    assert first.blocks == BlockSpec(tuple(engine.tables["a"][0][:2]), (2,), (0,))
    engine.schedule(request)
    (second,) = engine.step().store_jobs.values()
    assert second.blocks == BlockSpec(tuple(engine.tables["a"][0][2:4]), (2,), (2,))
    request.tokens += [9] * TOKENS
    engine.schedule(request)
    (third,) = engine.step().store_jobs.values()
    assert third.blocks.first_blocks == (4,)
    engine.acknowledge()
    assert engine.counted.offers == [1, 1, 1]


def test_answers_are_stored_only_where_that_is_wanted() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    engine.step()
    request.tokens += [9] * 2 * TOKENS
    engine.schedule(request)
    assert not engine.step().store_jobs
    engine.finish(request)
    assert not engine.step().store_jobs
    engine.acknowledge()


def test_tokens_that_are_scheduled_and_not_known_yet_wait_for_the_next_step() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS - 1)
    engine.schedule(request)
    engine.step()
    engine.schedule(request, 1)
    assert not engine.step().store_jobs
    request.tokens.append(9)
    engine.schedule(request, 1)
    assert len(engine.step().store_jobs) == 1
    engine.acknowledge()


def test_the_last_chunk_is_stored_when_its_request_ended() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS)
    engine.schedule(request)
    engine.step()
    request.tokens += [9] * TOKENS
    request.num_computed_tokens += TOKENS - 1
    engine.schedule(request, 1)
    request.tokens.pop()
    engine.step()
    request.tokens += [9, 9]
    engine.finish(request)
    (job,) = engine.step().store_jobs.values()
    assert job.blocks.first_blocks == (1,)
    engine.acknowledge()


def test_the_token_sampled_last_does_not_make_a_chunk_whole() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS)
    engine.schedule(request)
    engine.step()
    request.tokens += [9] * (TOKENS - 1)
    engine.schedule(request, TOKENS)
    engine.step()
    request.tokens.append(9)
    assert request.num_computed_tokens == request.num_tokens == 2 * TOKENS
    engine.finish(request)
    assert not engine.step().store_jobs
    engine.acknowledge()


def test_a_request_can_limit_what_is_stored() -> None:
    engine = ToyEngine()
    limit = {"max_offload_tokens": 2 * TOKENS}
    request = engine.arrive("a", 4 * TOKENS, kv_transfer_params=limit)
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    assert len(job.slots.slots) == 2
    engine.acknowledge()


def test_chunks_that_the_cache_has_are_offered_and_not_stored_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 2 * TOKENS)
    engine.counted.offers.clear()
    request = engine.arrive("b", [7] * 2 * TOKENS + [8] * TOKENS)
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    assert engine.counted.offers == [3]
    assert job.blocks == BlockSpec((engine.tables["b"][0][2],), (1,), (2,))
    engine.acknowledge()


def test_a_store_without_room_is_offered_again_and_a_growing_one_whole() -> None:
    engine = ToyEngine(slots=(4,))
    engine.fill("a", 4 * TOKENS)
    reader = engine.arrive("r", 70)
    engine.load(reader, engine.match(reader) or 0)
    engine.step()
    request = engine.arrive("b", [8] * 4 * TOKENS)
    engine.schedule(request, 2 * TOKENS)
    assert not engine.step().store_jobs
    engine.acknowledge()
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    assert len(job.slots.slots) == 4
    engine.acknowledge()


def test_a_request_that_ends_after_a_refusal_stores_what_fits() -> None:
    engine = ToyEngine(slots=(4,))
    engine.fill("a", 3 * TOKENS)
    reader = engine.arrive("r", 3 * TOKENS + 1)
    engine.load(reader, engine.match(reader) or 0)
    engine.step()
    request = engine.arrive("b", [8] * 2 * TOKENS)
    engine.schedule(request)
    assert not engine.step().store_jobs
    engine.finish(request)
    (job,) = engine.step().store_jobs.values()
    assert len(job.slots.slots) == 1
    ram = engine.cache.service.statistics().tiers[0]
    assert ram.refused_chunks == 1
    engine.acknowledge()


def test_kv_that_is_not_what_its_keys_say_is_not_stored() -> None:
    engine = ToyEngine()
    is_right = [True, False]
    request = ToyRequest("a", [7] * 2 * TOKENS, 2 * TOKENS)
    engine.adopt(request, may_store=lambda: is_right.pop(0))
    engine.schedule(request, TOKENS)
    assert len(engine.step().store_jobs) == 1
    engine.schedule(request)
    assert not engine.step().store_jobs
    engine.acknowledge()


# -- streamed prompts --------------------------------------------------------------------------


def continue_prompt(request: ToyRequest, tokens: list[int]) -> None:
    """Add the next part of a streamed prompt behind what was computed."""
    request.tokens[request.num_computed_tokens :] = tokens
    request.num_prompt_tokens = len(request.tokens)


def test_a_continued_prompt_is_stored_under_the_keys_of_its_tokens() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", TOKENS)
    engine.schedule(request)
    engine.step()
    request.tokens += [8] * (TOKENS - 1)
    engine.schedule(request)
    engine.step()
    request.tokens.append(9)  # sampled, and discarded: it would have ended a chunk
    continue_prompt(request, [5] * (TOKENS + 1))
    engine.forget(request)
    engine.schedule(request)
    assert len(stored_blocks(engine)) == 2
    engine.acknowledge()
    engine.finish(request)
    tokens = [7] * TOKENS + [8] * (TOKENS - 1) + [5] * (TOKENS + 1)
    assert engine.match(engine.arrive("b", [*tokens, 1])) == 3 * TOKENS
    tokens[2 * TOKENS - 1] = 9
    assert engine.match(engine.arrive("c", [*tokens, 1])) == TOKENS


def test_where_later_parts_of_a_prompt_are_not_trusted_they_are_not_stored() -> None:
    engine = ToyEngine(continues_from_right_kv=False)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, TOKENS)
    engine.step()
    engine.step(preempted=["a"])
    engine.acknowledge()
    engine.schedule(request)  # anew, and not continued
    assert len(engine.step().store_jobs) == 1
    continue_prompt(request, [5] * TOKENS)
    engine.forget(request)
    engine.schedule(request)
    assert not engine.step().store_jobs
    engine.acknowledge()


# -- windows and states ------------------------------------------------------------------------


def test_a_window_stores_no_chunk_of_which_a_block_was_left_behind() -> None:
    engine = ToyEngine(window(2 * TOKENS, index=0), blocks_per_chunk=2)
    request = engine.arrive("a", 8 * TOKENS)
    engine.schedule(request, 5 * TOKENS)
    engine.step()
    engine.acknowledge()
    engine.tables["a"][0][:3] = [0] * 3
    engine.counted.offers.clear()
    engine.schedule(request)
    assert len(stored_blocks(engine)) == 4
    assert engine.counted.offers == [2], "chunks of earlier windows are not offered again"
    engine.acknowledge()


def test_where_hits_end_far_apart_a_window_stores_the_chunks_before_these_alone() -> None:
    groups = (CacheGroup(4 * TOKENS), window(2 * TOKENS))
    engine = ToyEngine(*groups, store_decode=True)
    request = engine.arrive("a", 9 * TOKENS)
    engine.schedule(request)
    full, windowed = engine.tables["a"]
    assert stored_blocks(engine) == [*full[:2], *(windowed[at] for at in (2, 3, 6, 7))]
    engine.acknowledge()


@pytest.mark.parametrize("first", [3, 4, 5, 9])
def test_a_window_is_stored_however_the_prompt_is_cut(first: int) -> None:
    engine = ToyEngine(CacheGroup(4 * TOKENS), window(2 * TOKENS))
    request = engine.arrive("a", 9 * TOKENS)
    engine.schedule(request, first * TOKENS)
    found = stored_blocks(engine)
    engine.schedule(request)
    found += stored_blocks(engine)
    full, windowed = engine.tables["a"]
    assert sorted(found) == sorted([*full[:2], *(windowed[at] for at in (2, 3, 6, 7))])
    engine.acknowledge()
    assert engine.match(engine.arrive("b", 10 * TOKENS)) == 8 * TOKENS


def test_with_sparse_retention_windows_are_stored_at_the_prompts_end_and_a_shared_prefix() -> (
    None
):
    engine = ToyEngine(FULL, window(2 * TOKENS), retention_tokens=0)
    request = engine.arrive("a", 9 * TOKENS, shared_prefix_boundary=4 * TOKENS)
    engine.schedule(request)
    windowed = engine.tables["a"][1]
    assert stored_blocks(engine)[9:] == [windowed[at] for at in (2, 3, 6, 7)]
    engine.acknowledge()


def test_generated_tokens_have_their_window_at_every_end_of_a_hit_in_spite_of_retention() -> (
    None
):
    engine = ToyEngine(FULL, window(2 * TOKENS), retention_tokens=0, store_decode=True)
    request = engine.arrive("a", 4 * TOKENS)
    engine.schedule(request)
    engine.step()
    for _ in range(2):
        request.tokens += [8] * TOKENS
        engine.schedule(request)
        engine.step()
    engine.acknowledge()
    for chunks in (3, 5, 6):
        tokens = request.tokens[: chunks * TOKENS]
        assert engine.match(engine.arrive(f"b{chunks}", [*tokens, 1])) == chunks * TOKENS
    assert engine.match(engine.arrive("c", [*request.tokens[: 2 * TOKENS], 1])) == 0


def test_local_attention_stores_what_the_chunk_of_attention_has_before_the_end() -> None:
    engine = ToyEngine(FULL, CacheGroup(TOKENS, 1, Reach.LOCAL, 4 * TOKENS), retention_tokens=0)
    request = engine.arrive("a", 7 * TOKENS)
    engine.schedule(request)
    local = engine.tables["a"][1]
    assert stored_blocks(engine)[7:] == [local[at] for at in (4, 5)]
    engine.acknowledge()
    assert engine.match(engine.arrive("b", 6 * TOKENS + 1)) == 6 * TOKENS


def test_states_are_stored_when_they_are_handed_over() -> None:
    group = CacheGroup(2 * TOKENS, 1, Reach.STATE, is_handed_over=True)
    engine = ToyEngine(FULL, group)
    request = engine.arrive("a", 5 * TOKENS)
    engine.schedule(request)
    states = [BoundaryState(1, 77, 4 * TOKENS), BoundaryState(1, 78, 5 * TOKENS)]
    (job,) = engine.step(states={"a": states, "unknown": states}).store_jobs.values()
    assert job.blocks == BlockSpec((*engine.tables["a"][0], 77), (5, 1), (0, 1))
    engine.acknowledge()
    assert engine.match(engine.arrive("b", 6 * TOKENS)) == 4 * TOKENS


@pytest.mark.parametrize("first", [1, 2])
def test_a_drafts_last_prompt_chunk_is_stored_when_the_prompt_is_computed(first: int) -> None:
    engine = ToyEngine(CacheGroup(TOKENS, is_draft=True), store_decode=True)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, first * TOKENS)
    engine.step()
    engine.schedule(request)
    engine.step()
    assert sum(engine.counted.offers) == 2
    request.tokens += [9] * TOKENS
    engine.schedule(request)
    assert not engine.step().store_jobs, "the newest tokens may be rewritten"
    request.tokens += [9] * TOKENS
    engine.schedule(request)
    assert len(stored_blocks(engine)) == 1
    engine.acknowledge()


# -- blocks that are given away ----------------------------------------------------------------


def test_stores_of_a_preempted_request_end_before_it_is_looked_up() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    engine.step()
    engine.step(preempted=["a", "unknown"])
    assert engine.match(request) is None
    engine.acknowledge()
    assert engine.match(request) == 2 * TOKENS


def test_a_request_that_was_preempted_offers_its_chunks_from_its_new_blocks() -> None:
    engine = ToyEngine(slots=(2,))
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    engine.step()
    engine.step(preempted=["a"])
    engine.acknowledge()
    engine.fill("b", [8] * 2 * TOKENS)  # evicts the first one's chunks
    assert engine.match(request) == 0
    engine.schedule(request)
    assert stored_blocks(engine) == engine.tables["a"][0]
    engine.acknowledge()


def test_a_store_whose_block_was_given_away_ends_first() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    block = engine.tables["a"][0][1]
    engine.finish(request)
    assert not engine.step().jobs_to_flush
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[block]])
    assert engine.step().jobs_to_flush == {job_id}
    engine.acknowledge()


def test_a_store_whose_block_is_given_to_a_load_ends_first() -> None:
    engine = ToyEngine()
    engine.fill("a", TOKENS)
    request = engine.arrive("b", [8] * 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    engine.finish(request)
    engine.give_again(2)
    reader = engine.arrive("c", 2 * TOKENS)
    engine.load(reader, engine.match(reader) or 0)
    metadata = engine.step()
    assert metadata.load_jobs
    assert metadata.jobs_to_flush == {job_id}
    engine.acknowledge()


def test_a_store_that_begins_as_its_block_is_given_away_ends_first() -> None:
    engine = ToyEngine(store_decode=True)
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, TOKENS)
    engine.step()
    engine.acknowledge()
    engine.schedule(request, TOKENS)
    request.tokens.pop()
    engine.step()
    request.tokens += [7, 9]
    request.num_prompt_tokens = TOKENS
    block = engine.tables["a"][0][1]
    engine.finish(request)
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[block]])
    metadata = engine.step()
    (late,) = (at for at, job in metadata.store_jobs.items() if job.request_id == "a")
    assert metadata.jobs_to_flush == {late}
    engine.acknowledge()


def test_a_store_of_what_a_step_computes_is_not_flushed_for_the_blocks_of_that_step() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    metadata = engine.step()
    assert metadata.store_jobs
    assert not metadata.jobs_to_flush
    assert not engine.step().jobs_to_flush
    engine.acknowledge()


def test_a_store_from_a_block_that_a_window_leaves_behind_ends_before_it_is_given_away() -> (
    None
):
    engine = ToyEngine(window(2 * TOKENS, index=0))
    request = engine.arrive("a", 4 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[engine.tables["a"][0][0]]])
    assert engine.step().jobs_to_flush == {job_id}
    engine.acknowledge()


def test_a_store_whose_block_is_overwritten_before_the_flush_is_lost() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    block = engine.tables["a"][0][1]
    engine.finish(request)
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[block]])
    metadata = engine.step(overwritten=[block])
    assert metadata.lost_stores == metadata.jobs_to_flush == {job_id}
    assert engine.step(overwritten=[block]).lost_stores == frozenset()
    engine.acknowledge()
