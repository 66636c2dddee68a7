"""Writes records to files in a thread of its own.

The scheduler's thread only puts a record on a bounded queue. When the disk does not keep up,
records are dropped and counted; nobody waits. A trace of requests can do without one, but
calls cannot be replayed across a gap, so their recording ends at the first that is lost, or
when its file is full: what is there stays a whole recording of a shorter run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.config import TraceConfig
from kvtier.iopool import start_thread
from kvtier.logs import get_logger
from kvtier.recording._calls import CallEncoder, ManagerSetup
from kvtier.recording._files import NumberedFiles
from kvtier.recording._requests import RequestRecord

__all__ = ["Recorder", "RecorderStatistics"]

logger = get_logger(__name__)

_Call = tuple[str, Mapping[str, Any]]
_STOP: Final = None


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """What a recorder did.

    Attributes:
        written: Records written.
        dropped: Records not written: the queue was full, the recording had ended, or the disk
            failed.
    """

    written: int
    dropped: int


class Recorder:
    """The recording of one engine. One thread calls it, and another writes.

    Args:
        directory: Where the files go; made if its parent exists.
        options: What to record and how much of it.
        setup: What the manager is built from.

    Raises:
        OSError: The directory cannot be made.
    """

    def __init__(self, directory: Path, *, options: TraceConfig, setup: ManagerSetup) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._file_bytes = options.file_size_bytes
        self._requests = NumberedFiles(directory, "requests", keep=options.files)
        self._calls = NumberedFiles(directory, "calls", keep=options.files)
        self._header = setup.line()
        self._encoder = CallEncoder()
        self._waiting: queue.Queue[RequestRecord | _Call | None] = queue.Queue(options.queue)
        # Each count is changed by one thread only.
        self._written = 0
        self._refused = 0
        self._failed = 0
        self._gap = False
        self._ended = False
        self._broken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        start_thread(self._thread)

    def request(self, record: RequestRecord) -> None:
        """Record a request; never waits."""
        self._put(record)

    def call(self, name: str, values: Mapping[str, Any]) -> None:
        """Record a call of the manager; never waits."""
        if self._gap or self._ended:
            self._refused += 1
        elif not self._put((name, values)):
            self._gap = True
            logger.warning(
                "trace: the disk does not keep up, so the recording of calls ends here; "
                "a larger trace.queue helps"
            )

    def statistics(self) -> RecorderStatistics:
        """Return the counts so far."""
        return RecorderStatistics(self._written, self._refused + self._failed)

    def close(self, *, timeout_s: float) -> None:
        """Write what waits and close the files. Idempotent.

        Args:
            timeout_s: Longest wait; what is not written by then is lost.
        """
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(_STOP, timeout=timeout_s)
            self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning("trace: the disk does not answer; the recording is incomplete")

    def _put(self, record: RequestRecord | _Call) -> bool:
        if not self._closed:
            try:
                self._waiting.put_nowait(record)
            except queue.Full:
                pass
            else:
                return True
        self._refused += 1
        return False

    # -- the writing thread --------------------------------------------------------------------

    def _run(self) -> None:
        while (record := self._waiting.get()) is not _STOP:
            self._guarded(record)
        for files in (self._requests, self._calls):
            try:
                files.close()
            except OSError as error:
                self._fail(error)

    def _guarded(self, record: RequestRecord | _Call) -> None:
        """Write ``record``; after the first error nothing more, for the disk may be full."""
        if self._broken:
            self._failed += 1
            return
        try:
            written = self._write(record)
            if self._waiting.empty():
                self._requests.flush()
                self._calls.flush()
        except Exception as error:  # noqa: BLE001 - the thread must go on emptying the queue
            self._fail(error)
            self._failed += 1
            return
        self._written += written
        self._failed += not written

    def _write(self, record: RequestRecord | _Call) -> bool:
        if isinstance(record, RequestRecord):
            self._write_request(record.line())
            return True
        if self._ended:
            return False
        return self._write_call(self._encoder.lines(*record))

    def _write_request(self, line: bytes) -> None:
        files = self._requests
        if files.size_bytes and files.size_bytes + len(line) > self._file_bytes:
            files.begin()
        files.write(line)

    def _write_call(self, lines: Iterable[bytes]) -> bool:
        whole = b"".join(lines)
        if not self._calls.size_bytes:
            self._calls.write(self._header)
        if self._calls.size_bytes + len(whole) > self._file_bytes:
            self._ended = True
            self._encoder = CallEncoder()
            logger.warning("trace: the recording of calls has reached trace.file_size and ends")
            return False
        self._calls.write(whole)
        return True

    def _fail(self, error: Exception) -> None:
        self._broken = True
        if isinstance(error, OSError):
            logger.error(
                "trace: cannot write the recording to %s, and it ends here: %s; make room or "
                "see to the disk before the next start",
                self._directory,
                error.strerror or error,
            )
        else:
            logger.error("trace: cannot write the recording, which ends here", exc_info=error)
