"""Transfers by type: recorded, added up over workers, taken."""

from __future__ import annotations

import pickle

from hypothesis import given, strategies

from kvtier.connector.transfers import Transfers, transfer_type_of

STORE, LOAD = ("gpu", "ram"), ("ram", "gpu")

operations = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([STORE, LOAD, ("ram", "nvme")]),
        strategies.integers(0, 1 << 40),
        strategies.integers(0, 1000),
    )
)


def recorded(*entries: tuple[tuple[str, str], int, float]) -> Transfers:
    transfers = Transfers()
    for ends, nbytes, seconds in entries:
        transfers.record(*ends, nbytes=nbytes, seconds=seconds)
    return transfers


def test_every_transfer_is_kept_with_its_size_and_its_time() -> None:
    transfers = recorded((STORE, 10, 0.5), (LOAD, 7, 0.25), (STORE, 30, 1.0))
    assert transfers.by_type == {
        "gpu_to_ram": [(10, 0.5), (30, 1.0)],
        "ram_to_gpu": [(7, 0.25)],
    }


@given(operations, operations)
def test_the_transfers_of_two_workers_add_up(
    first: list[tuple[tuple[str, str], int, float]],
    second: list[tuple[tuple[str, str], int, float]],
) -> None:
    one, other = recorded(*first), recorded(*second)
    one.add(other)
    totals = one.totals()
    for ends in (STORE, LOAD, ("ram", "nvme")):
        of_type = [entry for entry in first + second if entry[0] == ends]
        name = transfer_type_of(*ends)
        sums = sum(size for _, size, _ in of_type), sum(seconds for _, _, seconds in of_type)
        assert totals.get(name, (0, 0)) == sums
        assert len(one.by_type.get(name, ())) == len(of_type)
    assert other == recorded(*second)


def test_added_transfers_do_not_change_with_their_origin() -> None:
    one, other = Transfers(), recorded((STORE, 10, 0.5))
    one.add(other)
    other.record(*STORE, nbytes=5, seconds=0.5)
    assert one.totals() == {"gpu_to_ram": (10, 0.5)}


def test_taking_begins_a_new_interval() -> None:
    transfers = recorded((STORE, 10, 0.5))
    taken = transfers.take()
    assert taken == recorded((STORE, 10, 0.5))
    assert not transfers
    transfers.record(*LOAD, nbytes=1, seconds=1.0)
    assert taken.by_type.keys() == {"gpu_to_ram"}


def test_transfers_cross_a_process_boundary() -> None:
    transfers = recorded((STORE, 10, 0.5), (LOAD, 7, 2))
    assert pickle.loads(pickle.dumps(transfers)) == transfers


def test_transfers_that_are_never_taken_keep_totals_in_bounded_memory() -> None:
    transfers = recorded(*[(STORE, 3, 0.5)] * 5000)
    assert transfers.totals() == {"gpu_to_ram": (15000, 2500.0)}
    assert len(transfers.by_type["gpu_to_ram"]) == 4096
    other = recorded((STORE, 1, 0.5))
    other.add(transfers)
    other.add(transfers)
    assert other.totals()["gpu_to_ram"][0] == 30001
    assert transfers.totals()["gpu_to_ram"][0] == 15000
