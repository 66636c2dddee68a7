"""Digests of LoRA adapters, for the keys of chunks that were computed with an adapter.

vLLM's block hashes cover an adapter's name and path, not its content. This suffices for a cache
that ends with the engine, but chunks on NVMe outlive the engine. If an adapter were trained
again under the same path, requests would load KV of the old content. So kvtier's key of a chunk
with an adapter is longer and contains a digest of the adapter.

A digest is trusted only if the engine cannot have loaded other content. vLLM loads an adapter
before the adapter's first request, with ``load_inplace``, and again after unloading the
adapter. vLLM does not load an adapter while another adapter has the same ``lora_int_id``. vLLM
does not report which content it loaded, and its prefix cache keeps KV of the old content. So
the files must be older than the engine and stay unchanged, and the ``lora_int_id`` must be
unique. Chunks of any other adapter get a digest that only this engine uses. Such chunks are
hits until this engine ends.

The files may be on a file server that hangs. So another thread reads the files, and the
scheduler waits for a short time only. If the thread is late, the request neither loads nor
stores.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from kvtier.keys import ADAPTER_NBYTES, ADAPTER_OFFSET, ChunkKey
from kvtier.logs import get_logger
from kvtier.os.timed_calls import TimedCalls

__all__ = [
    "AdapterContent",
    "AdapterContents",
]

logger = get_logger(__name__)

DIGEST_NBYTES: Final = ADAPTER_NBYTES

_PREFIXES: Final = ("adapter_", "new_embeddings")
"""Beginnings of the names of the files that vLLM reads in an adapter's directory."""
_WHOLE_NBYTES: Final = 64 << 20
_SAMPLES: Final = 1024
_SAMPLE_NBYTES: Final = 32 << 10
_READ_NBYTES: Final = 1 << 20

_READ_TIMEOUT_S: Final = 2.0
"""Longest wait of an adapter's first request for the read of its files."""
_CHECK_TIMEOUT_S: Final = 0.05
"""Longest wait of a request or a store for the state of the files."""

