"""Values that the manager, the transfer engine and the connector exchange."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from kvtier.keys import ChunkKey

__all__ = [
    "GdsMode",
    "GdsReads",
    "Job",
    "JobId",
    "LayoutFingerprint",
    "Outcome",
    "Purpose",
    "QuestionPart",
    "SharedMemory",
    "SlotFileId",
    "TransferResult",
]

JobId = int

GdsMode: TypeAlias = Literal["auto", "require", "off"]
"""Whether workers read chunks of a tier straight into GPU memory."""


class Purpose(enum.IntEnum):
    """Purpose of a job. Jobs with smaller values run first."""

    LOAD = 0
    """Tier -> GPU; a request waits."""
    QUESTION = 1
    """Ask a shared tier which chunks it has; a request waits. No bytes move."""
    PROMOTE = 2
    """Slower tier -> faster tier; a request waits or will wait."""
    STORE = 3
    """GPU -> tier."""
    DEMOTE = 4
    """Faster tier -> slower tier."""


class Outcome(enum.Enum):
    """Result of one chunk of a job."""

    DONE = "done"
    """Every byte is at its destination; bytes from a slower tier were verified."""
    FAILED = "failed"
    """The medium failed; the destination is undefined."""
    CORRUPT = "corrupt"
    """The source has wrong bytes, or another chunk."""
    OVERWRITTEN = "overwritten"
    """The source was overwritten before the transfer ended: a RAM slot got another chunk, or
    the engine reused the blocks of a store."""
    EXPIRED = "expired"
    """The deadline passed."""
    CANCELLED = "cancelled"
    """The transfer became unnecessary: the request ended, the cache was reset, the engine
    closes, or an earlier chunk did not arrive. The medium works."""
    MISSING = "missing"
    """The source, a shared tier, has lost the chunk. The medium works."""
    REFUSED = "refused"
    """The job was not accepted: the queue is full, the tier is out of service, the rank cannot
    do GDS reads, or the chunk's blocks are lost."""


class Job(NamedTuple):
    """A batch of moves from one tier to another, or a question to a shared tier.

    Chunk ``i`` moves from slot ``source_slots[i]`` to slot ``destination_slots[i]``. In a job
    with purpose QUESTION, both tiers are the shared tier, and the slot numbers have no meaning.

    A *device job*, with purpose LOAD or STORE, copies between ``gpu`` and ``ram``. It has no
    keys, and both slot numbers of a chunk are its RAM slot, or negative if it has none. If a
    load has :class:`GdsReads`, its source is ``gds``.

    Attributes:
        job_id: Number of the job, unique among the jobs of one transfer engine.
        purpose: Purpose of the job, which sets its priority.
        source: Name of the tier that is read.
        destination: Name of the tier that is written.
        keys: The chunks' keys.
        source_slots: Slot numbers in the source tier.
        destination_slots: Slot numbers in the destination tier.
        timeout_s: Seconds after submission at which the job expires.
        payload: Extra data for the route: the generations of the RAM slots; in a question, the
            :class:`QuestionPart` of each group; in a load, a
            :class:`~kvtier.transfer.device.LoadPayload`; in a store, a
            :class:`~kvtier.transfer.device.StorePayload`.
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

    @property
    def moves_nothing(self) -> bool:
        """Whether the job only asks a tier which chunks it has."""
        return self.purpose is Purpose.QUESTION


class QuestionPart(NamedTuple):
    """The chunks of one KV cache group in a question to a shared tier.

    Attributes:
        chunks: Number of chunks.
        first_token: Position of the first chunk's first token in the prompt.
        chunk_tokens: Tokens of a chunk.
        is_prefix: True if a hit needs all chunks of the group; False if it needs only the last
            ones.
    """

    chunks: int
    first_token: int
    chunk_tokens: int
    is_prefix: bool


class TransferResult(NamedTuple):
    """Results of a job, chunk by chunk.

    Attributes:
        job_id: The job.
        outcomes: The outcome of each chunk, in the job's order.
        settled: False while a thread may still use the job's slots. The outcomes are final
            then, but the slots must not be reused until the settled result arrives.
        nbytes: Number of bytes that reached their destination.
        seconds: Seconds of the transfer, without the time in the queue.
        queued_s: Seconds in the queue.
        error: The first failure, for a log line; empty if every chunk is done.
        source: Name of the tier that was read, from a transfer engine that ran the job.
        destination: Name of the tier that was written, likewise.
    """

    job_id: JobId
    outcomes: Sequence[Outcome]
    settled: bool = True
    nbytes: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    error: str = ""
    source: str = ""
    destination: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every chunk reached its destination."""
        return self.outcomes.count(Outcome.DONE) == len(self.outcomes)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of this process that another process can map.

    Attributes:
        descriptor: File descriptor; the mapping starts at offset 0.
        address: Start address in this process.
        nbytes: Number of bytes that chunks may use.
    """

    descriptor: int
    address: int
    nbytes: int


class SlotFileId(NamedTuple):
    """Identifies the slot file of an NVMe tier, for another process that opens it.

    Attributes:
        tier: Name of the tier, for messages.
        path: The file.
        device: Device number of the file system, ``st_dev``.
        inode: Inode number of the file, ``st_ino``.
    """

    tier: str
    path: str
    device: int
    inode: int


class GdsReads(NamedTuple):
    """The chunks of a load that each rank reads from an NVMe tier, without RAM slots.

    Attributes:
        file: The tier's slot file.
        positions: Positions of the chunks in the load, ascending.
        slots: Slots of the chunks in the tier.
        part_hashes: Hashes of all parts of each chunk, as 64-bit numbers of this machine.
    """

    file: SlotFileId
    positions: Sequence[int]
    slots: Sequence[int]
    part_hashes: bytes

    def hashes_of(self, part: int) -> list[int]:
        """Return the hash of part number ``part`` of each chunk."""
        hashes = memoryview(self.part_hashes).cast("Q")
        return hashes[part :: len(hashes) // len(self.slots)].tolist()


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """All values that must be equal for two engines to share stored chunks.

    Engines with different fingerprints use different namespaces, so they never find chunks of
    another model, dtype or layout.

    Attributes:
        fields: Model, dtype, tokens per chunk, ranks, layout and others, by name.
        label: The model's name for messages; not part of the identity.
        groups: The KV cache groups as JSON values, for tools that compute keys without an
            engine; not part of the identity.
    """

    fields: Mapping[str, str | int]
    label: str = field(default="", compare=False)
    groups: Sequence[Mapping[str, str | int]] = field(default=(), compare=False)

    def namespace(self) -> str:
        """Return a directory name that differs if any field differs.

        >>> a = LayoutFingerprint({"model": "m", "tp": 1})
        >>> a.namespace() == LayoutFingerprint({"tp": 1, "model": "m"}).namespace()
        True
        >>> a.namespace() == LayoutFingerprint({"model": "m", "tp": 2}).namespace()
        False
        """
        canonical = json.dumps(dict(self.fields), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
