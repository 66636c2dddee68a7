"""Measures how fast a shared tier answers, writes and reads.

A measurement opens the tier as an engine does. It repeatedly writes a few values in parallel,
and then repeatedly reads them. All measurements use the same keys. The service may evict the
values. Proofs are not computed or verified.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.config import TIERS, KvtierConfig, SharedTierConfig
from kvtier.doctor._findings import Finding, Status
from kvtier.doctor.rates import Timed, milliseconds
from kvtier.errors import CapacityError, TierUnavailableError
from kvtier.os.iopool import IoPool
from kvtier.os.timed_calls import call_within
from kvtier.tiers.shared import SharedContext, SharedTier, Value, with_proof_buffers
from kvtier.types import Outcome
from kvtier.units import approximate_rate, approximate_size, format_duration

__all__ = ["SharedRates", "TierFullError", "check_shared_rates", "measure_shared_tier"]

_VALUES: Final = 8
_QUESTION_KEYS: Final = 64
_STALLED_S: Final = 30.0


class TierFullError(CapacityError):
    """The service has no room for a value."""


@dataclass(frozen=True, slots=True)
class SharedRates:
    """Measured times and rates of a shared tier.

    Attributes:
        piece_bytes: Number of bytes of one value.
        at_once: Number of values in flight at a time.
        seconds: Duration of the measurement in each direction.
        question_p50_s: Median time of a question. It asks for 64 keys that the tier lacks.
        question_p99_s: 99th percentile of the time of a question.
        read_bytes_per_s: Rate of reading, in bytes per second.
        write_bytes_per_s: Rate of writing, in bytes per second.
    """

    piece_bytes: int
    at_once: int
    seconds: float
    question_p50_s: float
    question_p99_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


def measure_shared_tier(
    config: KvtierConfig,
    options: SharedTierConfig,
    *,
    seconds: float,
    stalled_s: float = _STALLED_S,
) -> SharedRates:
    """Measure a shared tier for ``seconds`` in each direction. This function blocks.

    A call that hangs cannot be cancelled. So a separate thread makes all calls. If a call
    hangs until the time is over, the thread is abandoned.

    Args:
        config: The configuration.
        options: The tier's options.
        seconds: Time for each direction.
        stalled_s: Longest wait for the service, beyond the time for measuring.

    Raises:
        ConfigError: The tier's options cannot work here.
        TierUnavailableError: The service failed, or did not answer in time.
        TierFullError: The service has no room.
    """
    nbytes = config.transfer.piece_bytes
    memory = memoryview(mmap.mmap(-1, _VALUES * nbytes))
    memory[:] = random.Random(0).randbytes(memory.nbytes)
    values = with_proof_buffers(
        [memory[at * nbytes : (at + 1) * nbytes] for at in range(_VALUES)]
    )
    kind = TIERS.find_derived(options.kind, SharedTier)
    pool = IoPool(config.transfer.io_threads, name="kvtier-doctor")

    def measure() -> SharedRates:
        tier = kind.open(options, SharedContext(nbytes, pool, memory))
        return asyncio.run(_measure(options.name, tier, values, seconds))

    try:
        return call_within(measure, 3 * seconds + stalled_s, name="kvtier-doctor")
    except TimeoutError as error:
        raise TierUnavailableError(options.name, f"no answer for {stalled_s:g} s") from error
    finally:
        pool.close(timeout_s=0)


def check_shared_rates(options: SharedTierConfig, rates: SharedRates) -> Iterator[Finding]:
    """Yield findings about the measured times and rates."""
    name, limit_s = options.name, options.lookup_timeout_s
    reason = (
        f"p50 {milliseconds(rates.question_p50_s)}, p99 {milliseconds(rates.question_p99_s)} "
        f"for {_QUESTION_KEYS} keys"
    )
    status, remedy = Status.OK, ""
    if rates.question_p99_s > limit_s:
        status = Status.WARNING
        reason += f": later than lookup_timeout, {format_duration(limit_s)}"
        remedy = "raise lookup_timeout; requests wait that long at most, and then compute"
    yield Finding(f"{name}: questions", status, reason, remedy)
    moved = f"{rates.at_once} values of {approximate_size(rates.piece_bytes)} at once"
    for what, rate in (("read", rates.read_bytes_per_s), ("write", rates.write_bytes_per_s)):
        yield Finding(f"{name}: {what} rate", Status.OK, f"{approximate_rate(rate)}; {moved}")


async def _measure(
    name: str, tier: SharedTier, values: Sequence[Value], seconds: float
) -> SharedRates:
    keys = [f"kv1-doctor/{number}" for number in range(len(values))]
    absent = [f"kv1-doctor/absent-{number}" for number in range(_QUESTION_KEYS)]

    async def write() -> None:
        _require_done(name, await tier.put(keys, values))

    async def read() -> None:
        _require_done(name, await tier.get(keys, values))

    try:
        asked = await _repeat(lambda: tier.contains_leading(absent), seconds / 4)
        written = await _repeat(write, seconds)
        got = await _repeat(read, seconds)
    except (TierUnavailableError, TierFullError):
        raise
    except Exception as error:  # a client raises errors of its own library
        raise TierUnavailableError(name, f"{type(error).__name__}: {error}") from error
    finally:
        await tier.aclose()
    moved_nbytes = sum(value.payload.nbytes for value in values)
    return SharedRates(
        piece_bytes=values[0].payload.nbytes,
        at_once=len(values),
        seconds=seconds,
        question_p50_s=asked.quantile_s(0.5),
        question_p99_s=asked.quantile_s(0.99),
        read_bytes_per_s=got.per_s * moved_nbytes,
        write_bytes_per_s=written.per_s * moved_nbytes,
    )


def _require_done(name: str, outcomes: Sequence[Outcome]) -> None:
    if Outcome.REFUSED in outcomes:
        raise TierFullError(f"tier {name}: full: it refused a value")
    for outcome in outcomes:
        if outcome is not Outcome.DONE:
            raise TierUnavailableError(name, f"a value was {outcome.value}")


async def _repeat(call: Callable[[], Awaitable[object]], seconds: float) -> Timed:
    """Await ``call()`` repeatedly for ``seconds``; return the durations of the calls."""
    times_s: list[float] = []
    begin_s = now_s = time.monotonic()
    while now_s < begin_s + seconds:
        await call()
        ended_s = time.monotonic()
        times_s.append(ended_s - now_s)
        now_s = ended_s
    return Timed(times_s, now_s - begin_s)
