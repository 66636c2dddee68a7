"""S3 servers in processes of their own: moto's, and Ceph's object gateway."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, Self, TypedDict

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store
from typing_extensions import override

__all__ = ["BUCKET", "CephServer", "MotoServer", "S3Server"]

BUCKET: Final = "bucket"
_START: Final = timedelta(seconds=120)
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_OUTPUT: Final = subprocess.DEVNULL


class _Settings(TypedDict):
    endpoint: str
    region: str
    access_key_id: str
    secret_access_key: str


class S3Server(ABC):
    """A server with one empty bucket, as a context that kills it.

    Attributes:
        port: The TCP port.
        endpoint: The URL.
    """

    def __init__(self) -> None:
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._settings: _Settings = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "id",
            "secret_access_key": "secret",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def settings(self) -> str:
        """The value of ``settings`` in a tier's section of a YAML file."""
        pairs = (f"{key}: '{value}'" for key, value in self._settings.items())
        return f"{{{', '.join(pairs)}}}"

    def store(self, prefix: str = "") -> S3Store:
        """Return a client that does without kvtier."""
        return S3Store(
            BUCKET,
            prefix=prefix,
            client_options={"allow_http": True},
            retry_config={"max_retries": 100, "retry_timeout": _START},
            **self._settings,
        )

    def start(self) -> None:
        """Start the processes and make the bucket; also after :meth:`kill`."""
        self.launch()
        store = self.store()
        with contextlib.suppress(BaseError):  # there is no such bucket
            next(iter(obstore.list(store)), None)  # retries until the server listens
        url = obstore.sign(store, "PUT", "", _START)
        _OPENER.open(urllib.request.Request(url, method="PUT"), timeout=60).close()

    @abstractmethod
    def launch(self) -> None:
        """Start the processes."""

    def kill(self) -> None:
        """Kill the processes; all objects are lost."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the server: it accepts connections and does not answer."""
        process = self._processes[-1]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def _run(self, command: Sequence[str]) -> None:
        """Start a process that runs until :meth:`kill`."""
        self._processes.append(subprocess.Popen(command, stdout=_OUTPUT, stderr=_OUTPUT))


class MotoServer(S3Server):
    """moto's server, which keeps the objects in memory and accepts any credentials."""

    @override
    def launch(self) -> None:
        address = ("-H", "127.0.0.1", "-p", str(self.port))
        self._run([sys.executable, "-m", "moto.server", *address])


class CephServer(S3Server):
    """Ceph's object gateway with a monitor and a storage daemon that keeps objects in memory.

    Args:
        root: A new directory for the daemons' files.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    @staticmethod
    def is_installed() -> bool:
        """Return whether this machine has the daemons."""
        daemons = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph")
        return all(shutil.which(each) for each in daemons)

    @override
    def launch(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        for directory in ("mon", "osd", "rgw"):
            (self._root / directory).mkdir(parents=True)
        identity, disk = _uuid(), _uuid()
        monitor = f"v2:127.0.0.1:{_free_port()}"
        (self._root / "ceph.conf").write_text(
            _CEPH_CONF.format(root=self._root, id=identity, monitor=monitor, port=self.port)
        )
        self._make_keys()
        members, key = self._path("monmap"), ("--access-key", "id", "--secret-key", "secret")
        self._do(
            "monmaptool", "--fsid", identity, "--create", "--addv", "a", f"[{monitor}]", members
        )
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", members)
        self._run(["ceph-mon", "-c", self._path("ceph.conf"), "-i", "a", "-f"])
        self._do("ceph", "--connect-timeout", "60", "osd", "new", disk, "0")
        self._do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk)
        self._run(["ceph-osd", "-c", self._path("ceph.conf"), "-i", "0", "-f"])
        self._do("radosgw-admin", "user", "create", "--uid", "u", "--display-name", "u", *key)
        self._run(["radosgw", "-c", self._path("ceph.conf"), "-n", "client.admin", "-f"])

    def _make_keys(self) -> None:
        keyring = self._path("keyring")
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        Path(keyring).touch(mode=0o600)
        for name in ("mon.", "client.admin", "osd.0"):
            self._do("ceph-authtool", keyring, "--gen-key", "-n", name, *everything)

    def _path(self, name: str) -> str:
        return str(self._root / name)

    def _do(self, *command: str) -> None:
        environ = {"PATH": os.defpath, "CEPH_CONF": self._path("ceph.conf")}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


_CEPH_CONF: Final = """
[global]
fsid = {id}
mon host = {monitor}
keyring = {root}/keyring
mon data = {root}/mon
osd data = {root}/osd
rgw data = {root}/rgw
run dir = {root}
admin socket =
log file = {root}/$name.log
pid file = {root}/$name.pid
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
rgw run sync thread = false
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _uuid() -> str:
    return str(uuid.UUID(bytes=secrets.token_bytes(16)))
