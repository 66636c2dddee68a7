"""Timing calls that several threads make at once, for a given time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import TierUnavailableError

__all__ = ["Timed", "time_pieces"]

_STALLED_S: Final = 30.0

Move = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """The calls of one direction.

    Attributes:
        latencies_s: Time of each, in no order.
        elapsed_s: Time of all, from the first to the last.
    """

    latencies_s: Sequence[float]
    elapsed_s: float

    @property
    def per_s(self) -> float:
        """Calls per second."""
        return len(self.latencies_s) / self.elapsed_s

    def quantile_s(self, share: float) -> float:
        """Return the time that ``share`` of the calls, 0 to 1, did not exceed."""
        return float(np.quantile(self.latencies_s, share, method="higher"))


def time_pieces(
    move: Move,
    order: Sequence[int],
    buffers: Sequence[memoryview],
    seconds: float,
    finish: Callable[[], None] = lambda: None,
    *,
    stalled_s: float = _STALLED_S,
) -> Timed:
    """Call ``move`` for the pieces of ``order``, again and again, one thread per buffer.

    Every thread moves at least one piece, unless another failed, and ends what it began. So
    the pieces moved are the first of ``order``, as many as there were calls.

    Args:
        move: Moves one piece.
        order: Pieces.
        buffers: Memory of each thread.
        seconds: When to begin no more.
        finish: Called once at the end, within the time that counts.
        stalled_s: How long past ``seconds`` a call may take.

    Raises:
        OSError: The first failure, once all threads ended.
        TierUnavailableError: A call did not return.
    """
    lock = threading.Lock()
    turns = itertools.cycle(order)
    latencies_s: list[float] = []
    errors: list[OSError] = []
    start_s = time.monotonic()

    def work(buffer: memoryview) -> None:
        while not errors:
            with lock:
                piece = next(turns)
            begin_s = time.monotonic()
            try:
                move(piece, buffer)
            except OSError as error:
                errors.append(error)
                return
            end_s = time.monotonic()
            latencies_s.append(end_s - begin_s)
            if end_s >= start_s + seconds:
                return

    if not _run_on_threads(work, buffers, end_by_s=start_s + seconds + stalled_s):
        raise TierUnavailableError("doctor", f"no answer for {stalled_s:.0f} s")
    if errors:
        raise errors[0]
    finish()
    return Timed(latencies_s, time.monotonic() - start_s)


def _run_on_threads(
    work: Callable[[memoryview], None], buffers: Sequence[memoryview], *, end_by_s: float
) -> bool:
    """Run ``work`` once per buffer, each on a thread; returns whether all ended in time."""
    threads = [
        threading.Thread(target=work, args=(buffer,), name="kvtier-doctor", daemon=True)
        for buffer in buffers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_by_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
