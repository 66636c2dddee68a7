"""The contract of a storage tier.

A storage tier keeps chunks in numbered slots of equal size on a medium slower than RAM. The
manager chooses the slot of each chunk and decides evictions. A tier moves bytes and verifies
them on every read. It remembers across restarts which slot holds which chunk.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvtier.config import Remark, TierConfig
from kvtier.errors import CapacityError
from kvtier.keys import ChunkKey
from kvtier.os.limits import allocated_nbytes, free_disk_nbytes
from kvtier.types import LayoutFingerprint, Outcome, Purpose, QuestionPart, SharedMemory

if TYPE_CHECKING:
    from kvtier.os.iopool import IoPool  # imports asyncio, which `kvtier check` does without

__all__ = [
    "Fields",
    "KeyFinder",
    "SlotOutcomes",
    "StorageTier",
    "TierContext",
    "TierExamination",
    "check_batch",
    "check_outcomes",
]

Fields = Mapping[str, str | int]
"""Name and value of each known setting in an engine's identity."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """Arguments of :meth:`StorageTier.open` besides the tier's own options.

    Attributes:
        slot_nbytes: Bytes of one slot, a multiple of 4096.
        fingerprint: The settings that a chunk's bytes depend on; each fingerprint has its own
            namespace.
        pool: The caller's threads, for the tier's blocking calls.
        piece_nbytes: Largest number of bytes that one I/O call moves. A larger slot is still
            moved by one call.
        memory: Shared memory that contains all buffers; None if the buffers are not shared.
        owner_pid: Process id of the engine; the cache's lock names it as the holder.
        was_reset: Whether this engine has already reset its cache. False unless the tier's
            process died and is started again.
        hash_parts: Number of part hashes that the tier must keep for each chunk
            (:mod:`kvtier.tiers.part_hashes`); 0 for none.
        mapped: The bytes of ``memory``, in the process of a hosted tier; None in other
            processes.
    """

    slot_nbytes: int
    fingerprint: LayoutFingerprint
    pool: IoPool
    piece_nbytes: int = 8 << 20
    memory: SharedMemory | None = None
    owner_pid: int = field(default_factory=os.getpid)
    was_reset: bool = False
    hash_parts: int = 0
    mapped: memoryview | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether the tier runs in its own process."""
        return self.owner_pid != os.getpid()


@dataclass(frozen=True, slots=True)
class SlotOutcomes:
    """The outcome of each chunk in one read or one write.

    Attributes:
        outcomes: Outcome of each chunk, in the batch's order: DONE, FAILED or CORRUPT. A shared
            tier may also return MISSING or REFUSED.
        error: Message of the first failure; empty if all are DONE.
    """

    outcomes: Sequence[Outcome]
    error: str = ""


@dataclass(frozen=True, slots=True)
class TierExamination:
    """Report on what a starting engine would find in a tier's directory.

    Attributes:
        refusals: Reasons why the engine would not start.
        warnings: Warnings that the start would log.
        notes: What an engine with another identity, such as another model, would do to the
            cache.
        holders: Human-readable names of the processes that have a namespace of the cache
            directory open.
        free_nbytes: Free bytes of the file system; None if the file system reports no size.
        wanted_nbytes: Bytes of disk room that the slots and the index still need.
        index_nbytes: The index's share of ``wanted_nbytes``.
        reclaimed_nbytes: Bytes of other caches' slots that the start would remove.
        own_nbytes: Bytes of disk room that this engine's cache already uses.
    """

    refusals: Sequence[Remark] = ()
    warnings: Sequence[Remark] = ()
    notes: Sequence[Remark] = ()
    holders: Sequence[str] = ()
    free_nbytes: int | None = None
    wanted_nbytes: int = 0
    index_nbytes: int = 0
    reclaimed_nbytes: int = 0
    own_nbytes: int = 0


