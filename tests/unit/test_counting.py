"""Steps are lines of Python, and what lines walk through in C."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable

import pytest

from kvtier.testing.probes import count_steps

ITEMS = list(range(1000))
HERE = {__name__.partition(".")[0]}


WALKS: dict[str, Callable[[], object]] = {
    "sorted": lambda: sorted(ITEMS),
    "min": lambda: min(ITEMS, key=abs),
    "max of an iterator": lambda: max(iter(ITEMS)),
    "sum": lambda: sum(ITEMS, 5),
    "all": lambda: all(map(str, ITEMS)),
    "list of an iterator": lambda: list(filter(str, ITEMS)),
    "tuple": lambda: tuple(ITEMS),
    "set": lambda: set(ITEMS),
    "index": lambda: ITEMS.index(999),
    "insert": lambda: [*ITEMS].insert(0, 0),
    "sort": lambda: [*ITEMS].sort(key=None),
    "remove": lambda: deque([0] * 999).remove(0),
    "pop the first": lambda: ITEMS[:].pop(0),
}
STEPS: dict[str, Callable[[], object]] = {
    "min of two": lambda: min(3, 4),
    "any, short": lambda: any([1, *ITEMS]),
    "pop the last": lambda: [*ITEMS].pop(-1),
    "pop one of two that are one": lambda: [*ITEMS, None, None].pop(-1),
    "is a list": lambda: [isinstance(item, list) for item in (ITEMS,)],
    "type of items": lambda: list[int],
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_through_all_items_costs_a_step_per_item(name: str) -> None:
    assert count_steps(WALKS[name]) == 1
    assert 999 <= count_steps(WALKS[name], packages=HERE) <= 1002


@pytest.mark.parametrize("name", STEPS)
def test_a_call_without_a_walk_costs_few_steps(name: str) -> None:
    assert count_steps(STEPS[name], packages=HERE) < 6


def test_the_results_are_the_ordinary_ones_and_nothing_stays_replaced() -> None:
    made: list[object] = []
    names = set(globals())
    count_steps(lambda: made.append(list((3, 1, 2))), packages=HERE)  # noqa: C410 - as above
    count_steps(lambda: made.append(sorted([3, 1, 2], reverse=True)), packages=HERE)
    assert made == [[3, 1, 2], [3, 2, 1]]
    assert [type(item) for item in made] == [list, list]
    assert set(globals()) == names


def test_garbage_is_not_collected_while_counting() -> None:
    collects = [gc.isenabled()]
    count_steps(lambda: collects.append(gc.isenabled()))
    assert [*collects, gc.isenabled()] == [True, False, True]
