"""Estimates the times of loading and computing, from measurements.

*Loading.* The time from the submission of a job to its result is modelled as a start time plus
a time per byte. The bytes include the tier's queue before the job, because a request waits for
it too. The fit uses relative errors, so small and large jobs have equal weight. The weight of a
sample falls with every later sample and with time (least squares with forgetting: the scalar
case in Ljung, "System Identification", 1999, chapter 11). A load that missed its deadline gives
only a lower bound (a censored sample, as in Tobin, "Estimation of relationships for limited
dependent variables", 1958). An ordinary sample of such a load would have the deadline as its
duration, which is too short. So a late load only raises start time and rate, in proportion, if
they predict a duration below the deadline. A job that never left the queue gives no
measurement.

*Computing.* The time per token is the duration of engine steps divided by their number of
prompt tokens; recent steps have the largest weight. The last tokens of long prompts take longer
because of attention. The mean includes this effect if prompts have similar lengths. For a much
longer prompt the estimate is too low. The engine is shared: if it is busy for a fraction ``u``
of the time, work takes ``1 / (1 - u)`` times as long, as under processor sharing (Kleinrock,
"Time-shared Systems", 1967). Without this factor, loads would be skipped on a busy engine,
where they help most: even a load that takes slightly longer than computing frees the engine for
other requests. In replayed traces, this factor gave the shortest or nearly the shortest waits
at every disk speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["ComputeEstimate", "LoadCost", "LoadEstimate", "prompt_tokens"]

_KEEP: Final = 0.8
"""Fraction of their weight that earlier samples keep when a new sample arrives."""
_HALF_LIFE_S: Final = 10.0
"""Seconds after which an estimate without new samples has half its weight."""
_MIN_SPREAD: Final = 1e-2
"""Smallest relative variance of load sizes that lets a fit separate start time and rate."""
_BUSY_HALF_LIFE_S: Final = 30.0
_MAX_BUSY: Final = 0.9
"""Upper limit of the busy fraction ``u``, because ``1 / (1 - u)`` is unbounded."""
_HALF_LIFE_TOKENS: Final = 32_768
_MIN_TOKENS: Final = 128
"""Smallest number of prompt tokens of a step that counts as a sample. In smaller steps, reading
weights and launching kernels take most of the time."""
_MAX_SPECULATED: Final = 16


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The time of a load from a tier, as a linear function of the load's size.

    Attributes:
        start_s: Seconds that every load takes, for any size.
        s_per_byte: Additional seconds per byte.
    """

    start_s: float
    s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Return the duration of a load; ``nbytes`` includes bytes queued before the load."""
        return self.start_s + nbytes * self.s_per_byte


class LoadEstimate:
    """Estimates the time of a load from one tier as ``start + bytes * rate``.

    The fitted equation is ``seconds / bytes = start / bytes + rate``.

    Attributes:
        is_bound: Whether the fit is only a lower bound, because a load missed its deadline and
            no load has arrived since.
        measured_s: Time of the last sample, on the manager's clock.
    """

    __slots__ = ("_r", "_u", "_ur", "_uu", "_weight", "is_bound", "measured_s")

    def __init__(self) -> None:
        self._weight = self._u = self._r = self._uu = self._ur = 0.0
        self.is_bound = False
        self.measured_s = 0.0

    def record(self, nbytes: int, seconds: float, now: float) -> None:
        """Add a measured load; ``nbytes`` includes the bytes queued before the load."""
        keep = _KEEP * _halved(now - self.measured_s, _HALF_LIFE_S)
        u, r = 1.0 / nbytes, seconds / nbytes
        self._weight = self._weight * keep + 1.0
        self._u = self._u * keep + u
        self._r = self._r * keep + r
        self._uu = self._uu * keep + u * u
        self._ur = self._ur * keep + u * r
        self.is_bound = False
        self.measured_s = now

    def record_bound(self, nbytes: int, seconds: float, now: float) -> None:
        """Add a load that was not complete after ``seconds``."""
        cost = self.cost()
        if cost is None:
            self.record(nbytes, seconds, now)
            self.is_bound = True
            return
        factor = seconds / cost.seconds(nbytes)
        if factor > 1.0:
            self._r *= factor
            self._ur *= factor
            self.is_bound = True
        self.measured_s = now

    def cost(self) -> LoadCost | None:
        """Return the fitted cost of a load; None before the first sample."""
        if not self._weight:
            return None
        mean = self._r / self._weight
        spread = self._weight * self._uu - self._u * self._u
        if spread <= _MIN_SPREAD * self._u * self._u:
            return LoadCost(0.0, mean)
        start_s = (self._weight * self._ur - self._u * self._r) / spread
        if start_s <= 0.0:
            return LoadCost(0.0, mean)
        s_per_byte = (self._r - start_s * self._u) / self._weight
        if s_per_byte < 0.0:
            return LoadCost(self._ur / self._uu, 0.0)
        return LoadCost(start_s, s_per_byte)

    def optimistic_cost(self, now: float) -> LoadCost | None:
        """Return the fitted cost, halved every ten seconds after the last sample.

        So a slow tier is tried again after some time. Returns None before the first sample.
        """
        cost = self.cost()
        if cost is None:
            return None
        factor = _halved(now - self.measured_s, _HALF_LIFE_S)
        return LoadCost(cost.start_s * factor, cost.s_per_byte * factor)


class ComputeEstimate:
    """Estimates the time to compute a prompt token, and how busy the engine is."""

    __slots__ = ("_busy_s", "_ended_s", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = self._busy_s = self._ended_s = 0.0

    def record(self, tokens: int, seconds: float, now: float) -> None:
        """Add a step with ``tokens`` prompt tokens; ignore a step with too few of them."""
        if tokens < _MIN_TOKENS or seconds <= 0.0:
            return
        lasting = _halved(now - self._ended_s, _BUSY_HALF_LIFE_S)
        self._busy_s = self._busy_s * lasting + seconds
        self._ended_s = max(now, self._ended_s)
        keep = 0.5 ** (tokens / _HALF_LIFE_TOKENS)
        self._seconds = self._seconds * keep + seconds
        self._tokens = self._tokens * keep + tokens

    @property
    def s_per_token(self) -> float | None:
        """Seconds to compute a prompt token; None before the first sample."""
        return self._seconds / self._tokens if self._tokens else None

    def sharing_factor(self, now: float) -> float:
        """Return the factor by which other requests prolong a computation."""
        busy_s = self._busy_s * _halved(now - self._ended_s, _BUSY_HALF_LIFE_S)
        return 1.0 / (1.0 - min(busy_s * math.log(2.0) / _BUSY_HALF_LIFE_S, _MAX_BUSY))


def prompt_tokens(scheduled: Iterable[int]) -> int:
    """Return how many of a step's tokens belong to prompts.

    Args:
        scheduled: Tokens of each request in the step. A decoding request has one token, or a
            few with speculative decoding.

    >>> prompt_tokens([1, 1, 5, 700])
    700
    """
    return sum(tokens for tokens in scheduled if tokens > _MAX_SPECULATED)


def _halved(age_s: float, half_life_s: float) -> float:
    """Return the remaining fraction of a weight after ``age_s`` seconds."""
    return math.pow(0.5, max(age_s, 0.0) / half_life_s)
