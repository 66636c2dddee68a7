"""What a LoRA adapter holds, as part of the keys of the chunks that were computed with it.

vLLM hashes an adapter's name and path into a chunk's key, not its content, and that is enough
for a cache that ends with the engine. Chunks on NVMe outlive it: an adapter that was trained
again, under the path it had, would be served what the old one computed. So within kvtier a
chunk of a request with an adapter has a longer key, with a digest of the adapter in it. vLLM's
half never sees that one.

A digest is believed only if the engine cannot have loaded anything else from the same files. It
loads an adapter when it likes: before the first request that asks for it, again after it had to
make room for others, and where a request says ``load_inplace``; and not at all while another
one is loaded that has the same ``lora_int_id``. Nobody tells which content it has, and vLLM's
own prefix cache keeps what the old one computed. So files must be older than the engine and
stay as they are, and the number must be nobody else's. Of any other adapter, and of one whose
files cannot be read here, chunks have a digest that no other engine will come to: they are hits
until this one ends.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from kvtier.keys import ADAPTER_NBYTES, ADAPTER_OFFSET, ChunkKey, strip_adapter
from kvtier.logs import get_logger

__all__ = [
    "AdapterContent",
    "AdapterContents",
    "content_of",
    "positions_with_adapters",
    "strip_adapter",
    "tie_content",
]

logger = get_logger(__name__)

DIGEST_NBYTES: Final = ADAPTER_NBYTES

_FIELD: Final = "kvtier_adapter"
"""Of a request's context: vLLM hands over one object from the request's arrival to its last
store, whatever became of its id."""

_PREFIXES: Final = ("adapter_", "new_embeddings")
"""What vLLM reads of an adapter's directory."""
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
"""What else of vLLM's configuration says how an adapter is applied."""

_UNREADABLE: Final = "its files cannot be read where vLLM's scheduler runs"
_YOUNG: Final = "its files are newer than the engine, which may have loaded older ones"
_CHANGED: Final = "its files changed, and vLLM does not say which ones it uses"
_SHARED: Final = "another one has its lora_int_id, by which alone vLLM knows what it has loaded"


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was: what tells that it is another one, or was written to."""

    name: str
    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int


_Files = Sequence[_File]
_Name = tuple[str, str, bool]
"""Name, path and format of an adapter, as requests say them."""


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What the adapter of a request held when the request arrived.

    Attributes:
        digest: Stands for it in keys.
        is_current: Returns whether its files are as they were; to be asked once something was
            computed with it, before that is stored.
    """

    digest: bytes
    is_current: Callable[[], bool]

    def key(self, key: bytes) -> ChunkKey:
        """Return kvtier's key of the chunk that vLLM calls ``key``.

        >>> content = AdapterContent(b"." * DIGEST_NBYTES, bool)
        >>> content.key(b"0123456789abcdef" + bytes(4))[:24]
        b'01234567...............8'
        """
        return key[:ADAPTER_OFFSET] + self.digest + key[ADAPTER_OFFSET:]


def tie_content(context: object, content: AdapterContent) -> None:
    """Keep ``content`` with a request's context, for as long as vLLM keeps that."""
    setattr(context, _FIELD, content)


def content_of(context: object) -> AdapterContent | None:
    """Return what was kept with a request's context; None for one without an adapter."""
    return getattr(context, _FIELD, None)


def positions_with_adapters(
    positions: Callable[[Any], Mapping[bytes, int]] | None,
) -> Callable[[Any], Mapping[ChunkKey, int]] | None:
    """Return what tells a request's chunks, by kvtier's keys, where ``positions`` says vLLM's.

    Args:
        positions: None where the engine does not say.
    """
    if positions is None:
        return None
    told = positions

    def adapted(context: Any) -> Mapping[ChunkKey, int]:  # noqa: ANN401 - vLLM's
        content = content_of(context)
        found = told(context)
        return found if content is None else {content.key(key): found[key] for key in found}

    return adapted


@dataclass(slots=True)
class _Adapter:
    """An adapter as vLLM's keys name it.

    Attributes:
        directory: Where its files are.
        digest: Of its content; None if that is not to be believed.
        files: What the digest is of.
    """

    directory: Path
    digest: bytes | None
    files: _Files | None


class AdapterContents:
    """Tells what the adapters of one engine hold. Never raises; one thread calls it.

    The files are read when an adapter is first asked for, and looked at whenever it is.

    Args:
        settings: vLLM's configuration of adapters.
        started_ns: When the engine can have loaded its first adapter, since the epoch; now
            unless given.
    """

    def __init__(self, settings: object, *, started_ns: int | None = None) -> None:
        self._settings = _text_of(settings)
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._life = os.urandom(DIGEST_NBYTES)
        self._adapters: dict[_Name, _Adapter] = {}
        self._owners: dict[int, _Name] = {}
        self._told: set[str] = set()

    def of(self, request: Any) -> AdapterContent:  # noqa: ANN401 - vLLM's LoRARequest
        """Return what an adapter holds, which a request that arrives asks for."""
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
            # For good, even if the files come back: vLLM's prefix cache has KV of both.
            adapter.digest, adapter.files = None, now
            self._tell(name, _CHANGED)
        owner = self._owners.setdefault(request.lora_int_id, known_by)
        if owner != known_by:
            # Whichever is loaded is applied for both, until it makes room.
            adapter.digest = self._adapters[owner].digest = None
            self._tell(name, _SHARED)
        directory, files, digest = adapter.directory, adapter.files, adapter.digest
        if digest is None:
            # Loaded anew under another number, or in place: nothing says it is the same.
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
            self._tell(name, _UNREADABLE)
            return _Adapter(directory, None, None)
        if max(file.changed_ns for file in files) >= self._started_ns:
            self._tell(name, _YOUNG)
            return _Adapter(directory, None, files)
        try:
            read = [_read(directory, file) for file in files]
        except OSError:
            self._tell(name, _UNREADABLE)
            return _Adapter(directory, None, files)
        return _Adapter(directory, _join(self._settings, is_3d, read), files)

    def _tell(self, name: str, purpose: str) -> None:
        if purpose not in self._told:
            self._told.add(purpose)
            logger.warning(
                "LoRA adapter %s: %s, so what is computed with it is a hit until this engine "
                "ends, and not after (said once for all adapters)",
                name,
                purpose,
            )


def _always() -> bool:
    return True


def _text_of(settings: object) -> str:
    values = ((name, getattr(settings, name, None)) for name in _SETTINGS)
    return repr(
        [(name, sorted(value) if isinstance(value, list) else value) for name, value in values]
    )


def _files(directory: Path) -> _Files | None:
    """Return an adapter's files as they are; None where they cannot be looked at."""
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
    """Return what a file holds: of a large one samples, and when it was written.

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
