"""What ranks report, added up in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.connector.metadata import FailedLoad, WorkerOutput
from kvtier.connector.transfers import Transfers
from kvtier.types import Outcome

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
            st.dictionaries(st.integers(0, 9), st.sampled_from([*Outcome][1:]), max_size=3),
        ),
        max_size=3,
    ),
)


@given(outputs, outputs, outputs)
def test_outputs_add_up_in_any_order(a: WorkerOutput, b: WorkerOutput, c: WorkerOutput) -> None:
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert a.aggregate(WorkerOutput()) == a


def test_a_load_that_failed_in_two_ranks_names_the_blocks_of_both() -> None:
    ranks = [
        WorkerOutput(
            {7: 1},
            {
                7: FailedLoad(
                    "a",
                    frozenset({1, 2}),
                    "b",
                    {0: Outcome.EXPIRED, 3: Outcome.CORRUPT, 4: Outcome.REFUSED},
                )
            },
        ),
        WorkerOutput(
            {7: 1},
            {
                7: FailedLoad(
                    "a", frozenset({2, 9}), "a", {3: Outcome.FAILED, 4: Outcome.FAILED}
                )
            },
        ),
    ]
    both = ranks[0].aggregate(ranks[1])
    assert both.completed_jobs == {7: 2}
    assert both.failed_loads == {
        7: FailedLoad(
            "a",
            frozenset({1, 2, 9}),
            "a",
            {0: Outcome.EXPIRED, 3: Outcome.CORRUPT, 4: Outcome.FAILED},
        )
    }
    assert both.invalid_block_ids == {1, 2, 9}
    assert both.failed_requests == {"a"}


def test_the_transfers_of_all_ranks_are_added_up() -> None:
    transfers = Transfers()
    transfers.record("gpu", "ram", nbytes=4096, seconds=0.5)
    one = WorkerOutput(transfers=transfers)
    assert one.aggregate(one).transfers.by_type == {"gpu_to_ram": [(4096, 0.5)] * 2}
    assert one.transfers.by_type == {"gpu_to_ram": [(4096, 0.5)]}
