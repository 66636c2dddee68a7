"""Commands that clear away are left in order when a signal ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvtier.cli._replay import exit_on_signals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def run(number: int, cleared: list[str]) -> None:
    """Be ended by ``number``, and again while clearing away."""
    with exit_on_signals():
        try:
            os.kill(os.getpid(), number)
            pytest.fail("it went on")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleared.append("all")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_body_and_its_like_do_not_disturb_that(number: int) -> None:
    cleared: list[str] = []
    with pytest.raises(SystemExit) as left:
        run(number, cleared)
    assert (left.value.code, cleared) == (128 + number, ["all"])
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with exit_on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
