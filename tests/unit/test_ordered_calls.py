"""Calls on a few threads, whose results come in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvtier.os.ordered_calls import run_in_order


def test_results_come_in_the_order_of_the_calls_whichever_ends_first() -> None:
    second_ran = threading.Event()

    def first() -> int:
        assert second_ran.wait(10)
        return 1

    def second() -> int:
        second_ran.set()
        return 2

    assert list(run_in_order(iter([first, second]), threads=2, name="test")) == [1, 2]


def test_few_calls_are_drawn_ahead_of_the_results() -> None:
    drawn: list[int] = []

    def calls() -> Iterator[Callable[[], int]]:
        for number in range(100):
            drawn.append(number)
            yield lambda: 0

    for taken, _ in enumerate(run_in_order(calls(), threads=2, name="test"), start=1):
        assert len(drawn) - taken <= 4
    assert len(drawn) == 100


def test_after_an_error_no_call_begins_and_none_is_left_running() -> None:
    running = threading.Event()
    ended: list[str] = []

    def fails() -> None:
        assert running.wait(10)
        raise OSError("broken")

    def goes_on() -> None:
        running.set()
        ended.append("went on")

    calls = iter([fails, goes_on, *[lambda: ended.append("late")] * 20])
    with pytest.raises(OSError, match="broken"):
        list(run_in_order(calls, threads=2, name="test"))
    assert "went on" in ended
    assert len(ended) < 22
    assert not [each for each in threading.enumerate() if each.name.startswith("test")]
