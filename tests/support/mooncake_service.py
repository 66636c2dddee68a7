"""A Mooncake Store for tests and benchmarks: a master and a host that lends memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import mooncake
from mooncake import store

from kvtier.config import child_environment

__all__ = ["MooncakeService", "RawClient", "free_port", "kill", "running_service"]

_MASTER: Final = Path(mooncake.__file__).parent / "mooncake_master"
_START_S: Final = 60.0
_LENDER: Final = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(f"setup returned {code}", flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    """Return a TCP port that no process uses at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class MooncakeService:
    """A master, and at most one other host that lends memory.

    Args:
        log: File for what both processes print.
        lent_nbytes: Memory that the other host lends.
        ttl_s: How long the master trusts a host that does not answer.

    Attributes:
        address: Address of the master.
        master: The master's process.
        lender: The process that lends memory.
    """

    master: subprocess.Popen[bytes]
    lender: subprocess.Popen[bytes]

    def __init__(self, log: IO[bytes], *, lent_nbytes: int = 256 << 20, ttl_s: int = 2) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._metrics_port = free_port()
        self._log = log
        self._lent_nbytes = lent_nbytes
        self._ttl_s = ttl_s

    def start(self) -> None:
        """Start the master and the lender."""
        self.start_master()
        self.start_lender()

    def start_master(self) -> None:
        """Start the master, perhaps again, and wait until it accepts connections."""
        host, _, port = self.address.partition(":")
        flags = {
            "rpc_address": host,
            "rpc_port": port,
            "metrics_host": host,
            "metrics_port": self._metrics_port,
            "client_ttl": self._ttl_s,
        }
        self.master = subprocess.Popen(
            [str(_MASTER), *(f"-{flag}={value}" for flag, value in flags.items())],
            stdout=self._log,
            stderr=self._log,
        )
        _wait_accepting(host, int(port))

    def start_lender(self) -> None:
        """Start the host that lends memory, and wait until the master knows it."""
        self.lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, self.address, str(self._lent_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(),
        )
        assert self.lender.stdout is not None
        answer = self.lender.stdout.readline().decode().strip()
        if answer != "setup returned 0":
            raise RuntimeError(f"the host that lends memory: {answer or 'it died'}")

    def stop(self) -> None:
        """Kill both processes, also if they were stopped."""
        for process in (getattr(self, name, None) for name in ("lender", "master")):
            if process is not None:
                kill(process)

    @staticmethod
    @contextmanager
    def stalled(process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Stop ``process`` with SIGSTOP, and continue it afterwards."""
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process.pid, signal.SIGCONT)


class RawClient:
    """The library's own client, which stores any bytes under any key.

    Args:
        address: Address of the master.
    """

    def __init__(self, address: str) -> None:
        self._store: Any = store.MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)
        assert code == 0, code

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; nothing if there is none."""
        value: bytes = self._store.get(key)
        return value

    def replace(self, key: str, value: bytes) -> None:
        """Store ``value`` in place of another value of ``key``."""
        assert self._store.remove(key, force=True) == 0
        assert self._store.put(key, value) == 0

    def close(self) -> None:
        self._store.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and wait for its end."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    process.wait()


@contextmanager
def running_service(
    directory: Path, *, lent_nbytes: int = 256 << 20
) -> Iterator[MooncakeService]:
    """Run a service; its log is in ``directory``."""
    with (directory / "mooncake.log").open("ab") as log:
        service = MooncakeService(log, lent_nbytes=lent_nbytes)
        try:
            service.start()
            yield service
        finally:
            service.stop()


def _wait_accepting(host: str, port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return
