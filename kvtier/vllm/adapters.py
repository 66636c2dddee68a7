"""Digests of LoRA adapters. Keys of chunks computed with an adapter contain the digest.

vLLM's block hashes cover an adapter's name and path, not its content. That suffices for a cache
that ends with the engine. Chunks on NVMe outlive the engine. If an adapter is trained again
under the same path, its requests would get KV of the old content. So kvtier's key of a chunk
with an adapter is longer and contains a digest of the adapter.

A digest is trusted only if the engine cannot have loaded other content. vLLM loads an adapter
before its first request, again after other adapters displaced it, and with ``load_inplace``.
vLLM loads nothing while another adapter has the same ``lora_int_id``. vLLM does not report
which content it loaded, and its prefix cache keeps KV of the old content. So the files must be
older than the engine and stay unchanged, and the ``lora_int_id`` must be unique. Chunks of any
other adapter get a digest that no other engine computes: they are hits until this engine ends.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from kvtier.keys import ADAPTER_NBYTES, ADAPTER_OFFSET, ChunkKey
from kvtier.logs import get_logger

__all__ = [
    "AdapterContent",
    "AdapterContents",
]

logger = get_logger(__name__)

DIGEST_NBYTES: Final = ADAPTER_NBYTES

_PREFIXES: Final = ("adapter_", "new_embeddings")
"""Beginnings of the file names that vLLM reads in an adapter's directory."""
_WHOLE_NBYTES: Final = 64 << 20
_SAMPLES: Final = 1024
_SAMPLE_NBYTES: Final = 32 << 10
_READ_NBYTES: Final = 1 << 20

_SETTINGS: Final = (
    "lora_dtype",
    "target_modules",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Settings of vLLM that change how an adapter is applied."""

_UNREADABLE: Final = "its files cannot be read where vLLM's scheduler runs"
_YOUNG: Final = "its files are newer than the engine, which may have loaded older ones"
_CHANGED: Final = "its files changed, and vLLM does not say which ones it uses"
_SHARED: Final = "another adapter has the same lora_int_id, so vLLM cannot tell them apart"


@dataclass(frozen=True, slots=True)
class _File:
    """The state of a file; the state changes when the file is replaced or written to."""

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
        digest: Digest of the content; part of the keys.
        is_current: Returns whether the adapter's files are unchanged. Call it after KV was
            computed and before this KV is stored.
    """

    digest: bytes
    is_current: Callable[[], bool]

    def key(self, key: bytes) -> ChunkKey:
        """Return kvtier's key of the chunk whose key in vLLM is ``key``.

        >>> content = AdapterContent(b"." * DIGEST_NBYTES, bool)
        >>> content.key(b"0123456789abcdef" + bytes(4))[:24]
        b'01234567...............8'
        """
        return key[:ADAPTER_OFFSET] + self.digest + key[ADAPTER_OFFSET:]


@dataclass(slots=True)
class _Adapter:
    """An adapter that the engine has served.

    Attributes:
        directory: Directory of its files.
        digest: Digest of its content; None if the digest is not trusted.
        files: State of its files; None if they cannot be read.
    """

    directory: Path
    digest: bytes | None
    files: _Files | None


class AdapterContents:
    """Digests of the adapters of one engine. Never raises; one thread calls it.

    An adapter's files are read at its first request. Every later request checks whether the
    files changed.

    Args:
        settings: vLLM's configuration of adapters.
        started_ns: Earliest time at which the engine can have loaded an adapter, in ns since
            the epoch; None for now.
    """

    def __init__(self, settings: object, *, started_ns: int | None = None) -> None:
        self._settings = _text_of(settings)
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._life = os.urandom(DIGEST_NBYTES)
        self._adapters: dict[_Name, _Adapter] = {}
        self._owners: dict[int, _Name] = {}
        self._warned: set[str] = set()

    def of(self, request: Any) -> AdapterContent:  # noqa: ANN401 - vLLM's LoRARequest
        """Return the content of a new request's adapter."""
        try:
            return self._of(request)
        except Exception:
            logger.exception("a LoRA adapter: its chunks will not outlive this request")
            return AdapterContent(os.urandom(DIGEST_NBYTES), _always)

    def _of(self, request: Any) -> AdapterContent:  # noqa: ANN401 - vLLM's LoRARequest
        name, path = request.lora_name, request.lora_path
        known_by = (name, path, bool(getattr(request, "is_3d_lora_weight", False)))
        adapter = self._adapters.get(known_by)
        if adapter is None:
            adapter = self._adapters[known_by] = self._look(*known_by)
        elif adapter.files != (now := _files(adapter.directory)):
            # For good, even if the files are restored: vLLM's prefix cache has KV of both.
            adapter.digest, adapter.files = None, now
            self._warn(name, _CHANGED)
        owner = self._owners.setdefault(request.lora_int_id, known_by)
        if owner != known_by:
            # vLLM applies the adapter that is loaded to requests for both.
            adapter.digest = self._adapters[owner].digest = None
            self._warn(name, _SHARED)
        directory, files, digest = adapter.directory, adapter.files, adapter.digest
        if digest is None:
            # Loaded again under another number, or in place: it may have other content.
            loaded = (request.lora_int_id, getattr(request, "load_inplace", False))
            digest = _join(self._life, known_by, files, loaded)
        return AdapterContent(digest, lambda: _files(directory) == files)

    def _look(self, name: str, path: str, is_3d: bool) -> _Adapter:  # noqa: FBT001
        directory = Path(path)
        with suppress(RuntimeError):  # there is no such user
            directory = directory.expanduser()
        directory = directory.absolute()
        files = _files(directory)
        if files is None:
            self._warn(name, _UNREADABLE)
            return _Adapter(directory, None, None)
        if max(file.changed_ns for file in files) >= self._started_ns:
            self._warn(name, _YOUNG)
            return _Adapter(directory, None, files)
        try:
            read = [_read(directory, file) for file in files]
        except OSError:
            self._warn(name, _UNREADABLE)
            return _Adapter(directory, None, files)
        return _Adapter(directory, _join(self._settings, is_3d, read), files)

    def _warn(self, name: str, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "LoRA adapter %s: %s, so chunks computed with it are hits only until this "
                "engine ends (said once for all adapters)",
                name,
                why,
            )


def _always() -> bool:
    return True


def _text_of(settings: object) -> str:
    values = ((name, getattr(settings, name, None)) for name in _SETTINGS)
    return repr(
        [(name, sorted(value) if isinstance(value, list) else value) for name, value in values]
    )


def _files(directory: Path) -> _Files | None:
    """Return the state of an adapter's files; None if there are none or one cannot be read."""
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
    """Return a file's name, size and content digest.

    The digest of a large file covers samples, and its modification time is returned too.

    Raises:
        OSError: It cannot be read.
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
