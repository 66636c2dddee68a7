"""What loading and computing take, as measured here.

*Loading.* The time from handing a job to the storage engine to its result, as a start-up time
plus a time per byte. Bytes are the job's own and those that were in the tier's queue before it:
what a request waits for. Every sample counts by its relative error, so that small and large
jobs teach alike, and samples fade with each new one and with time (least squares with
forgetting; of Ljung, "System Identification", 1999, chapter 11, the scalar case).
Of a load that ran into its deadline only a lower bound is known (it is censored, as in Tobin,
"Estimation of relationships for limited dependent variables", 1958). Taken as a time, it would
say that any number of bytes takes no longer than the deadline. So it only raises an estimate
that is below it, start-up and rate alike, and a job that never left the queue says nothing of
the bytes it did not move.

*Computing.* Seconds of engine steps over their prompt tokens, the recent ones weighing most.
Attention makes late tokens of long prompts dearer. That is in the mean as far as prompts are of
like length, and a term of its own would need steps of very different depths to be told apart;
for a prompt much longer than usual computing is therefore rated too cheap.
The engine is shared: of one that computes a share ``u`` of the time, work of ``s`` seconds
takes ``s / (1 - u)``, as under processor sharing (Kleinrock, "Time-shared Systems", 1967).
Without this term, loading loses where it helps most: a load that takes somewhat longer than
computing still spares those who wait for the engine, and with it replays of traces wait least
or nearly so at every speed of the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["ComputeTimes", "LoadPrice", "LoadTimes", "prompt_tokens"]

_KEEP: Final = 0.8
"""Weight that the samples so far keep when one more arrives."""
_HALF_LIFE_S: Final = 10.0
"""How fast an estimate that is not renewed loses weight."""
_ALIKE: Final = 1e-2
"""Relative variance of sizes below which a start-up time cannot be told from a rate."""
_BUSY_HALF_LIFE_S: Final = 30.0
_BUSIEST: Final = 0.9
"""Share of time computing beyond which waiting is rated no longer: the formula has no end."""
_HALF_LIFE_TOKENS: Final = 32_768
_FEWEST_TOKENS: Final = 128
"""Prompt tokens of a step below which its time is not the prompt's: weights, launches."""
_MOST_SPECULATED: Final = 16


@dataclass(frozen=True, slots=True)
class LoadPrice:
    """What loading from a tier takes.

    Attributes:
        start_s: However little it is.
        s_per_byte: On top.
    """

    start_s: float
    s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Return what ``nbytes`` take, those queued before them included."""
        return self.start_s + nbytes * self.s_per_byte

    def scaled(self, factor: float) -> LoadPrice:
        """Return the price of a tier that takes ``factor`` times as long."""
        return LoadPrice(self.start_s * factor, self.s_per_byte * factor)


class LoadTimes:
    """What loads from one tier took: ``seconds / bytes = start / bytes + rate``, fitted.

    Attributes:
        bounded: Whether the fit was raised to a bound, and nothing was measured since.
        measured_s: When a load last said something of the tier, on the manager's clock.
    """

    __slots__ = ("_r", "_u", "_ur", "_uu", "_weight", "bounded", "measured_s")

    def __init__(self) -> None:
        self._weight = self._u = self._r = self._uu = self._ur = 0.0
        self.bounded = False
        self.measured_s = 0.0

    def note(self, nbytes: int, seconds: float, now: float) -> None:
        """Take a load into account that moved, or waited for, ``nbytes``."""
        keep = _KEEP * _fading(now - self.measured_s)
        u, r = 1.0 / nbytes, seconds / nbytes
        self._weight = self._weight * keep + 1.0
        self._u = self._u * keep + u
        self._r = self._r * keep + r
        self._uu = self._uu * keep + u * u
        self._ur = self._ur * keep + u * r
        self.bounded = False
        self.measured_s = now

    def note_bound(self, nbytes: int, seconds: float, now: float) -> None:
        """Take a load into account that was not done after ``seconds``."""
        price = self.price()
        if price is None:
            self.note(nbytes, seconds, now)
            self.bounded = True
            return
        raised = seconds / price.seconds(nbytes)
        if raised > 1.0:
            self._r *= raised
            self._ur *= raised
            self.bounded = True
        self.measured_s = now

    def price(self) -> LoadPrice | None:
        """Return the fit; None before the first sample."""
        if not self._weight:
            return None
        mean = self._r / self._weight
        spread = self._weight * self._uu - self._u * self._u
        if spread <= _ALIKE * self._u * self._u:
            return LoadPrice(0.0, mean)
        start_s = (self._weight * self._ur - self._u * self._r) / spread
        if start_s <= 0.0:
            return LoadPrice(0.0, mean)
        s_per_byte = (self._r - start_s * self._u) / self._weight
        if s_per_byte < 0.0:
            return LoadPrice(self._ur / self._uu, 0.0)
        return LoadPrice(start_s, s_per_byte)

    def hoped(self, now: float) -> LoadPrice | None:
        """Return the fit as it is believed now: the older it is, the less."""
        price = self.price()
        return None if price is None else price.scaled(_fading(now - self.measured_s))


class ComputeTimes:
    """What a prompt token takes to compute, and how much of its time the engine computes."""

    __slots__ = ("_busy_s", "_ended_s", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = self._busy_s = self._ended_s = 0.0

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """Take a step that computed ``tokens`` prompt tokens into account.

        Steps of few are mostly about something else, and are ignored.
        """
        if tokens < _FEWEST_TOKENS or seconds <= 0.0:
            return
        self._busy_s = self._busy_s * _lasting(now - self._ended_s) + seconds
        self._ended_s = max(now, self._ended_s)
        keep = 0.5 ** (tokens / _HALF_LIFE_TOKENS)
        self._seconds = self._seconds * keep + seconds
        self._tokens = self._tokens * keep + tokens

    @property
    def s_per_token(self) -> float | None:
        """What computing a prompt token takes; None before the first step."""
        return self._seconds / self._tokens if self._tokens else None

    def waiting(self, now: float) -> float:
        """Return how many times as long computing takes because the engine is shared."""
        busy_s = self._busy_s * _lasting(now - self._ended_s)
        return 1.0 / (1.0 - min(busy_s * math.log(2.0) / _BUSY_HALF_LIFE_S, _BUSIEST))


def prompt_tokens(scheduled: Iterable[int]) -> int:
    """Return how many of a step's tokens belong to prompts.

    Args:
        scheduled: Tokens of each request in the step. One that generates has a single one, or
            a few if it speculates.

    >>> prompt_tokens([1, 1, 5, 700])
    700
    """
    return sum(tokens for tokens in scheduled if tokens > _MOST_SPECULATED)


def _lasting(age_s: float) -> float:
    """Return the share of past work that still counts after ``age_s``."""
    return math.pow(0.5, max(age_s, 0.0) / _BUSY_HALF_LIFE_S)


def _fading(age_s: float) -> float:
    """Return the share of an estimate, or of a weight, that is left after ``age_s``."""
    return math.pow(0.5, max(age_s, 0.0) / _HALF_LIFE_S)
