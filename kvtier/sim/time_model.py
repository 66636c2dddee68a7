"""Computes how long transfers take on devices that serve one job after another.

Each direction of a device (reading a disk, writing a disk, copying RAM to the GPU) has a queue.
A job starts when the device is free, occupies it for (bytes / bandwidth) seconds, and ends
one latency later. In this model, jobs and directions do not share bandwidth. A question to a
shared tier takes one latency for each round, and does not wait for other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.errors import ConfigError
from kvtier.sim.shared_cache import SharedClient
from kvtier.types import Job, Outcome, TransferResult
from kvtier.units import UnitError, parse_duration, parse_rate

__all__ = [
    "DEFAULT_SPEEDS",
    "OTHER_SPEED",
    "Device",
    "TierSpeed",
    "TimeModel",
    "TransferModel",
    "default_speed",
    "parse_speed",
]

_DONE: Final = Outcome.DONE


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """The speed of a tier. A read moves bytes towards the GPU; a write moves them away.

    Attributes:
        latency_s: Latency of every job, in seconds.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


DEFAULT_SPEEDS: Final[Mapping[str, TierSpeed]] = {
    "ram": TierSpeed(25e9, 25e9, 20e-6),
    "nvme": TierSpeed(6e9, 3e9, 200e-6),
    "object": TierSpeed(2e9, 2e9, 30e-3),
}
"""Default speed by kind of tier: RAM over PCIe 4 x16, one data-centre NVMe drive, and an object
store over a 25 Gbit/s network."""

OTHER_SPEED: Final = TierSpeed(2e9, 2e9, 2e-3)
"""Default speed of any other kind of tier, for example storage over a 25 Gbit/s network."""


def default_speed(kind: str) -> TierSpeed:
    """Return the default speed of a tier of ``kind``."""
    return DEFAULT_SPEEDS.get(kind, OTHER_SPEED)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Speeds of the engine and its tiers.

    Attributes:
        prefill_tokens_per_s: Number of prompt tokens that the engine computes per second, for
            one request at a time.
        concurrency: Largest number of requests in progress. A request is in progress after its
            first lookup.
        speeds: Speed of every tier, by the tier's name.
    """

    prefill_tokens_per_s: float
    concurrency: int = 32
    speeds: Mapping[str, TierSpeed] = field(default_factory=dict)


def parse_speed(text: str) -> tuple[str, TierSpeed]:
    """Parse a text such as ``nvme=6GiB/s,3GiB/s,200us``; return the tier and the speed."""
    name, equals, rest = text.partition("=")
    parts = rest.split(",")
    if not equals or len(parts) != 3:
        example = "nvme=6GiB/s,3GiB/s,200us (read, write, latency)"
        raise ConfigError(
            f"--tier-speed {text}: not a tier's speed; write for example {example}"
        )
    try:
        read, write, latency = parts
        return name, TierSpeed(
            float(parse_rate(read)), float(parse_rate(write)), parse_duration(latency)
        )
    except UnitError as error:
        raise ConfigError(f"--tier-speed {text}: {error}") from error


class Device:
    """One direction of one device.

    Attributes:
        free_at_s: Time in seconds at which the device has transferred all queued bytes.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.free_at_s = 0.0

    def occupy(self, nbytes: int, *, since_s: float) -> float:
        """Queue a job of ``nbytes`` that is ready at ``since_s``; return its end time."""
        begins_s = max(self.free_at_s, since_s)
        self.free_at_s = over_s = begins_s + nbytes / self._bytes_per_s
        return over_s + self._latency_s


class TransferModel:
    """Computes the end time and the outcome of each load and each storage job.

    As in a live engine, a job that has not started at its deadline is dropped. A job that has
    started is reported as expired at its deadline, and keeps its slots until the job ends.

    Args:
        model: Speeds of the tiers.
        ram: Name of the RAM tier. Its speed limits loads, but no storage jobs.
        slot_nbytes: Size in bytes of a chunk in a tier.
        shared: The engine's client of the shared tier; None if no tier is shared.
    """

    def __init__(
        self,
        model: TimeModel,
        *,
        ram: str,
        slot_nbytes: int,
        shared: SharedClient | None = None,
    ) -> None:
        self._slot_nbytes = slot_nbytes
        self._shared = shared
        self._speeds = model.speeds
        speed = model.speeds[ram]
        self._loader = Device(speed.read_bytes_per_s, speed.latency_s)
        self._readers: dict[str, Device] = {}
        self._writers: dict[str, Device] = {}
        self._routes: dict[tuple[str, str], Sequence[Device]] = {}
        for name, speed in model.speeds.items():
            if name != ram:
                self._readers[name] = Device(speed.read_bytes_per_s, speed.latency_s)
                self._writers[name] = Device(speed.write_bytes_per_s, speed.latency_s)

    def load(self, chunks: int, now_s: float) -> float:
        """Queue the copy of ``chunks`` chunks from RAM to the GPU; return the end time."""
        return self._loader.occupy(chunks * self._slot_nbytes, since_s=now_s)

    def run(self, job: Job, now_s: float) -> list[tuple[float, TransferResult]]:
        """Queue ``job`` at ``now_s``; return each result of the job with its time."""
        shared = self._shared
        if job.moves_nothing and shared is not None:
            return [self._ask(shared, job, now_s)]
        devices = self._routes.get((job.source, job.destination)) or self._devices(job)
        deadline_s = now_s + job.timeout_s
        begins_s = done_s = now_s
        for device in devices:
            begins_s = max(begins_s, device.free_at_s)
        if begins_s > deadline_s:
            return [(deadline_s, _expired(job))]
        moved = job.keys if shared is None else shared.begin(job, now_s)
        nbytes = len(moved) * self._slot_nbytes
        for device in devices:
            done_s = max(done_s, device.occupy(nbytes, since_s=now_s))
        outcomes = [_DONE] * len(job.keys)
        if shared is not None:
            outcomes = shared.end(job, moved, now_s, done_s=done_s)
        if done_s <= deadline_s:
            # As in a live engine, chunks that a shared tier had already count as put.
            nbytes = outcomes.count(_DONE) * self._slot_nbytes
            queued_s = begins_s - now_s
            seconds = done_s - now_s - queued_s
            result = TransferResult(job.job_id, outcomes, True, nbytes, seconds, queued_s)  # noqa: FBT003 - settled
            return [(done_s, result)]
        return [
            (deadline_s, _expired(job, settled=False)),
            (done_s, _expired(job)),
        ]

    def _ask(
        self, shared: SharedClient, job: Job, now_s: float
    ) -> tuple[float, TransferResult]:
        """Return the time and the result of the question ``job``."""
        outcomes, rounds = shared.find(job, now_s)
        latency_s = rounds * self._speeds[job.source].latency_s
        if latency_s > job.timeout_s:
            return now_s + job.timeout_s, _expired(job)
        return now_s + latency_s, TransferResult(job.job_id, outcomes, seconds=latency_s)

    def _devices(self, job: Job) -> Sequence[Device]:
        """Return the devices that ``job`` occupies."""
        both = (self._readers.get(job.source), self._writers.get(job.destination))
        devices = [device for device in both if device is not None]
        self._routes[job.source, job.destination] = devices
        return devices


def _expired(job: Job, *, settled: bool = True) -> TransferResult:
    return TransferResult(job.job_id, [Outcome.EXPIRED] * len(job.keys), settled=settled)
