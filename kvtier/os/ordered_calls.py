"""Run many blocking calls in a few threads, and yield their results in order.

This module is for tools without an event loop. The number of calls in flight is bounded. So a
generator of calls may be endless, and may use the results of earlier calls to choose the next
call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["run_in_order"]

T = TypeVar("T")

_AHEAD: Final = 2
"""Number of calls per thread that are in flight or wait for the thread."""


def run_in_order(calls: Iterator[Callable[[], T]], *, threads: int, name: str) -> Iterator[T]:
    """Run ``calls`` in ``threads`` threads; yield the results in the order of ``calls``.

    If a call raises or the caller stops early, this function waits for the calls in flight.

    Args:
        calls: The calls; the caller's thread iterates over them.
        threads: Number of threads.
        name: Prefix of the threads' names.

    Raises:
        BaseException: The error of a call. No result follows.

    >>> list(run_in_order(((lambda n=n: n * n) for n in range(5)), threads=2, name="square"))
    [0, 1, 4, 9, 16]
    """
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as executor:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                waiting.append(executor.submit(call))
                if len(waiting) > _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
