"""Questions of the manager to a shared tier: which chunks it has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.keys import ChunkKey
from kvtier.manager import CostModel, GroupReach, ManagerLimits, Reach
from kvtier.policies.base import RequestTerms
from kvtier.types import Job, Outcome, Purpose, QuestionPart, TransferResult
from tests.support.workbench import Workbench, prefix

DONE, MISSING = Outcome.DONE, Outcome.MISSING


def make_bench(
    *capacities: int,
    direct_loads: bool = False,
    cost_model: CostModel | None = None,
    groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
) -> Workbench:
    """Return a workbench whose last tier is shared."""
    limits = ManagerLimits(
        pin_budget=capacities[0],
        reserve=0.0,
        queue=1024,
        direct_loads=direct_loads,
        lookup_timeout_s=0.07,
    )
    return Workbench(
        *capacities, limits=limits, cost_model=cost_model, groups=groups, shared=True
    )


def ask(bench: Workbench, keys: Sequence[ChunkKey], req_id: str = "reader") -> Job:
    """Look up ``keys`` and return the question that this plans."""
    assert bench.look(keys, req_id) is None
    (question,) = bench.manager.take_jobs()
    assert question.purpose is Purpose.QUESTION
    return question


def test_a_request_asks_once_for_the_chunks_that_the_other_tiers_lack() -> None:
    bench = make_bench(8, 16)
    bench.store(prefix(2))
    bench.settle()
    question = ask(bench, prefix(5))
    assert question.keys == prefix(5)[2:]
    assert (question.source, question.destination) == ("nvme", "nvme")
    assert question.timeout_s == 0.07
    assert bench.look(prefix(5)) is None, "the answer has not arrived"
    assert bench.manager.can_skip_step, "no step has work before the answer"
    bench.finish(question, DONE, DONE, MISSING)
    assert bench.look(prefix(5)) is None, "the chunks are being promoted"
    (promotion,) = bench.step()
    assert promotion.keys == prefix(5)[2:4]
    bench.finish(promotion)
    assert bench.look(prefix(5)) == 4


def test_found_chunks_are_loaded_directly_if_loads_are_direct() -> None:
    bench = make_bench(8, 16, direct_loads=True)
    bench.finish(ask(bench, prefix(3)), DONE, DONE, MISSING)
    assert bench.look(prefix(3)) == 2
    plan = bench.manager.prepare_load(prefix(2), "reader")
    (promotion,) = bench.manager.take_jobs()
    assert promotion.keys == prefix(2)
    bench.finish(promotion)
    bench.manager.complete_load("reader", plan.load_id)
    assert bench.tiers[1].counters.hits == 2


def test_no_question_without_a_shared_tier_whatever_its_timeout_would_be() -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=1024, lookup_timeout_s=0.07)
    bench = Workbench(8, 16, limits=limits)
    assert bench.look(prefix(2)) == 0
    assert bench.manager.take_jobs() == []


def test_nothing_is_asked_if_ram_has_every_chunk() -> None:
    bench = make_bench(8, 16)
    bench.store(prefix(3))
    bench.settle()
    assert bench.look(prefix(3)) == 3
    assert bench.manager.take_jobs() == []


@pytest.mark.parametrize(
    "outcome", [Outcome.EXPIRED, Outcome.FAILED, Outcome.REFUSED, Outcome.CANCELLED]
)
def test_a_request_without_an_answer_reads_nothing_from_the_tier(outcome: Outcome) -> None:
    bench = make_bench(2, 16)
    bench.store(prefix(2))
    bench.settle()
    bench.store(prefix(2, of=1))  # evicts the first two, which the shared tier has
    bench.settle()
    assert bench.resident(1) >= set(prefix(2))
    bench.finish(ask(bench, prefix(2)), outcome)
    assert bench.look(prefix(2)) == 0


def expire(bench: Workbench, question: Job) -> None:
    """Let the deadline of a request's question pass."""
    bench.finish(question, Outcome.EXPIRED, settled=False)
    assert bench.look(prefix(3)) == 0


def test_a_request_does_not_use_an_answer_after_its_deadline() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(3))
    expire(bench, question)
    bench.finish(question, DONE)
    assert bench.look(prefix(3)) == 0
    assert bench.step() == []


def test_chunks_found_too_late_are_not_put_again() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(3))
    expire(bench, question)
    bench.finish(question, DONE, DONE, MISSING)
    assert bench.resident(1) == set(prefix(2))
    bench.store(prefix(3))
    (demotion,) = bench.step()
    assert demotion.keys == prefix(3)[2:]


def test_a_chunk_reported_missing_too_late_is_not_asked_for_again() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(3))
    expire(bench, question)
    bench.finish(question, MISSING)
    assert bench.look(prefix(3), "second") == 0
    assert bench.manager.take_jobs() == []


def test_a_late_answer_leaves_the_next_question_of_its_request_open() -> None:
    bench = make_bench(8, 16)
    late = ask(bench, prefix(3))
    expire(bench, late)
    bench.manager.end_step(started=["reader"])
    bench.manager.end_step(preempted=["reader"])
    question = ask(bench, prefix(3))
    bench.finish(late, DONE)
    assert bench.look(prefix(3)) is None
    bench.finish(question, DONE)
    assert bench.look(prefix(3)) is None, "the chunks are being promoted"
    assert bench.step() != []


def test_a_late_answer_after_a_reset_is_ignored() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(3))
    expire(bench, question)
    bench.manager.reset()
    bench.finish(question, DONE)
    assert bench.resident(1) == set()