def check_batch(
    tier: StorageTier,
    keys: Sequence[ChunkKey],
    slots: Sequence[int],
    views: Sequence[memoryview],
) -> None:
    """Check the arguments of :meth:`StorageTier.read` and :meth:`StorageTier.write`.

    Raises:
        CapacityError: Keys, slots and buffers differ in number, or a buffer differs in
            size from a slot.
    """
    if not len(keys) == len(slots) == len(views):
        raise CapacityError(
            f"tier {tier.name}: {len(keys)} keys, {len(slots)} slots, {len(views)} buffers"
        )
    for view in views:
        if view.nbytes != tier.slot_nbytes:
            raise CapacityError(
                f"tier {tier.name}: a buffer of {view.nbytes} bytes for a slot of "
                f"{tier.slot_nbytes}"
            )


def check_outcomes(moved: SlotOutcomes, chunks: int, *, mover: str) -> SlotOutcomes:
    """Return ``moved`` after checking that it has one outcome per chunk.

    ``mover`` names the object that moved the chunks, such as ``tier nvme``, for the error.

    Raises:
        TypeError: The number of outcomes is not ``chunks``, or a value is no
            :class:`~kvtier.types.Outcome`.
    """
    outcomes = moved.outcomes
    if len(outcomes) != chunks:
        raise TypeError(f"{mover} returned {len(outcomes)} outcomes for {chunks} chunks")
    if not {*map(type, outcomes)} <= {Outcome}:
        raise TypeError(f"{mover} returned values that are no outcomes: {outcomes!r:.80}")
    return moved


