"""The slab tier: slots in one preallocated file, verified on every read."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.errors import CapacityError, ClosedError, ConfigError, TierUnavailableError
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.tiers.base import (
    SlotOutcomes,
    StorageTier,
    TierContext,
    check_batch,
)
from kvtier.tiers.slab.checksum import hash_key, select_digest
from kvtier.tiers.slab.direct_io import IOV_MAX, BlockIo
from kvtier.tiers.slab.group_commit import GroupCommit
from kvtier.tiers.slab.index import StoredRows
from kvtier.tiers.slab.moving import Moved, PieceBuffers, read_piece, write_piece
from kvtier.tiers.slab.opening import (
    OpenStore,
    close_store,
    open_store,
    release_store,
    slots_within,
)
from kvtier.tiers.slab.pieces import Piece, plan_pieces
from kvtier.tiers.slab.table import SlotTable
from kvtier.tiers.slab.trail import Reason, mark_keys
from kvtier.tiers.slab.whereabouts import Whereabouts
from kvtier.types import Outcome, Purpose

__all__ = ["SlabTier"]

logger = get_logger(__name__)

_LEAST_PIECE_NBYTES: Final = 512 << 10
"""Of a read that all threads share: less is hardly worth a call of its own."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments of a read or write, checked, and its result as it comes together."""

    keys: Sequence[ChunkKey]
    slots: npt.NDArray[np.int64]
    views: Sequence[memoryview]
    key_hashes: npt.NDArray[np.uint64]
    outcomes: list[Outcome]
    digests: list[int]
    errors: list[str]

    def buffers(self, piece: Piece) -> PieceBuffers:
        """Return what the I/O needs of ``piece``."""
        return PieceBuffers(
            piece.first_slot,
            [self.views[chunk] for chunk in piece.chunks],
            self.key_hashes[piece.chunks].tolist(),
        )

    def note_all(self, pieces: Sequence[Piece], moved: Sequence[Moved]) -> None:
        """Enter what became of each of ``pieces``."""
        for piece, what in zip(pieces, moved, strict=True):
            for chunk, outcome, digest in zip(
                piece.chunks, what.outcomes, what.digests, strict=True
            ):
                self.outcomes[chunk] = outcome
                self.digests[chunk] = digest
            if what.error:
                self.errors.append(what.error)

    def fail(self, chunks: Sequence[int], error: str) -> None:
        """Enter that ``chunks`` failed."""
        for chunk in chunks:
            self.outcomes[chunk] = Outcome.FAILED
        self.errors.append(error)

    def done(self) -> list[int]:
        """Return the positions that are DONE so far."""
        return [chunk for chunk, what in enumerate(self.outcomes) if what is Outcome.DONE]

    def result(self) -> SlotOutcomes:
        """Return the outcomes for the caller."""
        return SlotOutcomes(tuple(self.outcomes), self.errors[0] if self.errors else "")


