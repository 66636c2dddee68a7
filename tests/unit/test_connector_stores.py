"""What the scheduler half stores, and which stores must end before their blocks are written."""

from __future__ import annotations

from kvtier.connector.metadata import BlockSpec
from tests.unit.toy_engine import TOKENS, Offers, ToyEngine

FULL = (TOKENS, None)


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


def test_what_the_cache_has_already_is_offered_and_not_stored_again() -> None:
    engine = ToyEngine()
    engine.fill("a", 2 * TOKENS)
    offers = Offers(engine)
    request = engine.arrive("b", [7] * 2 * TOKENS + [8] * TOKENS)
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    assert offers.sizes == [3]
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


def test_a_window_stores_no_chunk_of_which_a_block_is_gone() -> None:
    engine = ToyEngine((TOKENS, 2 * TOKENS), blocks_per_chunk=2)
    request = engine.arrive("a", 8 * TOKENS)
    engine.schedule(request, 5 * TOKENS)
    engine.step()
    taken = engine.tables["a"][0][4]
    engine.schedule(request, blocks=[[taken, engine.take(), engine.take()]])
    (job,) = engine.step().store_jobs.values()
    assert job.blocks.first_blocks == (6,)
    engine.acknowledge()


def test_where_hits_end_far_apart_a_window_stores_the_tails_alone() -> None:
    engine = ToyEngine((4 * TOKENS, None), (TOKENS, 2 * TOKENS), store_decode=True)
    request = engine.arrive("a", 9 * TOKENS)
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    # Of the window: the last two blocks of each four, and of the nine that the prompt has.
    window = engine.tables["a"][1]
    full = engine.tables["a"][0]
    assert job.blocks.block_ids == (*full[:2], *(window[at] for at in (2, 3, 6, 7, 8)))


def test_the_true_end_of_a_request_is_a_tail_too() -> None:
    engine = ToyEngine((4 * TOKENS, None), (TOKENS, 2 * TOKENS), store_decode=True)
    request = engine.arrive("a", 4 * TOKENS)
    engine.schedule(request)
    engine.step()
    request.tokens += [9] * (2 * TOKENS)
    engine.schedule(request)
    assert not engine.step().store_jobs
    request.tokens.append(9)
    engine.finish(request)
    (job,) = engine.step().store_jobs.values()
    assert job.blocks.block_ids == tuple(engine.tables["a"][1][4:6])
    engine.acknowledge()


def test_sparse_retention_stores_what_the_prompt_and_a_shared_prefix_end_with() -> None:
    engine = ToyEngine(FULL, (TOKENS, 2 * TOKENS), retention_tokens=0)
    request = engine.arrive("a", 9 * TOKENS, shared_prefix_boundary=4 * TOKENS)
    engine.schedule(request)
    (job,) = engine.step().store_jobs.values()
    window = engine.tables["a"][1]
    assert job.blocks.block_ids[9:] == tuple(window[at] for at in (2, 3, 6, 7))
    engine.acknowledge()


# -- blocks that are given away ----------------------------------------------------------------


def test_stores_of_a_preempted_request_end_before_its_blocks_are_written() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    assert engine.step(preempted=["a", "unknown"]).jobs_to_flush == {job_id}
    assert engine.match(request) is None
    engine.acknowledge()
    assert engine.match(request) == 2 * TOKENS


def test_a_request_that_comes_back_has_the_blocks_it_gets_then() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, TOKENS)
    engine.step()
    engine.step(preempted=["a"])
    engine.acknowledge()
    engine.schedule(request, resumed=True)
    (job,) = engine.step().store_jobs.values()
    assert job.blocks == BlockSpec((engine.tables["a"][0][1],), (1,), (1,))
    engine.acknowledge()


def test_a_request_that_comes_as_a_new_one_again_has_the_blocks_it_is_told_then() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request, TOKENS)
    engine.step()
    engine.acknowledge()
    had = engine.tables["a"][0][0]
    engine.forget("a")
    engine.schedule(request, blocks=[[engine.take()]])
    (job,) = engine.step().store_jobs.values()
    assert job.blocks == BlockSpec((engine.tables["a"][0][1],), (1,), (1,))
    assert engine.tables["a"][0][0] == had
    engine.acknowledge()


def test_a_store_whose_block_was_given_away_ends_first() -> None:
    engine = ToyEngine()
    request = engine.arrive("a", 2 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    engine.finish(request)
    assert not engine.step().jobs_to_flush
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[engine.tables["a"][0][1]]])
    assert engine.step().jobs_to_flush == {job_id}
    engine.acknowledge()


def test_so_does_one_that_begins_in_the_step_that_gives_the_block_away() -> None:
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
    engine.finish(request)
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[engine.tables["a"][0][1]]])
    metadata = engine.step()
    (late,) = (at for at, job in metadata.store_jobs.items() if job.request_id == "a")
    assert metadata.jobs_to_flush == {late}
    engine.acknowledge()


def test_a_store_from_a_window_is_watched_from_its_beginning() -> None:
    engine = ToyEngine((TOKENS, 2 * TOKENS))
    request = engine.arrive("a", 4 * TOKENS)
    engine.schedule(request)
    (job_id,) = engine.step().store_jobs
    other = engine.arrive("b", [8] * TOKENS)
    engine.schedule(other, blocks=[[engine.tables["a"][0][0]]])
    assert engine.step().jobs_to_flush == {job_id}
    engine.acknowledge()
