"""Writes request records to files in a separate thread.

The scheduler's thread only puts records on a bounded queue. If the disk is too slow, records
are dropped and counted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import TraceConfig
from kvtier.logs import get_logger
from kvtier.os.iopool import start_thread
from kvtier.recording._files import NumberedFiles
from kvtier.recording._requests import RequestRecord

__all__ = ["Recorder", "RecorderStatistics"]

logger = get_logger(__name__)

_STOP: Final = None
_MOST_WAITING: Final = 4096
"""Largest number of records in the queue, enough for some seconds of a busy engine."""


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """Numbers of records that a recorder wrote and dropped.

    Attributes:
        written: Number of written records.
        dropped: Number of records lost because the queue was full or the disk failed.
    """

    written: int
    dropped: int


class Recorder:
    """Records the requests of one engine. A second thread writes the files.

    Args:
        directory: Directory of the files; created if its parent exists.
        options: The size and the number of files.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self, directory: Path, *, options: TraceConfig) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._file_bytes = options.file_size_bytes
        self._requests = NumberedFiles(directory, "requests", keep=options.files)
        self._waiting: queue.Queue[RequestRecord | None] = queue.Queue(_MOST_WAITING)
        # Each count is changed by one thread only.
        self._written = 0
        self._refused = 0
        self._failed = 0
        self._broken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        start_thread(self._thread)

    def request(self, record: RequestRecord) -> None:
        """Queue ``record`` without waiting; if the queue is full, drop and count the record."""
        if not self._closed:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(record)
                return
        self._refused += 1

    def statistics(self) -> RecorderStatistics:
        """Return the counts so far."""
        return RecorderStatistics(self._written, self._refused + self._failed)

    def close(self, *, timeout_s: float) -> None:
        """Write queued records and close the files. Idempotent.

        Args:
            timeout_s: Longest wait, in seconds. Records that are not written by then are lost.
        """
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(_STOP, timeout=timeout_s)
            self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "trace: %s did not answer in time; the recording is incomplete: check the disk",
                self._directory,
            )

    # -- the writing thread --------------------------------------------------------------------

    def _run(self) -> None:
        while (record := self._waiting.get()) is not _STOP:
            self._write(record)
        try:
            self._requests.close()
        except OSError as error:
            self._fail(error)

    def _write(self, record: RequestRecord) -> None:
        """Write ``record``; after a failed write, drop and count all further records."""
        if self._broken:
            self._failed += 1
            return
        files, line = self._requests, record.line()
        try:
            if files.size_bytes and files.size_bytes + len(line) > self._file_bytes:
                files.begin()
            files.write(line)
            if self._waiting.empty():
                files.flush()
        except Exception as error:  # noqa: BLE001 - the thread must continue to empty the queue
            self._fail(error)
            self._failed += 1
        else:
            self._written += 1

    def _fail(self, error: Exception) -> None:
        self._broken = True
        if isinstance(error, OSError):
            logger.error(
                "trace: cannot write the recording to %s: %s; the recording ends here; free "
                "some space or check the disk before the next start",
                self._directory,
                error.strerror or error,
            )
        else:
            logger.error("trace: cannot write the recording, which ends here", exc_info=error)
