"""An S3 server in a process of its own: moto's, which keeps the objects in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from obstore.store import ObjectStore, S3Store

if TYPE_CHECKING:
    from obstore.store import S3Config

__all__ = ["BUCKET", "S3Server"]

BUCKET: Final = "bucket"
_START_S: Final = 120
_ANSWER_S: Final = 60
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class S3Server:
    """A server with one empty bucket, until :meth:`kill`.

    Attributes:
        port: The TCP port, also after a restart.
    """

    def __init__(self) -> None:
        self.port = 0
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def settings(self) -> str:
        """The value of ``settings`` in a tier's section of a YAML file."""
        pairs = (f"{key}: '{value}'" for key, value in self._settings().items())
        return f"{{{', '.join(pairs)}}}"

    def store(self, prefix: str = "") -> ObjectStore:
        """Return a client that does without kvtier."""
        return S3Store(
            BUCKET, prefix=prefix, client_options={"allow_http": True}, **self._settings()
        )

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill the process; all objects are lost."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def restart(self) -> None:
        """Start the server again, after :meth:`kill`, at the same port and with no object."""
        self._start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process: it accepts connections and does not answer."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def _start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._is_ready.wait(_START_S) or self._process.poll() is not None:
            self.kill()
            raise RuntimeError("the S3 server did not start")
        self._make_bucket()

    def _read_log(self) -> None:
        """Read the port that the server found, and keep its pipe empty."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "Running on http" in line:
                self.port = int(line.rpartition(":")[2])
                self._is_ready.set()
        self._is_ready.set()  # it ended

    def _settings(self) -> S3Config:
        return {
            "endpoint": self.url,
            "region": "us-east-1",
            "access_key_id": "id",
            "secret_access_key": "secret",
        }

    def _make_bucket(self) -> None:
        request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
        with _OPENER.open(request, timeout=_ANSWER_S) as answer:
            answer.read()
