"""What several ranks say, in any order and any step, comes to one answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.connector.aggregate import _MOST_LATE, OutputAggregator

from kvtier.connector.metadata import FailedLoad, TransferJob, WorkerOutput
from kvtier.connector.stats import ConnectorStats
from kvtier.errors import KvtierError
from kvtier.keys import ChunkKey
from tests.unit.toy_engine import TOKENS, ToyEngine


def done(*jobs: int) -> WorkerOutput:
    return WorkerOutput(completed_jobs=dict.fromkeys(jobs, 1))


def failed(job: int, *blocks: int, error: str = "") -> WorkerOutput:
    load = FailedLoad(f"request-{job}", frozenset(blocks), error)
    return WorkerOutput({job: 1}, {job: load})


def test_a_job_is_finished_when_the_last_rank_says_so() -> None:
    aggregator = OutputAggregator(3)
    assert aggregator.aggregate([done(1), None, done(1, 2)]).is_empty
    assert aggregator.pending == {1: 1, 2: 2}
    assert aggregator.aggregate([None, done(1), None]).completed_jobs == {1: 3}
    assert aggregator.aggregate([done(2), done(2), None]).completed_jobs == {2: 3}
    assert aggregator.pending == {}


def test_one_failing_rank_fails_the_load_but_only_when_all_are_done_with_it() -> None:
    aggregator = OutputAggregator(3)
    assert aggregator.aggregate([failed(7, 1, 2, error="b"), None, None]).is_empty
    assert aggregator.aggregate([None, failed(7, 2, 9, error="a"), None]).is_empty
    finished = aggregator.aggregate([None, None, done(7)])
    assert finished.completed_jobs == {7: 3}
    assert finished.failed_loads == {7: FailedLoad("request-7", frozenset({1, 2, 9}), "a")}
    assert finished.invalid_block_ids == {1, 2, 9}


def test_a_rank_that_left_is_not_waited_for_and_not_listened_to() -> None:
    aggregator = OutputAggregator(4)
    assert aggregator.aggregate([done(1, 2), done(1), done(1), None]).is_empty
    finished = aggregator.expect(3)
    assert finished.completed_jobs == {1: 4}
    assert finished.expected_ranks == 3
    assert aggregator.aggregate([None, None, None, failed(1, 5).aggregate(done(2))]).is_empty
    assert aggregator.pending == {2: 2}
    assert aggregator.aggregate([None, done(2), done(2)]).completed_jobs == {2: 4}


def test_a_rank_that_spoke_and_left_does_not_speak_for_one_that_stays() -> None:
    aggregator = OutputAggregator(3)
    assert aggregator.aggregate([done(1), None, done(1)]).is_empty
    assert aggregator.expect(2).completed_jobs == {}
    assert aggregator.pending == {1: 1}
    assert aggregator.aggregate([None, done(1)]).completed_jobs == {1: 3}


def test_new_ranks_are_waited_for_in_jobs_that_begin_with_them() -> None:
    aggregator = OutputAggregator(2)
    aggregator.begin([1])
    assert aggregator.aggregate([done(2), None]).is_empty
    told = aggregator.aggregate([WorkerOutput(expected_ranks=4), None, None, None])
    assert told.expected_ranks == 4
    assert aggregator.aggregate([done(1), done(1, 2), None, None]).completed_jobs == {
        1: 4,
        2: 4,
    }
    assert aggregator.aggregate([done(3), done(3), None, None]).is_empty
    assert aggregator.aggregate([None, None, done(3), done(3)]).completed_jobs == {3: 4}
    assert aggregator.ranks == 4


def test_statistics_of_all_ranks_are_added_up_at_once() -> None:
    stats = ConnectorStats({"gpu_to_ram": [{"op_size": 5, "op_time": 0.5}]}).to_dict()
    one = WorkerOutput(stats=stats)
    both = OutputAggregator(2).aggregate([one, one])
    assert ConnectorStats(both.stats).reduce() == {
        "gpu_to_ram_total_bytes": 10,
        "gpu_to_ram_total_time": 1.0,
    }


def test_a_forgotten_job_is_not_waited_for() -> None:
    aggregator = OutputAggregator(2)
    assert aggregator.aggregate([done(1), None]).is_empty
    aggregator.forget([1, 99])
    assert aggregator.pending == {}


def test_what_ranks_say_of_a_forgotten_job_opens_no_other() -> None:
    aggregator = OutputAggregator(2)
    aggregator.begin([1, 2])
    assert aggregator.aggregate([done(1), None]).is_empty
    aggregator.forget([1, 2, 3])
    assert aggregator.aggregate([None, failed(1, 5)]).is_empty
    for job in (2, 3):
        assert aggregator.aggregate([done(job), None]).is_empty
        assert aggregator.aggregate([None, done(job)]).is_empty
    assert aggregator.pending == {}
    assert not aggregator._late


def test_a_job_that_begins_counts_although_one_of_its_number_was_forgotten() -> None:
    aggregator = OutputAggregator(2)
    aggregator.forget([1])
    aggregator.begin([1])
    assert aggregator.aggregate([done(1), done(1)]).completed_jobs == {1: 2}


def test_ranks_that_never_say_what_they_owe_cost_a_bounded_amount_of_memory() -> None:
    aggregator = OutputAggregator(2)
    for job in range(2 * _MOST_LATE):
        aggregator.begin([job])
        aggregator.forget([job])
    assert len(aggregator._late) == _MOST_LATE
    job = 2 * _MOST_LATE - 1
    assert aggregator.aggregate([done(job), done(job)]).is_empty
    assert aggregator.pending == {}


class Crew:
    """A scheduler half, ranks that come and go, and the aggregator between them."""

    def __init__(self, ranks: int) -> None:
        self.engine = ToyEngine(ranks=ranks)
        self.aggregator = OutputAggregator(ranks)
        self.stored: list[str] = []
        self.loaded: list[str] = []
        self._running: dict[int, tuple[TransferJob, bool]] = {}
        service = self.engine.cache.service
        complete_store, complete_load = service.complete_store, service.complete_load

        def note_store(keys: Collection[ChunkKey], req_id: str) -> None:
            self.stored.append(req_id)
            complete_store(keys, req_id)

        def note_load(req_id: str) -> None:
            self.loaded.append(req_id)
            complete_load(req_id)

        service.complete_store = note_store  # type: ignore[method-assign]
        service.complete_load = note_load  # type: ignore[method-assign]

    def store(self, name: str) -> int:
        """Begin to store the one chunk of a request, which ends; return the job."""
        request = self.engine.arrive(name, chunk_of(name))
        self.engine.schedule(request)
        job_id = self._begin()
        self.engine.finish(request)
        return job_id

    def load(self, name: str, stored: str) -> int:
        """Begin to load what request ``stored`` had stored; return the job."""
        request = self.engine.arrive(name, [*chunk_of(stored), 1])
        self.engine.load(request, self.engine.match(request) or 0)
        return self._begin()

    def say(self, *outputs: WorkerOutput | None) -> None:
        """Let every rank say something, or nothing, in one step."""
        heard = self.aggregator.aggregate(outputs)
        cache = self.engine.cache
        for job_id in heard.completed_jobs:
            job, is_store = self._running.pop(job_id)
            slots, generations = job.slots.slots, job.slots.generations
            if job_id in heard.failed_loads:
                cache.truth.refuse(slots, generations)
            cache.finish(slots, stored=generations[0] if is_store else None)
        self.engine.half.update_connector_output(heard)

    def _begin(self) -> int:
        metadata = self.engine.step()
        self._running |= {job_id: (job, False) for job_id, job in metadata.load_jobs.items()}
        self._running |= {job_id: (job, True) for job_id, job in metadata.store_jobs.items()}
        (job_id,) = begun = {*metadata.load_jobs, *metadata.store_jobs}
        self.aggregator.begin(begun)
        return job_id


def chunk_of(name: str) -> list[int]:
    return [ord(name)] * TOKENS


def test_the_half_ends_each_job_once_and_with_its_last_rank_while_ranks_leave_and_come() -> (
    None
):
    crew = Crew(3)
    a, b, c = crew.store("a"), crew.store("b"), crew.store("c")
    crew.say(done(a), None, done(a, b))
    assert crew.stored == []

    crew.say(WorkerOutput(expected_ranks=2), None, None)
    assert crew.stored == [], "others than the one that left are not done"
    d = crew.store("d")
    crew.say(None, done(a))
    assert crew.stored == ["a"]
    load = crew.load("l", "a")
    crew.say(done(b, c, d), failed(load, 1))
    assert crew.stored == ["a"]

    crew.say(WorkerOutput(expected_ranks=4), None, None, None)
    e = crew.store("e")
    crew.say(None, done(b), done(e), None)
    assert crew.stored == ["a", "b"], "one of three ranks left, both others spoke"
    crew.say(None, done(c, d, e), None, done(e))
    assert crew.stored == ["a", "b", "c", "d"], "who came later has no part in them"
    assert crew.loaded == []
    crew.say(done(load), None, None, None)
    assert crew.loaded == ["l"]
    crew.say(done(e), None, None, None)
    assert crew.stored == ["a", "b", "c", "d", "e"]

    assert crew.aggregator.pending == {}
    crew.engine.step()
    assert crew.engine.is_idle()
    assert crew.loaded == ["l"]
    found = {
        name: crew.engine.match(crew.engine.arrive(name.upper(), chunk_of(name)))
        for name in "abcde"
    }
    assert found == {"a": 0} | dict.fromkeys("bcde", TOKENS), "what did not load is gone"


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_at_all_are_refused(ranks: int) -> None:
    with pytest.raises(KvtierError, match=f"at least one rank, not {ranks}"):
        OutputAggregator(ranks)
    with pytest.raises(KvtierError, match=f"at least one rank, not {ranks}"):
        OutputAggregator(1).expect(ranks)


@dataclass
class Model:
    """The same in sets: who was given each job, and who said that it is done."""

    present: set[int]
    given: dict[int, set[int]] = field(default_factory=dict)
    said: dict[int, set[int]] = field(default_factory=dict)
    blocks: dict[int, set[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def begin(self, job: int) -> None:
        self.given[job] = set(self.present)
        self.said[job] = set()
        self.blocks[job] = set()

    def say(self, job: int, rank: int, blocks: set[int]) -> None:
        if rank in self.present:
            self.said[job].add(rank)
            self.blocks[job] |= blocks

    def take_finished(self) -> dict[int, set[int]]:
        """Return what finished: nobody who is still there has to say anything."""
        now = {
            job
            for job, ranks in self.given.items()
            if job not in self.finished and ranks & self.present <= self.said[job]
        }
        self.finished |= now
        return {job: self.blocks[job] for job in now}


@given(st.data())
def test_any_order_of_ranks_jobs_and_leavers_comes_to_what_a_plain_model_says(
    data: st.DataObject,
) -> None:
    ranks = data.draw(st.integers(1, 4), label="ranks")
    model = Model(set(range(ranks)))
    aggregator = OutputAggregator(ranks)
    for job in range(data.draw(st.integers(1, 6), label="jobs")):
        model.begin(job)
        aggregator.begin([job])
    pairs = [(job, rank) for job, given in model.given.items() for rank in sorted(given)]
    order = data.draw(st.permutations(pairs), label="order")
    while order:
        if len(model.present) > 1 and data.draw(st.booleans(), label="the last leaves"):
            model.present.discard(max(model.present))
            check(aggregator.expect(len(model.present)), model.take_finished())
        spoken = data.draw(st.integers(1, len(order)), label="acknowledged in this step")
        outputs: dict[int, WorkerOutput] = {}
        for job, rank in order[:spoken]:
            bad = data.draw(st.sets(st.integers(0, 5), max_size=2), label="bad blocks")
            model.say(job, rank, bad)
            output = failed(job, *bad) if bad else done(job)
            outputs[rank] = outputs.get(rank, WorkerOutput()).aggregate(output)
        order = order[spoken:]
        check(
            aggregator.aggregate([outputs.get(rank) for rank in range(ranks)]),
            model.take_finished(),
        )
    assert aggregator.pending == {}
    assert model.finished == model.given.keys()


def check(output: WorkerOutput, expected: dict[int, set[int]]) -> None:
    assert output.completed_jobs.keys() == expected.keys()
    assert {job: set(load.block_ids) for job, load in output.failed_loads.items()} == {
        job: blocks for job, blocks in expected.items() if blocks
    }


outputs = st.builds(
    WorkerOutput,
    completed_jobs=st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=3),
    failed_loads=st.dictionaries(
        st.integers(0, 4),
        st.builds(
            FailedLoad,
            st.just("request"),
            st.frozensets(st.integers(0, 9), max_size=3),
            st.sampled_from(["", "a", "b"]),
        ),
        max_size=3,
    ),
    expected_ranks=st.integers(0, 3),
)


@given(outputs, outputs, outputs)
def test_in_which_order_outputs_are_added_does_not_matter(
    a: WorkerOutput, b: WorkerOutput, c: WorkerOutput
) -> None:
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert a.aggregate(WorkerOutput()) == a