class StorageTier(ABC):
    """A medium with ``capacity_slots`` slots of ``slot_nbytes`` bytes.

    All coroutines run on the transfer engine's loop. They must not block that loop: blocking
    calls go through :class:`kvtier.os.iopool.IoPool`. Batches may run concurrently. The manager
    guarantees that two concurrent batches share a slot only if both batches read.

    Attributes:
        name: The tier's name in the configuration.
        capacity_slots: Number of slots; the tier reserves room for them on the medium.
        slot_nbytes: Bytes of one slot, a multiple of 4096.
    """

    Options: ClassVar[type[TierConfig]]
    """The class that parses the tier's section of the YAML file. In that section, ``kind`` is
    the tier's entry point, or the tier's class as ``module:Class``."""

    is_local: bool = True
    """Whether the medium is on this machine. Hints and events report such a tier as
    ``LOCAL``."""

    moves_in_process: ClassVar[bool] = True
    """Whether this process accesses the buffers. If so, the engine maps the buffers' pages."""

    name: str
    capacity_slots: int
    slot_nbytes: int

    @classmethod
    def examine(cls, options: TierConfig, identity: Fields) -> TierExamination | None:  # noqa: ARG003
        """Report what a start with ``options`` would find in the tier's directory.

        ``kvtier check`` and ``doctor`` use the report. By default, the report compares the
        capacity with the free bytes of the disk that has ``options.local_directory()``. A tier
        that can report more overrides this method. An override may block for half a second and
        must not change the cache.

        Args:
            options: An instance of :attr:`Options`.
            identity: The known part of the engine's identity.

        Returns:
            The report; None if the tier has no local directory.

        Raises:
            ConfigError: The cache cannot be examined; the message says what to do.
            OSError: The file system failed.
        """
        store = options.local_directory()
        if store is None:
            return None
        held_nbytes = allocated_nbytes(store.path)
        place = store.path if store.path.exists() else store.path.parent
        return TierExamination(
            free_nbytes=free_disk_nbytes(place),
            wanted_nbytes=max(options.capacity_bytes - held_nbytes, 0),
            own_nbytes=held_nbytes,
        )

    @classmethod
    @abstractmethod
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Open the tier and recover the chunks of earlier engines. This call blocks.

        Args:
            options: An instance of :attr:`Options`.
            context: Slot size, fingerprint, and threads.

        Raises:
            ConfigError: The options cannot work here; the message says what to do.
            CacheLockedError: Another process has the cache open.
            CacheDamagedError: The cache's files are damaged or foreign.
        """

    @abstractmethod
    def recovered(self) -> Iterable[tuple[ChunkKey, int]]:
        """Return the recovered chunks, each as key and slot, least recently used first.

        This method is called once, before any other method, from the thread that opened the
        tier. Keys and slots are unique.
        """

    def retained(self) -> Mapping[int, int]:
        """Return the slots to protect from eviction, each with the end of its protection.

        The ends are in seconds since the epoch. The chunks are among those of
        :meth:`recovered`. If they fill more than the share ``options.retained_share()`` of the
        tier, the excess may be evicted.
        """
        return {}

    async def aopen(self) -> None:  # noqa: B027 - most tiers need no loop before the first call
        """Prepare the tier on the loop that will use it, so that the first call is fast.

        Raises:
            TierUnavailableError: The tier cannot be used now; a later call tries again.

        Cancellation:
            The tier may or may not be prepared; a later call prepares it.
        """

    @abstractmethod
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """Write ``sources[i]`` (``slot_nbytes`` bytes) to slot ``slots[i]`` under ``keys[i]``.

        A slot loses its former content even if the write fails. After this method returns, each
        DONE chunk reads back bit for bit, also after a restart.

        Raises:
            CapacityError: A slot or a buffer does not belong to this tier. No chunk was
                written.
            ClosedError: The tier was closed.

        Cancellation:
            Deferred until no thread reads ``sources``. Each slot then holds its new chunk or
            reads as a miss.
        """

    @abstractmethod
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """Read slot ``slots[i]`` into ``into[i]`` and verify the bytes.

        A chunk is CORRUPT if its slot holds another key, was never written, is incomplete or
        has a flipped bit. A chunk is FAILED if the medium cannot read its slot. The content of
        ``into[i]`` is undefined unless chunk ``i`` is DONE.

        Raises:
            CapacityError: A slot or a buffer does not belong to this tier. No chunk was read.
            ClosedError: The tier was closed.

        Cancellation:
            Deferred until no thread writes into ``into``.
        """

    def begin_write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        """Start a :meth:`write` now, if the tier can; the caller awaits the returned coroutine.

        By default, nothing starts before the await. A tier in another process sends the job
        during this call, and so saves one turn of the loop.

        If a task awaits the coroutine, do not cancel the task before it first runs. Such a
        cancellation does not wait until the memory is unused.
        """
        return self.write(keys, slots, sources, purpose=purpose)

    def begin_read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        """Start a :meth:`read` now, if the tier can; the rules of :meth:`begin_write` apply."""
        return self.read(keys, slots, into, purpose=purpose)

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """Forget the content of ``slots``, so that no restart recovers it. Never blocks.

        After a later :meth:`write` has returned, the content stays forgotten even if the
        process is killed.
        """

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Record a use of ``slots``, for the order of :meth:`recovered`. Never blocks."""

    @abstractmethod
    async def reset(self) -> None:
        """Forget all chunks durably: a restart recovers no chunk written before the reset.

        A reset may mean that this engine has new weights, while the next engine starts with
        the old weights. So a restart should not recover chunks written after the reset either.
        A tier may have an option for engines whose resets have other reasons.

        Raises:
            TierUnavailableError: The medium failed. Earlier chunks are unreadable now, but a
                restart may recover them; a later call tries again.

        Cancellation:
            Has the same effects as a :class:`~kvtier.errors.TierUnavailableError`.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Commit pending changes of the index, then release files and locks. Idempotent.

        No ``read`` or ``write`` may be running. Afterwards every coroutine raises
        :class:`kvtier.errors.ClosedError`, and ``forget`` and ``touch`` never raise.

        Cancellation:
            The tier may still have files and locks open; another call finishes closing it.
        """


class KeyFinder(ABC):
    """The interface for asking a tier which chunks other engines have added."""

    @abstractmethod
    async def find(
        self, keys: Sequence[ChunkKey], parts: Sequence[QuestionPart]
    ) -> SlotOutcomes:
        """Return DONE for each key that the tier probably has, and MISSING for the others.

        Args:
            keys: Chunks of one prompt, group by group.
            parts: Description of each group's chunks, in the order of the groups in ``keys``.

        Raises:
            ClosedError: The tier was closed.
            TierUnavailableError: The service did not answer.

        Cancellation:
            Has no effect on the tier.
        """
