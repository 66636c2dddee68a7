"""A thread that writes the index: whatever arrives during one commit shares the next.

Rows are committed at once, because somebody waits for them. Notes, which nobody waits for and
which a crash may cost, go along at most once a second: a commit of rows alone is one statement,
and each further one may wait for the interpreter lock.
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
from kvtier.tiers.slab.change import Change, Notes
from kvtier.tiers.slab.index import IndexDatabase
from kvtier.tiers.slab.trail import KeyMarks, Reason
from kvtier.units import approximate_size

__all__ = ["GroupCommit"]

logger = get_logger(__name__)

_USES_WORTH_A_COMMIT: Final = 4096
_NOTES_INTERVAL_S: Final = 1.0
_LONG_LOG_NBYTES: Final = 256 << 20  # of a million rows, where a thousand pages are usual


class GroupCommit:
    """Takes changes from any thread and commits them in order, many at a time.

    Later changes of a slot replace earlier ones that are not committed yet, so what is pending
    never exceeds one row and one use per slot, and the departures of a second.

    Args:
        database: The open index; until :meth:`stop` only this object's thread uses it.
        name: The tier's name, for messages and the thread's name.
        clock: First tick of the logical clock that orders rows and uses.
        on_commit: Called after each commit, in this object's thread; must not raise.
    """

    def __init__(
        self,
        database: IndexDatabase,
        *,
        name: str,
        clock: int,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._on_commit = on_commit
        self._name = name
        self._clock = clock
        self._pending = Change()
        self._waiters: list[Future[None]] = []
        self._due = False
        self._notes_due_s = 0.0
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
        """Commit one row per slot; signed checksums.

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
            pending.notes.unuse(slots)
            self._clock += len(slots)

        await asyncio.wrap_future(self._enqueue(change))

    async def delete(self, slots: Sequence[int]) -> None:
        """Commit that ``slots`` have no row.

        Raises:
            ClosedError: This object was closed.
            sqlite3.Error: The rows may still be in the index; they are tried again later.

        Cancellation:
            The rows are deleted later.
        """
        await asyncio.wrap_future(self._enqueue(lambda pending: _delete(pending, slots)))

    async def clear(self, *, doubt: bool) -> None:
        """Delete all rows, durably. Rows put before are gone too, committed or not.

        Args:
            doubt: Whether to note along with it, before any row put later, that these are not
                to be served by another engine.

        Raises:
            ClosedError: This object was closed.
            sqlite3.Error: Rows may still be in the index. Nothing else is committed until a
                later attempt succeeded.

        Cancellation:
            The rows are deleted later.
        """
        await asyncio.wrap_future(self._enqueue(lambda pending: _clear(pending, doubt=doubt)))

    def delete_nowait(self, slots: Sequence[int]) -> None:
        """Delete the rows of ``slots`` in the background."""
        with self._wakeup:
            _delete(self._pending, slots)
            self._due = True
            self._wakeup.notify()

    def use_nowait(self, slots: Sequence[int]) -> None:
        """Note that ``slots`` were used now; committed within a second or so."""
        with self._wakeup:
            first = not self._pending.notes
            self._pending.notes.use(slots, self._clock)
            self._clock += len(slots)
            if first or len(self._pending.notes.uses) >= _USES_WORTH_A_COMMIT:
                self._wakeup.notify()

    def depart_nowait(self, reason: Reason, key_marks: KeyMarks) -> None:
        """Note why the chunks of these keys leave; committed within a second or so."""
        with self._wakeup:
            first = not self._pending.notes
            self._pending.notes.depart(reason, key_marks)
            if first:
                self._wakeup.notify()

    def stop(self) -> None:
        """Commit what is pending and end the thread; blocks. The database stays open."""
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
                while not (self._due or self._closed or self._notes_wait_s() == 0):
                    self._wakeup.wait(self._notes_wait_s())
                closed = self._closed
                change = self._take()
                waiters, self._waiters = self._waiters, []
            self._commit(change, waiters)
            self._on_commit()

    def _notes_wait_s(self) -> float | None:
        """Return how long the notes may still wait, None if there are none."""
        notes = self._pending.notes
        if not notes:
            return None
        if len(notes.uses) >= _USES_WORTH_A_COMMIT:
            return 0
        return max(self._notes_due_s - time.monotonic(), 0)

    def _take(self) -> Change:
        """Return what the next commit takes."""
        with_notes = self._closed or self._notes_wait_s() == 0
        taken, self._pending, self._due = self._pending, Change(), False
        if with_notes:
            self._notes_due_s = time.monotonic() + _NOTES_INTERVAL_S
        else:
            self._pending.notes, taken.notes = taken.notes, Notes()
        return taken

    def _commit(self, change: Change, waiters: list[Future[None]]) -> None:
        error: Exception | None = None
        try:
            self._database.apply(change)
        except Exception as raised:  # noqa: BLE001 - delivered to those who wait
            error = raised
            self._put_back_deletions(change)
        self._log_turn(error)
        self._look_at_log()
        for waiter in waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _log_turn(self, error: Exception | None) -> None:
        """Say that the index stopped or resumed taking changes, not how often it tried."""
        if error is not None and self._healthy:
            logger.warning("tier %s: the index takes no changes: %s", self._name, error)
        elif error is None and not self._healthy:
            logger.warning("tier %s: the index takes changes again", self._name)
        self._healthy = error is None

    def _look_at_log(self) -> None:
        """Say once that the log grows and grows: somebody reads an old state of the index."""
        nbytes = self._database.log_nbytes
        if nbytes > _LONG_LOG_NBYTES and not self._log_is_long:
            logger.warning(
                "tier %s: the index's log has grown to %s, because another process has been "
                "reading the index for long; end it, or the log fills the disk",
                self._name,
                approximate_size(nbytes),
            )
        self._log_is_long = nbytes > _LONG_LOG_NBYTES

    def _put_back_deletions(self, failed: Change) -> None:
        """Keep what must not be lost for the next attempt: a row that stays comes back."""
        with self._wakeup:
            if self._pending.clear:
                return
            self._pending.clear, self._pending.doubt = failed.clear, failed.doubt
            for slot, row in failed.rows.items():
                if row is None:
                    self._pending.rows.setdefault(slot, None)


def _delete(pending: Change, slots: Sequence[int]) -> None:
    pending.rows.update(dict.fromkeys(slots))
    pending.notes.unuse(slots)


def _clear(pending: Change, *, doubt: bool) -> None:
    pending.clear, pending.doubt = True, doubt
    pending.rows.clear()
    pending.notes.uses.clear()
    pending.notes.hits.clear()