class SlabTier(StorageTier):
    """Chunks in a directory on a local disk.

    State lives on the event loop's thread; what runs on the pool gets and returns values.

    Args:
        options: The tier's section of the configuration.
        context: Geometry, meaning and threads.
        store: The open files; owned by the tier from now on.
        rows: What an earlier run left.
    """

    Options: ClassVar[type[TierConfig]] = NvmeTierConfig

    def __init__(
        self,
        options: NvmeTierConfig,
        context: TierContext,
        store: OpenStore,
        rows: StoredRows,
    ) -> None:
        self.name = options.name
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = slots_within(options, context)
        self._options = options
        self._pool = context.pool
        self._slots_per_piece = min(
            IOV_MAX, max(1, context.piece_nbytes // context.slot_nbytes)
        )
        self._digest = select_digest(options.checksum, alone=context.is_hosted)
        self._store = store
        self._table = SlotTable(self.capacity_slots)
        self._table.put(rows.slots, rows.key_hashes, rows.key_marks, rows.checksums)
        self._epoch = 0
        self._closed = False
        self._told_of_doubt = False
        self._recovered: StoredRows | None = rows
        outdated = rows.outdated.tolist()
        files = (store.namespace.slots_path, store.namespace.index_path)
        self._whereabouts = Whereabouts(options.name, files, store.file.is_removed)
        # Last, for it has a thread, which nobody would stop if anything after it failed.
        self._index = GroupCommit(
            store.database,
            name=options.name,
            clock=rows.clock,
            on_commit=self._whereabouts.look,
        )
        if outdated:
            self._index.delete_nowait(outdated)

    @classmethod
    def open(
        cls, options: TierConfig, context: TierContext, *, io: BlockIo | None = None
    ) -> Self:
        """Open the store at ``options.path``, recovering what earlier runs left; blocks.

        Args:
            options: A :class:`kvtier.config.NvmeTierConfig`.
            context: Geometry, meaning and threads.
            io: The system calls to use; tests pass failing ones.

        Raises:
            ConfigError: The options cannot work here; says what to do.
            StoreLockedError: Another engine has this model's part of the store open.
            StoreDamagedError: What is at the path is not a store of this layout.
            TierUnavailableError: The medium fails.
        """
        if not isinstance(options, NvmeTierConfig):
            raise ConfigError(
                f"{cls.__name__} takes NvmeTierConfig, not {type(options).__name__}"
            )
        store, rows = open_store(options, context, io or BlockIo())
        try:
            tier = cls(options, context, store, rows)
        except BaseException:
            release_store(store)
            raise
        logger.info(
            "tier %s: %s is open, %s",
            tier.name,
            store.namespace.directory,
            "O_DIRECT" if store.file.direct else "through the page cache",
        )
        return tier

    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        """Return what survived from earlier runs, least recently used first; once."""
        found, self._recovered = self._recovered, None
        return iter(() if found is None else found)

    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """See :meth:`kvtier.tiers.base.StorageTier.write`."""
        batch = self._batch(keys, slots, sources)
        epoch = self._epoch
        leaving = self._table.displaced(batch.slots, batch.key_hashes)
        self._index.depart_nowait(Reason.EVICTED, leaving)
        self._table.drop(batch.slots)
        everything = np.arange(len(batch.slots))
        pieces = plan_pieces(batch.slots, everything, slots_per_piece=self._slots_per_piece)
        if self._options.checksum == "off" and not await self._delete_rows(batch):
            return batch.result()

        failed_syncs = self._store.file.failed_syncs
        calls = [
            functools.partial(write_piece, self._store.file, batch.buffers(piece), self._digest)
            for piece in pieces
        ]
        batch.note_all(pieces, await self._pool.run_all(calls, priority=int(purpose)))
        if self._options.durability == "power":
            await self._sync(batch, failed_syncs, purpose)
        await self._commit(batch, epoch)
        return batch.result()

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """See :meth:`kvtier.tiers.base.StorageTier.read`."""
        batch = self._batch(keys, slots, into)
        held = self._table.matches(batch.slots, batch.key_hashes)
        if len(held) < len(batch.slots):
            batch.errors.append("a slot does not hold the chunk asked for")
        pieces = plan_pieces(batch.slots, held, slots_per_piece=self._per_piece(len(held)))

        # The checksums are taken before the first await: what is written meanwhile, against
        # the rules, does not verify.
        calls = [
            functools.partial(
                read_piece,
                self._store.file,
                batch.buffers(piece),
                self._table.checksums(batch.slots[piece.chunks]),
                self._digest,
            )
            for piece in pieces
        ]
        batch.note_all(pieces, await self._pool.run_all(calls, priority=int(purpose)))
        return batch.result()

    def forget(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.forget`; durable within moments."""
        checked = self._checked(slots)
        self._index.depart_nowait(Reason.CORRUPT, self._table.held(checked))
        self._table.drop(checked)
        self._index.delete_nowait(checked.tolist())

    def touch(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.touch`; kept with the next commit."""
        self._index.use_nowait(self._checked(slots).tolist())

    async def reset(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.reset`.

        Writes in progress fail: their bytes belong to the time before. What is written later
        does not survive a restart, unless ``keep_after_reset`` says so: why, says
        :mod:`kvtier.tiers.slab.opening`.

        Raises:
            ClosedError: The tier was closed.
            TierUnavailableError: The index could neither be cleared nor moved away. Nothing is
                readable now, but a restart may bring back what was there.
        """
        self._require_open()
        self._epoch += 1
        self._index.depart_nowait(Reason.RESET, self._table.key_marks())
        self._table.clear()
        self._recovered = None
        try:
            await self._index.clear(doubt=not self._options.keep_after_reset)
        except sqlite3.Error as error:
            await self._abandon_index(error)
        else:
            self._tell_of_doubt()

    async def _abandon_index(self, cause: sqlite3.Error) -> None:
        """Move an index that cannot be cleared out of a restart's way; that takes no room."""
        self._whereabouts.leave_out(self._store.namespace.index_path)
        call = self._store.namespace.set_index_aside
        try:
            aside = await self._pool.run(call, priority=int(Purpose.DEMOTE))
        except OSError as error:
            raise TierUnavailableError(
                self.name,
                f"the index was neither cleared ({cause}) nor moved away ({error}); remove "
                f"{self._store.namespace.directory} before an engine opens it again",
            ) from error
        logger.warning(
            "tier %s: the index could not be cleared (%s) and is now %s; what is stored from "
            "now on does not survive a restart",
            self.name,
            cause,
            aside,
        )

    async def aclose(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.aclose`; before the pool is closed."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._pool.run(self._release, priority=int(Purpose.DEMOTE))
        except ClosedError:
            self._release()

    def _release(self) -> None:
        try:
            self._index.stop()
            self._whereabouts.look_once_more()
            close_store(self._store, self._options)
        except (OSError, sqlite3.Error) as error:
            # The payloads and all rows committed so far are where they should be.
            logger.warning("tier %s: not closed cleanly: %s", self.name, error)

    async def _delete_rows(self, batch: _Batch) -> bool:
        """Delete the rows of slots that are about to be overwritten, when nothing else helps.

        Without checksums a row that outlives its payload would serve another chunk's bytes.
        """
        try:
            await self._index.delete(batch.slots.tolist())
        except sqlite3.Error as error:
            batch.fail(range(len(batch.slots)), f"the index was not written: {error}")
            return False
        return True

    async def _sync(self, batch: _Batch, failed_before: int, purpose: Purpose) -> None:
        """Wait until what was written survives loss of power."""
        file = self._store.file
        try:
            await self._pool.run(file.sync, priority=int(purpose))
        except OSError as error:
            batch.fail(batch.done(), f"not synced: {error.strerror}")
        done = batch.done()
        if done and file.failed_syncs != failed_before:
            # Another batch was told of a failure, and it may have been about these bytes.
            batch.fail(done, "not synced: the disk failed meanwhile")

    async def _commit(self, batch: _Batch, epoch: int) -> None:
        """Make the chunks written so far readable, now and after a restart."""
        done = batch.done()
        if not done:
            return
        slots = batch.slots[done]
        checksums = np.array([batch.digests[chunk] for chunk in done], dtype=np.uint64)
        keys = [batch.keys[chunk] for chunk in done]
        try:
            if epoch == self._epoch:
                await self._index.put(slots.tolist(), keys, checksums.view(np.int64).tolist())
        except sqlite3.Error as error:
            batch.fail(done, f"the index was not written: {error}")
        else:
            if epoch == self._epoch:
                self._table.put(slots, batch.key_hashes[done], mark_keys(keys), checksums)
            else:
                batch.fail(done, "the tier was reset meanwhile")

    def _per_piece(self, chunks: int) -> int:
        """Return how many of the chunks of a read to move by one call at most.

        All threads share a read that one call could do, so that it is over sooner and what is
        asked for next begins to arrive while it is verified. Of a longer one each has its part
        anyway.
        """
        if chunks > self._slots_per_piece:
            return self._slots_per_piece
        least = -(-_LEAST_PIECE_NBYTES // self.slot_nbytes)
        return max(-(-chunks // self._pool.threads), least)

    def _tell_of_doubt(self) -> None:
        """Log once what a reset means for a restart."""
        if not (self._told_of_doubt or self._options.keep_after_reset):
            self._told_of_doubt = True
            logger.warning(
                "tier %s: the cache was reset; what is stored from now on does not survive a "
                "restart, for the weights may have changed and change back then: where they "
                "never do, set keep_after_reset: true",
                self.name,
            )

    def _batch(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], views: Sequence[memoryview]
    ) -> _Batch:
        self._require_open()
        check_batch(self, keys, slots, views)
        count = len(keys)
        return _Batch(
            keys=keys,
            slots=self._checked(slots),
            views=[view if view.format == "B" else view.cast("B") for view in views],
            key_hashes=np.fromiter(map(hash_key, keys), dtype=np.uint64, count=count),
            outcomes=[Outcome.CORRUPT] * count,
            digests=[0] * count,
            errors=[],
        )

    def _checked(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.asarray(slots, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.capacity_slots:
            raise CapacityError(
                f"tier {self.name}: slots {numbers.min()} to {numbers.max()} are not all among "
                f"its {self.capacity_slots}"
            )
        return numbers

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")
