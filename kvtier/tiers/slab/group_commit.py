"""Group commit: a thread that writes the index, with one commit for many changes.

Changes that arrive during a commit share the next commit. Rows are committed immediately,
because writers wait for them. Uses and removals are committed about once a second. So most
commits are a single statement; each further statement may wait for the interpreter lock. No
caller waits for uses and removals, and a crash may lose them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvtier.errors import ClosedError
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.os.iopool import start_thread
from kvtier.tiers.slab.index import Change, IndexDatabase, LazyRecords
from kvtier.tiers.slab.removals import PackedMarks, RemovalReason
from kvtier.units import approximate_size

__all__ = ["GroupCommit"]

logger = get_logger(__name__)

_USES_WORTH_A_COMMIT: Final = 4096
_RECORDS_INTERVAL_S: Final = 1.0
_LONG_LOG_NBYTES: Final = 256 << 20  # as after a million rows; usual are a thousand pages


class GroupCommit:
    """Accepts changes from any thread and commits them in order, many at a time.

    A later change of a slot replaces an earlier change that is not committed yet. So at most
    one row per slot, one use per slot and the removals of one second are pending.

    Args:
        database: The open index; until :meth:`stop` only this object's thread uses it.
        name: The tier's name, for messages and the thread's name.
        clock: First value of the logical clock that orders rows and uses.
    """

    def __init__(self, database: IndexDatabase, *, name: str, clock: int) -> None:
        self._database = database
        self._name = name
        self._clock = clock
        self._pending = Change()
        self._waiters: list[Future[None]] = []
        self._due = False
        self._records_due_s = 0.0
        self._closed = False
        self._healthy = True
        self._log_is_long = False
        self._wakeup = threading.Condition()
        self._thread = threading.Thread(
            target=self._work, name=f"kvtier-index-{name}", daemon=True
        )
        start_thread(self._thread)

    async def put(
        self, slots: Sequence[int], keys: Sequence[ChunkKey], checksums: Sequence[int]
    ) -> None:
        """Commit one row per slot; ``checksums`` are signed integers.

        Raises:
            ClosedError: This object was closed.
            sqlite3.Error: The rows are not in the index.

        Cancellation:
            The rows may or may not be committed later.
        """

        def change(pending: Change) -> None:
            ticks = range(self._clock, self._clock + len(slots))
            rows = zip(slots, keys, checksums, ticks, ticks, strict=True)
            pending.rows.update(zip(slots, rows, strict=True))
            pending.records.drop_slots(slots)
            self._clock += len(slots)

        await asyncio.wrap_future(self._enqueue(change))

    async def clear(self, *, after_reset: bool) -> None:
        """Durably delete all rows, committed or pending.

        Args:
            after_reset: Whether to record a reset too, so that no other engine serves chunks
                that are stored later.

        Raises:
            ClosedError: This object was closed.
            sqlite3.Error: Rows may still be in the index. No other change is committed until a
                later attempt succeeds.

        Cancellation:
            The rows are deleted later.
        """

        def change(pending: Change) -> None:
            pending.clear, pending.after_reset = True, after_reset
            pending.rows.clear()
            pending.records.uses.clear()
            pending.records.hits.clear()
            pending.records.part_hashes.clear()

        await asyncio.wrap_future(self._enqueue(change))

    def delete_nowait(self, slots: Sequence[int]) -> None:
        """Delete the rows of ``slots`` in the background."""
        with self._wakeup:
            _delete(self._pending, slots)
            self._due = True
            self._wakeup.notify()

    def use_nowait(self, slots: Sequence[int]) -> None:
        """Record a use of each of ``slots``; commit the uses in about a second."""

        def add(records: LazyRecords) -> None:
            records.add_uses(slots, self._clock)
            self._clock += len(slots)

        self._record(add)

    def keep_part_hashes_nowait(self, slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Record the part hashes of the chunks in ``slots``; commit them in about a second."""
        self._record(
            lambda records: records.part_hashes.update(zip(slots, hashes, strict=True))
        )

    def log_removal_nowait(self, reason: RemovalReason, key_marks: PackedMarks) -> None:
        """Log that the marked keys were removed for ``reason``; commit in about a second."""
        self._record(lambda records: records.add_removals(reason, key_marks))

    def _record(self, add: Callable[[LazyRecords], None]) -> None:
        """Add records; wake the thread for the first records, and when many uses wait."""
        with self._wakeup:
            first = not self._pending.records
            add(self._pending.records)
            if first or len(self._pending.records.uses) >= _USES_WORTH_A_COMMIT:
                self._wakeup.notify()

    def stop(self) -> None:
        """Commit pending changes and wait for the thread to end. The database stays open."""
        with self._wakeup:
            self._closed = True
            self._wakeup.notify()
        self._thread.join()

    def _enqueue(self, change: Callable[[Change], None]) -> Future[None]:
        waiter: Future[None] = Future()
        with self._wakeup:
            if self._closed:
                raise ClosedError(f"the index of tier {self._name} is closed")
            change(self._pending)
            self._waiters.append(waiter)
            self._due = True
            self._wakeup.notify()
        return waiter

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._wakeup:
                while not (self._due or self._closed or self._records_wait_s() == 0):
                    self._wakeup.wait(self._records_wait_s())
                closed = self._closed
                change = self._take()
                waiters, self._waiters = self._waiters, []
            self._commit(change, waiters)

    def _records_wait_s(self) -> float | None:
        """Return how many seconds pending records may wait; None without records."""
        records = self._pending.records
        if not records:
            return None
        if len(records.uses) >= _USES_WORTH_A_COMMIT:
            return 0
        return max(self._records_due_s - time.monotonic(), 0)

    def _take(self) -> Change:
        """Remove and return the pending change, except for records that are not due yet."""
        with_records = self._closed or self._records_wait_s() == 0
        taken, self._pending, self._due = self._pending, Change(), False
        if with_records:
            self._records_due_s = time.monotonic() + _RECORDS_INTERVAL_S
        else:
            self._pending.records, taken.records = taken.records, LazyRecords()
        return taken

    def _commit(self, change: Change, waiters: list[Future[None]]) -> None:
        error: Exception | None = None
        try:
            self._database.apply(change)
        except Exception as raised:  # noqa: BLE001 - delivered to the waiters
            error = raised
            self._keep_deletions(change)
        self._log_switch(error)
        self._check_log()
        for waiter in waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _log_switch(self, error: Exception | None) -> None:
        """Log when the index starts to fail and when it recovers, but not each failure."""
        if error is not None and self._healthy:
            logger.warning("tier %s: the index takes no changes: %s", self._name, error)
        elif error is None and not self._healthy:
            logger.warning("tier %s: the index takes changes again", self._name)
        self._healthy = error is None

    def _check_log(self) -> None:
        """Warn once when the write-ahead log keeps growing because of a slow reader."""
        nbytes = self._database.log_nbytes
        if nbytes > _LONG_LOG_NBYTES and not self._log_is_long:
            logger.warning(
                "tier %s: the index's log has grown to %s, because another process has been "
                "reading the index for long; end it, or the log fills the disk",
                self._name,
                approximate_size(nbytes),
            )
        self._log_is_long = nbytes > _LONG_LOG_NBYTES

    def _keep_deletions(self, failed: Change) -> None:
        """Add the deletions of a failed change to the pending change.

        Otherwise a restart would recover the deleted rows.
        """
        with self._wakeup:
            if self._pending.clear:
                return
            self._pending.clear, self._pending.after_reset = failed.clear, failed.after_reset
            for slot, row in failed.rows.items():
                if row is None:
                    self._pending.rows.setdefault(slot, None)


def _delete(pending: Change, slots: Sequence[int]) -> None:
    pending.rows.update(dict.fromkeys(slots))
    pending.records.drop_slots(slots)
