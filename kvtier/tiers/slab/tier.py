"""The slab tier: slots in one preallocated file, verified on every read."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.errors import CapacityError, ClosedError, TierUnavailableError
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.os.block_io import IOV_MAX, BlockIo
from kvtier.slot_ranges import consecutive_ranges
from kvtier.tiers.base import (
    Fields,
    SlotOutcomes,
    StorageTier,
    TierContext,
    TierExamination,
    check_batch,
)
from kvtier.tiers.part_hashes import (
    NO_PART_HASHES,
    PartHashes,
    PartHashKeeper,
    StoredPartHashes,
)
from kvtier.tiers.slab.examine import examine_slab
from kvtier.tiers.slab.group_commit import GroupCommit
from kvtier.tiers.slab.opening import OpenSlab, open_slab, release_slab
from kvtier.tiers.slab.piece_io import (
    MovedPiece,
    PieceBuffers,
    hash_key,
    read_piece,
    select_digest,
    write_piece,
)
from kvtier.tiers.slab.removals import RemovalReason
from kvtier.tiers.slab.schema import IndexDamagedError
from kvtier.tiers.slab.slot_table import SlotTable
from kvtier.tiers.slab.start_plan import slab_options
from kvtier.tiers.slab.stored_rows import StoredRows, mark_keys
from kvtier.types import Outcome, Purpose, SlotFileId

__all__ = ["SlabTier"]

logger = get_logger(__name__)

_LEAST_PIECE_NBYTES: Final = 512 << 10
"""Smallest piece when a read is split between threads; smaller pieces cost too much."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Checked arguments of a read or write, and its results so far."""

    keys: Sequence[ChunkKey]
    slots: npt.NDArray[np.int64]
    views: Sequence[memoryview]
    key_hashes: npt.NDArray[np.uint64]
    outcomes: list[Outcome]
    digests: list[int]
    errors: list[str]

    def pieces(self, chunks: npt.NDArray[np.int64], most: int) -> list[list[int]]:
        """Group the positions ``chunks`` into pieces of up to ``most`` consecutive slots."""
        ordered = chunks[np.argsort(self.slots[chunks], kind="stable")]
        groups = consecutive_ranges(self.slots[ordered].tolist(), most)
        return [ordered[group].tolist() for group in groups]

    def buffers(self, piece: Sequence[int]) -> PieceBuffers:
        """Return the memory and checksum seeds of the chunks at the positions ``piece``."""
        return PieceBuffers(
            int(self.slots[piece[0]]),
            [self.views[chunk] for chunk in piece],
            self.key_hashes[piece].tolist(),
        )

    def record(self, pieces: Sequence[Sequence[int]], moved: Sequence[MovedPiece]) -> None:
        """Record the results of ``pieces``."""
        for piece, what in zip(pieces, moved, strict=True):
            for chunk, outcome, digest in zip(piece, what.outcomes, what.digests, strict=True):
                self.outcomes[chunk] = outcome
                self.digests[chunk] = digest
            if what.error:
                self.errors.append(what.error)

    def fail(self, chunks: Sequence[int], error: str) -> None:
        """Record that ``chunks`` failed."""
        for chunk in chunks:
            self.outcomes[chunk] = Outcome.FAILED
        self.errors.append(error)

    def done(self) -> list[int]:
        """Return the positions of the chunks that are DONE."""
        return [chunk for chunk, what in enumerate(self.outcomes) if what is Outcome.DONE]

    def result(self) -> SlotOutcomes:
        """Return the outcomes."""
        return SlotOutcomes(tuple(self.outcomes), self.errors[0] if self.errors else "")


