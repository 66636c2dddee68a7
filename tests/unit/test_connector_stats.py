"""Transfers by type: recorded, added up over workers, reduced, sent as plain values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies

from kvtier.connector.stats import ConnectorStats, transfer_type_of

STORE, LOAD = ("gpu", "ram"), ("ram", "gpu")

operations = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([STORE, LOAD, ("ram", "nvme")]),
        strategies.integers(0, 1 << 40),
        strategies.integers(0, 1000),
    )
)


def recorded(*entries: tuple[tuple[str, str], int, float]) -> ConnectorStats:
    stats = ConnectorStats()
    for transfer_type, size, seconds in entries:
        stats.record_transfer(size, seconds, transfer_type)
    return stats


def test_every_transfer_is_kept_with_its_size_and_its_time() -> None:
    stats = recorded((STORE, 10, 0.5), (LOAD, 7, 0.25), (STORE, 30, 1.0))
    assert stats.to_dict() == {
        "gpu_to_ram": [{"op_size": 10, "op_time": 0.5}, {"op_size": 30, "op_time": 1.0}],
        "ram_to_gpu": [{"op_size": 7, "op_time": 0.25}],
    }


@given(operations, operations)
def test_what_two_workers_recorded_adds_up(
    first: list[tuple[tuple[str, str], int, float]],
    second: list[tuple[tuple[str, str], int, float]],
) -> None:
    one, other = recorded(*first), recorded(*second)
    before = other.to_dict()
    reduced = one.aggregate(other).reduce()
    for way in (STORE, LOAD, ("ram", "nvme")):
        of_way = [entry for entry in first + second if entry[0] == way]
        name = transfer_type_of(*way)
        assert reduced.get(f"{name}_total_bytes", 0) == sum(size for _, size, _ in of_way)
        assert reduced.get(f"{name}_total_time", 0) == sum(seconds for _, _, seconds in of_way)
        assert len(one.data.get(name, ())) == len(of_way)
    assert other.to_dict() == before


def test_what_was_added_up_does_not_change_with_where_it_came_from() -> None:
    one, other = ConnectorStats(), recorded((STORE, 10, 0.5))
    one.aggregate(other)
    other.record_transfer(5, 0.5, STORE)
    assert one.reduce()["gpu_to_ram_total_bytes"] == 10


def test_taking_begins_a_new_interval() -> None:
    stats = recorded((STORE, 10, 0.5))
    taken = stats.clone_and_reset()
    assert taken.to_dict() == recorded((STORE, 10, 0.5)).to_dict()
    assert stats.is_empty()
    stats.record_transfer(1, 1.0, LOAD)
    assert taken.reduce().keys() == {"gpu_to_ram_total_bytes", "gpu_to_ram_total_time"}


def test_a_reset_forgets_and_empty_says_so() -> None:
    stats = ConnectorStats()
    assert stats.is_empty()
    stats.record_transfer(0, 0.0, STORE)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


def test_plain_values_survive_a_serialiser() -> None:
    stats = recorded((STORE, 10, 0.5), (LOAD, 7, 2))
    again = ConnectorStats(json.loads(json.dumps(stats.to_dict())))
    assert again.to_dict() == stats.to_dict()


@pytest.mark.parametrize(
    "operation",
    [{}, {"op_size": 1}, {"op_size": 1.5, "op_time": 1}, {"op_size": 1, "op_time": "1"}],
)
def test_values_that_are_no_transfer_are_refused(operation: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"gpu_to_ram: .* is no transfer"):
        ConnectorStats({"gpu_to_ram": [operation]})


def test_an_interval_that_nobody_ends_keeps_its_totals_in_bounded_memory() -> None:
    stats = recorded(*[(STORE, 3, 0.5)] * 5000)
    assert stats.reduce() == {"gpu_to_ram_total_bytes": 15000, "gpu_to_ram_total_time": 2500.0}
    assert len(stats.data["gpu_to_ram"]) == 4096
    other = recorded((STORE, 1, 0.5))
    other.aggregate(stats).aggregate(stats)
    assert other.reduce()["gpu_to_ram_total_bytes"] == 30001
    assert stats.reduce()["gpu_to_ram_total_bytes"] == 15000
