"""When a failing tier is left alone, and when it is tried again."""

from __future__ import annotations

from typing import cast

from kvtier.transfer import Breaker, Route
from kvtier.transfer.channel import Channel


def make() -> Breaker:
    return Breaker(failures=2, backoff_s=10.0)


def test_a_breaker_stays_closed_below_the_limit_and_a_success_resets_the_count() -> None:
    breaker = make()
    for _ in range(3):
        breaker.record(failed=True, now=0.0)
        assert breaker.allow(0.0)
        breaker.record(failed=False, now=0.0)
    assert not breaker.is_open(0.0)


def test_a_breaker_opens_after_failures_in_a_row_until_the_back_off_is_over() -> None:
    breaker = make()
    breaker.record(failed=True, now=0.0)
    assert not breaker.tripped
    breaker.record(failed=True, now=1.0)
    assert breaker.is_open(1.0)
    assert not breaker.allow(10.9)
    assert breaker.allow(11.0)


def test_only_one_probe_is_let_through_at_a_time() -> None:
    breaker = make()
    breaker.record(failed=True, now=0.0)
    breaker.record(failed=True, now=0.0)
    assert breaker.allow(10.0)
    assert not breaker.allow(10.0)
    assert breaker.is_open(10.0)


def test_a_call_that_was_given_up_counts_neither_way() -> None:
    breaker = make()
    breaker.record(failed=True, now=0.0)
    breaker.discount()
    breaker.record(failed=True, now=0.0)
    assert breaker.tripped, "two failures in a row"
    assert breaker.allow(10.0)
    breaker.discount()
    assert breaker.tripped
    assert breaker.allow(10.0), "the next one is the probe"
    assert not breaker.allow(10.0)


def test_a_probe_that_fails_opens_it_again_and_one_that_succeeds_closes_it() -> None:
    breaker = make()
    breaker.record(failed=True, now=0.0)
    breaker.record(failed=True, now=0.0)
    assert breaker.allow(10.0)
    breaker.record(failed=True, now=10.0)
    assert not breaker.allow(19.9)
    assert breaker.allow(20.0)
    breaker.record(failed=False, now=20.0)
    assert breaker.allow(20.0)
    assert breaker.allow(20.0)


def test_each_failure_is_logged_until_it_is_open_and_then_one_a_minute() -> None:
    channel = Channel(cast("Route", None), make())

    def fail(now: float) -> bool:
        should_log = channel.should_log_failure(now)
        channel.breaker.record(failed=True, now=now)
        return should_log

    assert [fail(now) for now in (1.0, 2.0)] == [True, True], "the last of which opened it"
    assert [fail(now) for now in (3.0, 12.0, 61.9)] == [False] * 3
    assert [fail(now) for now in (62.0, 72.0)] == [True, False]
    channel.breaker.record(failed=False, now=82.0)
    assert fail(82.0)
