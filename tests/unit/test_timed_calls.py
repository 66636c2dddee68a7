"""Blocking calls that their caller does not wait for any longer than it wants to."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.os.timed_calls import TimedCalls


@pytest.fixture
def calls() -> Iterator[TimedCalls]:
    calls = TimedCalls(name="test-calls")
    yield calls
    calls.close()


def test_a_call_runs_on_a_daemon_thread_and_its_result_or_error_comes_back(
    calls: TimedCalls,
) -> None:
    assert calls.begin(lambda: threading.current_thread().daemon).result(60)
    with pytest.raises(ZeroDivisionError):
        calls.begin(lambda: 1 // 0).result(60)


def test_no_call_is_queued_behind_a_late_one_whose_result_still_comes(
    calls: TimedCalls,
) -> None:
    answers = threading.Event()
    late = calls.begin(answers.wait)
    with pytest.raises(TimeoutError):
        late.result(0)
    with pytest.raises(TimeoutError, match="has not ended"):
        calls.begin(list)
    answers.set()
    assert late.result(60)
    assert calls.begin(list).result(60) == []


def test_closing_waits_for_nothing_and_the_thread_ends_with_its_call() -> None:
    calls, answers = TimedCalls(name="test-calls"), threading.Event()
    late = calls.begin(answers.wait)
    calls.close()
    calls.close()
    assert not late.done()
    answers.set()
    assert late.result(60)


def test_a_process_ends_although_a_call_never_does() -> None:
    script = (
        "import threading; from kvtier.os.timed_calls import TimedCalls; "
        "TimedCalls(name='stuck').begin(threading.Event().wait)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