_SETTINGS: Final = (
    "lora_dtype",
    "target_modules",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Settings of vLLM that change how an adapter is applied."""

_UNKNOWN: Final = ()
"""Value for a state of files that is unknown, because the read was late. It differs from every
known state."""

_LATE: Final = "its file system does not answer in time"
_UNREADABLE: Final = "its files cannot be read where vLLM's scheduler runs"
_YOUNG: Final = "its files are newer than the engine, which may have loaded older ones"
_CHANGED: Final = "its files changed, and vLLM does not say which ones it uses"
_SHARED: Final = "another adapter has the same lora_int_id, so vLLM cannot tell them apart"


@dataclass(frozen=True, slots=True)
class _File:
    """State of a file, which changes when the file is written or replaced."""

    name: str
    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int


_Files = Sequence[_File]
_Name = tuple[str, str, bool]
"""Name, path and format of an adapter in requests."""


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The content of a request's adapter when the request arrived.

    Attributes:
        digest: Digest of the content, which is part of the keys.
        is_current: Function that returns whether the adapter's files are unchanged in this step
            (:meth:`AdapterContents.begin_step`). Call this function before each store.
    """

    digest: bytes
    is_current: Callable[[], bool]

    def key(self, key: bytes) -> ChunkKey:
        """Convert vLLM's key of a chunk to kvtier's key.

        >>> content = AdapterContent(b"." * DIGEST_NBYTES, bool)
        >>> content.key(b"0123456789abcdef" + bytes(4))[:24]
        b'01234567...............8'
        """
        return key[:ADAPTER_OFFSET] + self.digest + key[ADAPTER_OFFSET:]


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of the first read of an adapter's files.

    Attributes:
        directory: Directory of the adapter's files.
        files: State of the files; None if they cannot be read.
        digest: Digest of the adapter's content; None if the digest is not trusted.
        problem: The reason not to trust the digest.
    """

    directory: Path
    files: _Files | None
    digest: bytes | None = None
    problem: str | None = None


@dataclass(slots=True)
class _Adapter:
    """An adapter that the engine has served.

    Attributes:
        look: The first read of the adapter's files; None if it has not started.
        is_trusted: Becomes False when vLLM may serve other content than the first read found.
    """

    look: Future[_Found] | None = None
    is_trusted: bool = True


class AdapterContents:
    """Digests of the adapters of one engine. The methods never raise; one thread calls them.

    An adapter's files are read at the adapter's first request. Every request checks the files'
    state. If the files are not read in time, the request gets a separate digest and stores no
    chunks.

    Args:
        settings: vLLM's configuration of adapters.
        started_ns: Earliest time at which the engine can have loaded an adapter, in ns since
            the epoch; None for the current time.
    """

    def __init__(self, settings: object, *, started_ns: int | None = None) -> None:
        self._settings = _text_of(settings)
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._life = os.urandom(DIGEST_NBYTES)
        self._adapters: dict[_Name, _Adapter] = {}
        self._owners: dict[int, _Name] = {}
        self._warned: set[str] = set()
        self._logged: set[type[Exception]] = set()
        self._calls = TimedCalls(name="kvtier-adapters")
        self._checked: dict[Path, _Files | None] = {}

    def content_of(self, request: Any) -> AdapterContent:  # noqa: ANN401 - vLLM's LoRARequest
        """Return the content of a new request's adapter."""
        try:
            return self._content_of(request)
        except TimeoutError:
            self._warn(request.lora_name, _LATE)
        except Exception as error:
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.exception(
                    "a LoRA adapter: its requests neither load nor store KV; each later %s is "
                    "not logged",
                    type(error).__name__,
                )
            # A failed look raises one error for every request, and its traceback would grow.
            error.__traceback__ = None
        return AdapterContent(os.urandom(DIGEST_NBYTES), _never)

    def begin_step(self) -> None:
        """Forget the last step's checks, so that the next stores check the files again.

        The stores of a step share one check, because each check may wait for a file server.
        """
        self._checked.clear()

    def close(self) -> None:
        """End the thread that reads files, without waiting. Idempotent."""
        self._calls.close()

    def _content_of(self, request: Any) -> AdapterContent:  # noqa: ANN401 - vLLM's LoRARequest
        name, path = request.lora_name, request.lora_path
        known_by = (name, path, bool(getattr(request, "is_3d_lora_weight", False)))
        adapter = self._adapters.setdefault(known_by, _Adapter())
        owner = self._owners.setdefault(request.lora_int_id, known_by)
        if owner != known_by:
            # vLLM applies the adapter that is loaded to requests for both.
            adapter.is_trusted = self._adapters[owner].is_trusted = False
            self._warn(name, _SHARED)
        found = self._found(adapter, known_by)
        if found.problem is not None:
            self._warn(name, found.problem)
        directory, files = found.directory, self._files_now(found.directory)
        if files != found.files:
            # For good, even if the files are restored: vLLM's prefix cache has KV of both.
            adapter.is_trusted = False
            self._warn(name, _CHANGED)
        digest = found.digest
        if digest is None or not adapter.is_trusted:
            # Loaded again under another number, or in place: it may have other content.
            loaded = (request.lora_int_id, getattr(request, "load_inplace", False))
            digest = _join(self._life, known_by, files, loaded)
        return AdapterContent(digest, partial(self._is_current, name, directory, files))

    def _found(self, adapter: _Adapter, known_by: _Name) -> _Found:
        """Return the result of the first read of an adapter's files; start the read if needed.

        Raises:
            TimeoutError: The thread that reads files is late.
            CapacityError: The system allows no more threads.
        """
        timeout_s = 0.0
        if adapter.look is None:
            look = partial(_look, known_by, self._settings, started_ns=self._started_ns)
            adapter.look, timeout_s = self._calls.begin(look), _READ_TIMEOUT_S
        return adapter.look.result(timeout_s)

    def _files_now(self, directory: Path) -> _Files | None:
        """Return the result of :func:`_files`, which runs in the thread that reads files.

        Raises:
            TimeoutError: The thread that reads files is late.
        """
        return self._calls.begin(partial(_files, directory)).result(_CHECK_TIMEOUT_S)

    def _is_current(self, name: str, directory: Path, files: _Files | None) -> bool:
        if directory not in self._checked:
            try:
                self._checked[directory] = self._files_now(directory)
            except TimeoutError:
                self._warn(name, _LATE)
                self._checked[directory] = _UNKNOWN
        return self._checked[directory] == files

    def _warn(self, name: str, why: str) -> None:
        if why in self._warned:
            return
        self._warned.add(why)
        effect = "chunks computed with it are hits only until this engine ends"
        if why is _LATE:
            effect = "requests for it neither load nor store KV meanwhile"
        logger.warning(
            "LoRA adapter %s: %s, so %s (said once for all adapters)", name, why, effect
        )


def _never() -> bool:
    return False


def _text_of(settings: object) -> str:
    values = ((name, getattr(settings, name, None)) for name in _SETTINGS)
    return repr(
        [(name, sorted(value) if isinstance(value, list) else value) for name, value in values]
    )


def _look(known_by: _Name, settings: str, *, started_ns: int) -> _Found:
    """Read an adapter's files for the first time; return their digest, or the problem."""
    _, path, is_3d = known_by
    directory = Path(path)
    with suppress(RuntimeError):  # there is no such user
        directory = directory.expanduser()
    directory = directory.absolute()
    files = _files(directory)
    if files is None:
        return _Found(directory, None, problem=_UNREADABLE)
    if max(file.changed_ns for file in files) >= started_ns:
        return _Found(directory, files, problem=_YOUNG)
    try:
        read = [_read(directory, file) for file in files]
    except OSError:
        return _Found(directory, files, problem=_UNREADABLE)
    return _Found(directory, files, digest=_join(settings, is_3d, read))


def _files(directory: Path) -> _Files | None:
    """Return the state of an adapter's files; None if no file exists or one is unreadable."""
    try:
        with os.scandir(directory) as entries:
            found = [
                _File(
                    entry.name,
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_ino,
                )
                for entry in entries
                if entry.name.startswith(_PREFIXES)
                for status in [entry.stat()]
            ]
    except OSError:
        return None
    return sorted(found, key=lambda file: file.name) or None


def _read(directory: Path, file: _File) -> tuple[object, ...]:
    """Return a file's name and size, and a digest of its content or of samples.

    The digest of a large file covers only samples. Then the result has the modification time
    too.

    Raises:
        OSError: The file cannot be read.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_NBYTES))
    with (directory / file.name).open("rb", buffering=0) as stream:
        if file.nbytes <= _WHOLE_NBYTES:
            while read := stream.readinto(buffer):
                digest.update(buffer[:read])
            return file.name, file.nbytes, digest.digest()
        last = file.nbytes - _SAMPLE_NBYTES
        for sample in range(_SAMPLES):
            stream.seek(last * sample // (_SAMPLES - 1))
            read = stream.readinto(buffer[:_SAMPLE_NBYTES])
            digest.update(buffer[:read])
    return file.name, file.nbytes, file.modified_ns, digest.digest()


def _join(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_NBYTES).digest()
