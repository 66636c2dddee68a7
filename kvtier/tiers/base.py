"""What a storage tier must be able to do.

A storage tier keeps chunks in numbered slots of equal size on some medium slower than RAM.
The manager decides which chunk lives in which slot; a tier never chooses, evicts or counts.
It moves bytes, proves on every read that they are the bytes that were written, and remembers
across restarts which slot held what.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kvtier.config import TierConfig
from kvtier.errors import CapacityError
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.types import LayoutFingerprint, Outcome, Purpose, SharedMemory

__all__ = [
    "SlotOutcomes",
    "StorageTier",
    "TierContext",
    "check_batch",
    "check_outcomes",
]


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is opened with besides its own options.

    Attributes:
        slot_nbytes: Bytes of one slot, a multiple of 4096.
        fingerprint: What the stored bytes mean; another fingerprint is another namespace.
        pool: Threads for the tier's blocking calls. Owned by the caller.
        piece_nbytes: Bytes of the largest single I/O call. A slot is never split, so a call
            moves at least one.
        memory: Where all buffers are, if another process can map it.
        owner_pid: Process id of the engine, which a lock names as the store's holder.
        was_reset: Whether that engine has reset its cache before: it opens the tier again, in
            place of a process that died.
    """

    slot_nbytes: int
    fingerprint: LayoutFingerprint
    pool: IoPool
    piece_nbytes: int = 8 << 20
    memory: SharedMemory | None = None
    owner_pid: int = field(default_factory=os.getpid)
    was_reset: bool = False

    @property
    def is_hosted(self) -> bool:
        """Whether the tier is in a process of its own and not in the engine's."""
        return self.owner_pid != os.getpid()


@dataclass(frozen=True, slots=True)
class SlotOutcomes:
    """What happened to each slot of one batch.

    Attributes:
        outcomes: One per chunk, in the batch's order; of a tier DONE, FAILED or CORRUPT.
        error: The first failure in words; empty when all is done.
    """

    outcomes: Sequence[Outcome]
    error: str = ""


def check_batch(
    tier: StorageTier,
    keys: Sequence[ChunkKey],
    slots: Sequence[int],
    views: Sequence[memoryview],
) -> None:
    """Check what :meth:`StorageTier.read` and :meth:`StorageTier.write` are given.

    Raises:
        CapacityError: They differ in number, or a buffer has not the size of a slot.
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


def check_outcomes(moved: SlotOutcomes, chunks: int) -> SlotOutcomes:
    """Return what a tier says of a batch, having checked that it says something of each chunk.

    Raises:
        TypeError: It does not.
    """
    outcomes = moved.outcomes
    if len(outcomes) != chunks or not {*map(type, outcomes)} <= {Outcome}:
        raise TypeError(f"not one outcome per chunk, but {outcomes!r:.80}")
    return moved


class StorageTier(ABC):
    """A medium with ``capacity_slots`` slots of ``slot_nbytes`` bytes.

    All coroutines run on the transfer engine's loop and must not block it: blocking calls go
    through :class:`kvtier.os.iopool.IoPool`. Batches may run concurrently; the manager
    guarantees that no two of them touch one slot unless both only read it.

    Attributes:
        name: The tier's name in the configuration.
        capacity_slots: Slots the tier has; room for them is reserved on the medium.
        slot_nbytes: Bytes of one slot, a multiple of 4096.
    """

    Options: ClassVar[type[TierConfig]]
    """The tier's section of the YAML file. ``kind`` is its name among the entry points, or the
    class as ``module:Class``."""

    is_local: ClassVar[bool] = True
    """Whether the medium is on this host; what requests and events call its locality."""

    name: str
    capacity_slots: int
    slot_nbytes: int

    @classmethod
    @abstractmethod
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Open the tier, recovering what earlier runs left; blocks.

        Args:
            options: An instance of :attr:`Options`.
            context: Geometry, meaning and threads.

        Raises:
            ConfigError: The options cannot work here; says what to do.
            StoreLockedError: Another process has the store open.
            StoreDamagedError: The store's files are not what they should be.
        """

    @abstractmethod
    def recovered(self) -> Iterable[tuple[ChunkKey, int]]:
        """Return the keys and slots that survived from earlier runs, least recently used first.

        Called once, before any other method, from the thread that opened the tier.
        No key and no slot occurs twice.
        """

    async def aopen(self) -> None:  # noqa: B027 - most tiers need no loop before the first call
        """Get ready on the loop that is going to use the tier, so that the first call is quick.

        Raises:
            TierUnavailableError: It cannot be used now; a later call tries again.
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

        A slot's former content is gone whether the write succeeds or not. When this returns,
        each chunk that is DONE reads back bit for bit, also after a restart.

        Raises:
            CapacityError: A slot or a buffer is not one of this tier's; nothing was done.
            ClosedError: The tier was closed.

        Cancellation:
            Deferred until no thread reads ``sources``; the slots' content is then unknown and
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
        """Read slot ``slots[i]`` into ``into[i]`` and prove that it is what was written.

        A slot that holds another key, was never written, is short or has a flipped bit is
        CORRUPT; one the medium cannot read is FAILED. The content of ``into[i]`` is undefined
        unless chunk ``i`` is DONE.

        Raises:
            CapacityError: A slot or a buffer is not one of this tier's; nothing was done.
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
        """Do :meth:`write`, and before this returns what of it needs no waiting.

        For a caller that surely awaits the result: if the task that is to do so is cancelled
        before its first step, nobody waits until the memory is free again. A tier whose work is
        done elsewhere, as in another process, gives it away here, a turn of the loop earlier.
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
        """Do :meth:`read`, and before this returns what of it needs no waiting.

        See :meth:`begin_write`.
        """
        return self.read(keys, slots, into, purpose=purpose)

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """Make sure that a restart does not bring back what ``slots`` hold. Never blocks.

        Once a later :meth:`write` has returned, this holds even if the process is killed.
        """

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Note that ``slots`` were used now, for :meth:`recovered`'s order. Never blocks."""

    @abstractmethod
    async def reset(self) -> None:
        """Forget everything, durably: a later restart recovers nothing written before this.

        Weights may have changed for as long as this engine lives, and the next one has those of
        before. So what is written from now on should not be recovered by it either, unless the
        operator said that resets have other reasons: a tier decides that for itself.

        Raises:
            TierUnavailableError: The medium failed. Nothing written before may be read, but a
                restart may recover it; a later call tries again.

        Cancellation:
            Leaves the tier as a failure does.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Finish index work and release files and locks. Idempotent.

        No ``read`` or ``write`` may be running. Afterwards every coroutine raises
        :class:`kvtier.errors.ClosedError`.
        """