class SlabTier(StorageTier, PartHashKeeper):
    """A tier that keeps chunks in a directory on a local disk.

    Only the event loop's thread accesses the tier's state; pool threads return results to it.
    The tier owns the open files of ``store``; ``rows`` are those of earlier engines.
    """

    Options: ClassVar[type[TierConfig]] = NvmeTierConfig

    def __init__(
        self,
        options: NvmeTierConfig,
        context: TierContext,
        store: OpenSlab,
        rows: StoredRows,
    ) -> None:
        self.name = options.name
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = store.file.capacity_slots
        self._options = options
        self._pool = context.pool
        self._slots_per_piece = min(
            IOV_MAX, max(1, context.piece_nbytes // context.slot_nbytes)
        )
        self._digest = select_digest(alone=context.is_hosted)
        self._store = store
        self._table = SlotTable(self.capacity_slots)
        self._table.put(rows.slots, rows.key_hashes, rows.key_marks, rows.checksums)
        self._epoch = 0
        self._closed = False
        self._warned_of_reset = False
        self._recovered: StoredRows | None = rows
        self._retained = rows.retained
        outdated = rows.outdated.tolist()
        self._part_hashes = self._load_part_hashes(context.hash_parts)
        # Last, because it starts a thread, which a later failure would leave running.
        self._index = GroupCommit(store.database, name=options.name, clock=rows.clock)
        if outdated:
            self._index.delete_nowait(outdated)

    @classmethod
    @override
    def examine(cls, options: TierConfig, identity: Fields) -> TierExamination:
        return examine_slab(options, identity)

    @classmethod
    def open(
        cls, options: TierConfig, context: TierContext, *, io: BlockIo | None = None
    ) -> Self:
        """Open the cache in ``options.path`` and recover earlier chunks. This call blocks.

        The system calls of ``io`` may fail in tests.

        Raises:
            ConfigError: The options cannot work here; the message says what to do.
            CacheLockedError: The namespace is open already, or a namespace that must be removed
                is open in another process.
            CacheDamagedError: The namespace has foreign files or another layout.
            TierUnavailableError: The medium fails.
        """
        options = slab_options(options)
        store, rows = open_slab(options, context, io or BlockIo())
        try:
            tier = cls(options, context, store, rows)
        except BaseException:
            release_slab(store)
            raise
        logger.info(
            "tier %s: %s is open, %s",
            tier.name,
            store.namespace.directory,
            "O_DIRECT" if store.file.direct else "through the page cache",
        )
        return tier

    @override
    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        found, self._recovered = self._recovered, None
        return iter(() if found is None else found)

    @property
    @override
    def slot_file(self) -> SlotFileId:
        file = self._store.file
        return SlotFileId(self.name, str(file.path), *file.identity())

    @override
    def recovered_part_hashes(self) -> StoredPartHashes:
        found, self._part_hashes = self._part_hashes, NO_PART_HASHES
        return found

    @override
    def keep_part_hashes(self, slots: Sequence[int], hashes: PartHashes) -> None:
        if self._keeps_part_hashes:
            packed = [row.astype("<u8").tobytes() for row in hashes]
            self._index.keep_part_hashes_nowait(self._checked(slots).tolist(), packed)

    def _load_part_hashes(self, parts: int) -> StoredPartHashes:
        """Return the stored part hashes; warn and return none if the index cannot keep them."""
        self._keeps_part_hashes = False
        if not parts:
            return NO_PART_HASHES
        try:
            found = self._store.database.load_part_hashes(self.capacity_slots, parts)
        except (IndexDamagedError, sqlite3.Error) as error:
            logger.warning(
                "tier %s: the index cannot keep hashes for GDS reads, so earlier chunks are "
                "loaded through RAM: %s",
                self.name,
                error,
            )
            return NO_PART_HASHES
        self._keeps_part_hashes = True
        return found

    @override
    def retained(self) -> Mapping[int, int]:
        return self._retained

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        batch = self._batch(keys, slots, sources)
        epoch = self._epoch
        displaced = self._table.displaced(batch.slots, batch.key_hashes)
        self._index.log_removal_nowait(RemovalReason.EVICTED, displaced)
        self._table.drop(batch.slots)
        pieces = batch.pieces(np.arange(len(batch.slots)), self._slots_per_piece)
        failed_syncs = self._store.file.failed_syncs
        calls = [
            functools.partial(write_piece, self._store.file, batch.buffers(piece), self._digest)
            for piece in pieces
        ]
        batch.record(pieces, await self._pool.run_all(calls, priority=int(purpose)))
        if self._options.durability == "power":
            await self._sync(batch, failed_syncs, purpose)
        await self._commit(batch, epoch)
        return batch.result()

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        batch = self._batch(keys, slots, into)
        held = self._table.matches(batch.slots, batch.key_hashes)
        if len(held) < len(batch.slots):
            batch.errors.append("a slot does not hold the chunk asked for")
        pieces = batch.pieces(held, self._per_piece(len(held)))

        # Checksums are read before the first await, so bytes written meanwhile do not verify.
        calls = [self._call_to_read(batch, piece) for piece in pieces]
        batch.record(pieces, await self._pool.run_all(calls, priority=int(purpose)))
        return batch.result()

    def _call_to_read(self, batch: _Batch, piece: Sequence[int]) -> Callable[[], MovedPiece]:
        """Return the blocking call that reads and verifies ``piece`` of ``batch``."""
        checksums = self._table.checksums(batch.slots[piece])
        buffers = batch.buffers(piece)
        return functools.partial(read_piece, self._store.file, buffers, checksums, self._digest)

    @override
    def forget(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.forget`; durable in about a second."""
        checked = self._checked(slots)
        self._index.log_removal_nowait(RemovalReason.CORRUPT, self._table.held(checked))
        self._table.drop(checked)
        self._index.delete_nowait(checked.tolist())

    @override
    def touch(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.touch`; committed in about a second."""
        self._index.use_nowait(self._checked(slots).tolist())

    @override
    async def reset(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.reset`.

        Writes in progress fail, because their bytes are older than the reset. Later writes do
        not survive a restart unless ``keep_after_reset`` is set;
        :mod:`kvtier.tiers.slab.opening` says why.

        Raises:
            ClosedError: The tier was closed.
            TierUnavailableError: The index could neither be cleared nor moved away. Nothing is
                readable now, but a restart may recover the old chunks.
        """
        self._require_open()
        self._epoch += 1
        self._index.log_removal_nowait(RemovalReason.RESET, self._table.key_marks())
        self._table.clear()
        self._recovered = None
        self._part_hashes = NO_PART_HASHES
        try:
            await self._index.clear(after_reset=not self._options.keep_after_reset)
        except sqlite3.Error as error:
            await self._abandon_index(error)
        else:
            self._warn_of_reset()

    async def _abandon_index(self, cause: sqlite3.Error) -> None:
        """Rename an index that cannot be cleared, so that a restart ignores it."""
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
            "tier %s: the index could not be cleared (%s) and is now %s; chunks stored from "
            "now on do not survive a restart",
            self.name,
            cause,
            aside,
        )

    @override
    async def aclose(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.aclose`; call before the pool is closed."""
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
            self._warn_if_moved()
            release_slab(self._store)
        except (OSError, sqlite3.Error) as error:
            # The payloads and all committed rows are safe.
            logger.warning("tier %s: not closed cleanly: %s", self.name, error)

    def _warn_if_moved(self) -> None:
        file = self._store.file
        if not file.is_in_place():
            logger.warning(
                "tier %s: %s was moved, replaced or removed while in use: the next engine does "
                "not find its chunks unless it is put back",
                self.name,
                file.path,
            )

    async def _sync(self, batch: _Batch, failed_before: int, purpose: Purpose) -> None:
        """Sync the slot file; record the written chunks as FAILED if a sync failed."""
        file = self._store.file
        try:
            await self._pool.run(file.sync, priority=int(purpose))
        except OSError as error:
            batch.fail(batch.done(), f"not synced: {error.strerror}")
        done = batch.done()
        if done and file.failed_syncs != failed_before:
            # The kernel reported a failure to another batch; it may concern these bytes.
            batch.fail(done, "not synced: the disk failed meanwhile")

    async def _commit(self, batch: _Batch, epoch: int) -> None:
        """Commit the written chunks' rows, so that they are readable, also after a restart."""
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
        """Return the largest number of chunks per system call in a read of ``chunks`` chunks.

        A read that fits into one call is split between all threads. So it ends sooner, and the
        next read overlaps with the verification. Longer reads have several pieces anyway.
        """
        if chunks > self._slots_per_piece:
            return self._slots_per_piece
        least = -(-_LEAST_PIECE_NBYTES // self.slot_nbytes)
        return max(-(-chunks // self._pool.threads), least)

    def _warn_of_reset(self) -> None:
        """Warn once about the effect of a reset on a restart."""
        if not (self._warned_of_reset or self._options.keep_after_reset):
            self._warned_of_reset = True
            logger.warning(
                "tier %s: the cache was reset; chunks stored from now on do not survive a "
                "restart, because the weights may have changed: if they never change while an "
                "engine runs, set keep_after_reset: true",
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