def test_an_answer_older_than_a_put_does_not_hide_the_chunk() -> None:
    bench = make_bench(2, 16)
    question = ask(bench, prefix(1))
    bench.store(prefix(1))
    (put,) = bench.step()
    bench.finish(question, MISSING)
    bench.finish(put)
    bench.store(prefix(2, of=1))  # evicts the chunk from RAM
    bench.settle()
    assert ask(bench, prefix(1), "second").keys == prefix(1)


def test_a_chunk_that_is_gone_when_it_is_read_is_a_miss_and_is_forgotten() -> None:
    bench = make_bench(8, 16)
    bench.finish(ask(bench, prefix(3)), DONE)
    assert bench.look(prefix(3)) is None
    (promotion,) = bench.step()
    bench.finish(promotion, DONE, MISSING, DONE)
    assert bench.look(prefix(3)) == 1
    assert prefix(3)[1] not in bench.resident(1)
    counters = bench.tiers[1].counters
    assert (counters.missing, counters.read_failed, counters.corrupt) == (1, 0, 0)


def test_a_remembered_chunk_that_is_reported_missing_is_forgotten_and_put_again() -> None:
    bench = make_bench(2, 16)
    bench.store(prefix(2))
    bench.settle()
    bench.store(prefix(2, of=1))
    bench.settle()
    bench.finish(ask(bench, prefix(2)), MISSING)
    assert bench.resident(1) == set(prefix(2, of=1))
    bench.store(prefix(2))
    (demotion,) = bench.step()
    assert demotion.keys == prefix(2)


def test_a_chunk_that_was_found_is_not_put_again() -> None:
    bench = make_bench(8, 16)
    bench.finish(ask(bench, prefix(2)), DONE)
    bench.manager.end_request("reader")
    bench.store(prefix(2))
    assert bench.step() == []
    assert bench.ram.dirty == 0


def test_a_key_that_was_missing_a_moment_ago_is_not_asked_for_again() -> None:
    bench = make_bench(8, 16)
    bench.finish(ask(bench, prefix(2)), MISSING)
    assert bench.look(prefix(2), "second") == 0
    assert bench.manager.take_jobs() == []
    bench.manager.end_step(now=2.0)
    assert ask(bench, prefix(2), "third").keys == prefix(2)


def test_nothing_is_asked_that_would_be_computed_anyway() -> None:
    slow = CostModel(tiers=2, chunk_nbytes=1 << 20, chunk_tokens=1, recompute_s_per_token=1e-6)
    bench = make_bench(8, 16, cost_model=slow)
    bench.finish(ask(bench, prefix(2)), DONE)
    assert bench.look(prefix(2)) is None
    (promotion,) = bench.step()
    bench.manager.apply(
        TransferResult(promotion.job_id, [DONE] * 2, nbytes=2 << 20, seconds=5.0)
    )
    assert bench.look(prefix(9, of=1), "other") == 0
    assert bench.manager.take_jobs() == []


def test_nothing_is_asked_while_the_tier_is_out_of_service() -> None:
    bench = make_bench(8, 16)
    bench.manager.set_out_of_service({1})
    assert bench.look(prefix(2)) == 0
    assert bench.manager.take_jobs() == []


def test_nothing_is_asked_for_a_request_that_may_not_load_from_the_tier() -> None:
    bench = make_bench(8, 16)
    bench.manager.begin_request("reader", RequestTerms(load_tiers=frozenset({0})))
    assert bench.look(prefix(2)) == 0
    assert bench.manager.take_jobs() == []


def test_a_preempted_request_asks_again() -> None:
    bench = make_bench(8, 16)
    bench.finish(ask(bench, prefix(2)), MISSING)
    assert bench.look(prefix(2)) == 0
    bench.manager.end_step(started=["reader"], now=5.0)
    bench.manager.end_step(preempted=["reader"], now=9.0)
    assert ask(bench, prefix(2)).keys == prefix(2)


def test_an_answer_after_the_end_of_its_request_is_remembered() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(2))
    bench.manager.end_request("reader")
    bench.finish(question, DONE)
    assert bench.resident(1) == set(prefix(2))
    assert bench.manager.requests == 0


def test_a_reset_ends_the_wait_for_an_answer() -> None:
    bench = make_bench(8, 16)
    question = ask(bench, prefix(2))
    bench.manager.reset()
    assert bench.look(prefix(2)) == 0
    bench.finish(question, DONE)
    assert bench.resident(1) == set()


def test_a_tier_that_remembers_few_chunks_keeps_as_many_as_it_can() -> None:
    bench = make_bench(8, 3)
    bench.finish(ask(bench, prefix(5)), DONE)
    assert len(bench.resident(1)) == 3
    assert bench.look(prefix(5)) is None
    bench.settle()
    assert bench.look(prefix(5)) == 3


def test_each_group_of_a_hybrid_model_asks_for_its_own_chunks() -> None:
    groups = (
        GroupReach(chunk_tokens=1),
        GroupReach(chunk_tokens=1, reach=Reach.WINDOW, window_tokens=3),
    )
    bench = make_bench(16, 32, groups=groups)
    keys = [*prefix(4), *prefix(4, group=1)]
    question = ask(bench, keys)
    assert question.keys == keys
    assert question.payload == [QuestionPart(4, 0, 1, True), QuestionPart(4, 0, 1, False)]
    bench.finish(question, DONE, DONE, DONE, MISSING, MISSING, DONE, DONE, DONE)
    assert bench.look(keys) is None
    bench.settle()
    assert bench.look(keys) == 3
