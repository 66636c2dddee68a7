from __future__ import annotations

from kvtier.transfer import Breaker


def make() -> Breaker:
    return Breaker(failures=2, backoff_s=10.0)


def test_it_stays_closed_below_the_limit_and_a_success_starts_the_count_again() -> None:
    breaker = make()
    for _ in range(3):
        breaker.record(failed=True, now=0.0)
        assert breaker.allow(0.0)
        breaker.record(failed=False, now=0.0)
    assert not breaker.is_open(0.0)


def test_it_opens_after_failures_in_a_row_and_refuses_until_the_back_off_is_over() -> None:
    breaker = make()
    assert not breaker.record(failed=True, now=0.0)
    assert breaker.record(failed=True, now=1.0)
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
    assert breaker.record(failed=True, now=0.0), "two failures in a row"
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
