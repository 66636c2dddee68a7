"""The values that the deciding half and the doing half exchange."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.keys import ChunkKey

__all__ = [
    "Job",
    "JobId",
    "LayoutFingerprint",
    "Outcome",
    "Purpose",
    "SharedMemory",
    "TransferResult",
]

JobId = int


class Purpose(enum.IntEnum):
    """Why a job exists. The smaller value runs first: a waiting request outranks a copy."""

    LOAD = 0
    """Tier -> GPU, a request waits for it."""
    PROMOTE = 1
    """Slower tier -> faster tier, a request waits or will."""
    STORE = 2
    """GPU -> tier."""
    DEMOTE = 3
    """Faster tier -> slower tier."""


class Outcome(enum.Enum):
    """What became of one chunk of a job."""

    DONE = "done"
    """Every byte is at its destination, verified where it came from a slower tier."""
    FAILED = "failed"
    """The medium failed; nothing may be assumed about the destination."""
    CORRUPT = "corrupt"
    """The source's bytes are not the bytes that were stored there."""
    EXPIRED = "expired"
    """It did not end by its deadline, or by the time its source had to be overwritten."""
    CANCELLED = "cancelled"
    """Nobody needs it any more: its request is gone, the cache was reset, the engine closes, or
    a chunk before it did not arrive. That says nothing of the medium."""
    REFUSED = "refused"
    """Not taken: the queue was full, the tier is out of service for now, or some of the chunk's
    blocks are gone."""


class Job(NamedTuple):
    """A batch of moves from one tier to another.

    Chunk ``i`` moves from slot ``source_slots[i]`` to slot ``destination_slots[i]``.

    Attributes:
        job_id: Unique among the jobs of one engine.
        purpose: What the job is for; decides its priority.
        source: Name of the tier that is read.
        destination: Name of the tier that is written.
        keys: The chunks' keys.
        source_slots: Slot numbers in the source tier.
        destination_slots: Slot numbers in the destination tier.
        timeout_s: Seconds after submission at which the job counts as expired.
        payload: What the route needs besides slots; made and read by the same entry point.
    """

    job_id: JobId
    purpose: Purpose
    source: str
    destination: str
    keys: Sequence[ChunkKey]
    source_slots: Sequence[int]
    destination_slots: Sequence[int]
    timeout_s: float
    payload: Any = None


class TransferResult(NamedTuple):
    """What happened to a job, chunk by chunk.

    Attributes:
        job_id: The job.
        outcomes: One per chunk, in the job's order.
        settled: False while a thread may still touch the job's slots: the outcomes are final
            for whoever waits, but no slot may be reused until the settled result arrives.
        nbytes: Bytes that reached their destination.
        seconds: From the first byte asked for to the last; queueing excluded.
        queued_s: From submission to the first byte asked for.
        error: The first failure, for a log line; empty when all is done.
    """

    job_id: JobId
    outcomes: Sequence[Outcome]
    settled: bool = True
    nbytes: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of this process that another one can map too.

    Attributes:
        descriptor: Of the file behind it, mapped from its beginning.
        address: Where it begins in this process.
        nbytes: How much of it chunks may lie in.
    """

    descriptor: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Everything that must be equal for stored bytes to mean the same thing.

    Two engines with equal fingerprints may read each other's chunks; with different ones they
    never share a namespace, so bytes of another model, dtype or layout cannot be found.

    Attributes:
        fields: What the layout is made of: model, dtype, tokens per chunk, ranks, layout, ...
        label: The model's name for people; no part of the identity.
    """

    fields: Mapping[str, str | int]
    label: str = field(default="", compare=False)

    def namespace(self) -> str:
        """Return a directory name that differs whenever any field differs.

        >>> a = LayoutFingerprint({"model": "m", "tp": 1})
        >>> a.namespace() == LayoutFingerprint({"tp": 1, "model": "m"}).namespace()
        True
        >>> a.namespace() == LayoutFingerprint({"model": "m", "tp": 2}).namespace()
        False
        """
        canonical = json.dumps(dict(self.fields), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
