"""Frames: the messages between an engine and the host of its tier.

A frame has a JSON object and packed arrays, after the length of each. The JSON object has
single values; the arrays have one value per chunk. Both ends are the same version of kvtier on
the same machine, and frames are never stored. So the format needs no version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier import errors
from kvtier.errors import CacheLockedError, KvtierError, TierError
from kvtier.keys import ChunkKey
from kvtier.tiers.part_hashes import StoredPartHashes
from kvtier.types import Outcome

__all__ = [
    "READ_NBYTES",
    "Batch",
    "Frame",
    "FrameParser",
    "decode_error",
    "decode_outcomes",
    "decode_part_hashes",
    "encode_error",
    "encode_outcomes",
    "encode_part_hashes",
    "pack_keys",
    "unpack_keys",
]

READ_NBYTES: Final = 1 << 18
"""Number of bytes to read from a socket at once, enough for some thousand chunks."""

_LENGTHS: Final = struct.Struct("<IQ")
_OUTCOMES: Final = tuple(Outcome)
_CODES: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_ATTRIBUTES: Final = {"tier": TierError, "holder": CacheLockedError}
"""For each attribute to send with an error, the class of errors that has the attribute."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message between an engine and the host of its tier.

    Attributes:
        header: Single values; ``op`` is the kind of message.
        arrays: Packed arrays, in an order that ``op`` implies.
    """

    header: dict[str, Any]
    arrays: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes to send."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        return b"".join((_LENGTHS.pack(len(text), len(self.arrays)), text, self.arrays))


class FrameParser:
    """Splits a stream of bytes into frames. Each direction of a connection has a parser."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes; keep the rest for the next call."""
        self._data += data
        while len(self._data) >= _LENGTHS.size:
            text_nbytes, arrays_nbytes = _LENGTHS.unpack_from(self._data)
            arrays_at = _LENGTHS.size + text_nbytes
            end = arrays_at + arrays_nbytes
            if len(self._data) < end:
                return
            text, arrays = self._data[_LENGTHS.size : arrays_at], self._data[arrays_at:end]
            del self._data[:end]
            yield Frame(json.loads(text), bytes(arrays))


@dataclass(frozen=True, slots=True)
class Batch:
    """The key, slot and offset in shared memory of each chunk in a read or a write."""

    keys: Sequence[ChunkKey]
    slots: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def frame(self, header: dict[str, Any]) -> Frame:
        """Return a frame with ``header`` and this batch."""
        widths, packed = pack_keys(self.keys)
        arrays = b"".join((self.slots.tobytes(), self.offsets.tobytes(), packed))
        return Frame({**header, "count": len(self.keys), "widths": widths}, arrays)

    @classmethod
    def of(cls, frame: Frame) -> Batch:
        """Return the batch in ``frame``."""
        count = frame.header["count"]
        numbers = np.frombuffer(frame.arrays, dtype=np.int64, count=2 * count)
        keys = unpack_keys(frame.header["widths"], count, frame.arrays[16 * count :])
        return cls(keys, numbers[:count], numbers[count:])


def pack_keys(keys: Sequence[ChunkKey]) -> tuple[int | list[int], bytes]:
    """Return the length of each key (one number if all are equal), and the joined keys."""
    widths = set(map(len, keys))
    width = widths.pop() if len(widths) == 1 else None
    return (list(map(len, keys)) if width is None else width), b"".join(keys)


def unpack_keys(widths: int | list[int], count: int, packed: bytes) -> list[ChunkKey]:
    """Return the keys that :func:`pack_keys` packed.

    >>> unpack_keys(*((lambda w, p: (w, 2, p))(*pack_keys([b"ab", b"c"]))))
    [b'ab', b'c']
    """
    if isinstance(widths, int):
        return [packed[at : at + widths] for at in range(0, count * widths, widths)]
    ends = np.cumsum(widths, dtype=np.int64).tolist()
    return [packed[end - width : end] for width, end in zip(widths, ends, strict=True)]


def encode_part_hashes(kept: StoredPartHashes) -> Frame:
    """Return a frame with the slots and the part hashes of ``kept``.

    The field ``parts`` of its header is the number of hashes for each chunk.
    """
    header = {"op": "part_hashes", "parts": kept.hashes.shape[1]}
    return Frame(header, b"".join((kept.slots.tobytes(), kept.hashes.tobytes())))


def decode_part_hashes(frame: Frame) -> StoredPartHashes:
    """Return the part hashes that :func:`encode_part_hashes` encoded."""
    parts = frame.header["parts"]
    count = len(frame.arrays) // (8 + 8 * parts)
    slots = np.frombuffer(frame.arrays, dtype=np.int64, count=count)
    hashes = np.frombuffer(frame.arrays, dtype=np.uint64, offset=slots.nbytes)
    return StoredPartHashes(slots, hashes.reshape(count, parts))


def encode_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """Encode ``outcomes`` with one byte each, which is 0 for DONE."""
    if outcomes.count(Outcome.DONE) == len(outcomes):  # nearly always, and a hash costs time
        return bytes(len(outcomes))
    return bytes([_CODES[outcome] for outcome in outcomes])


def decode_outcomes(codes: bytes) -> list[Outcome]:
    """Return the outcomes that :func:`encode_outcomes` encoded."""
    return [_OUTCOMES[code] for code in codes]


def encode_error(error: BaseException) -> dict[str, str]:
    """Return ``error`` as a dictionary of strings for :func:`decode_error`.

    The engine's process may not know the class of a plugin's KvtierError. So such an error is
    sent with its nearest base class in :mod:`kvtier.errors`, provided that it has the
    attributes of that class. An exception of another kind is sent as a KvtierError with the
    class name in the message.
    """
    if not isinstance(error, KvtierError):
        return {"kind": "KvtierError", "text": f"{type(error).__name__}: {error}"}
    present = {
        name: value
        for name in _ATTRIBUTES
        if isinstance(value := getattr(error, name, None), str)
    }
    kind = next(
        kind
        for kind in type(error).__mro__
        if getattr(errors, kind.__name__, None) is kind and present.keys() >= _needed(kind)
    )
    values = {name: present[name] for name in _needed(kind)}
    return {"kind": kind.__name__, "text": str(error), **values}


def _needed(kind: type) -> set[str]:
    """Return the names of the attributes to send with an error of class ``kind``."""
    return {name for name, owner in _ATTRIBUTES.items() if issubclass(kind, owner)}


def decode_error(found: dict[str, str]) -> KvtierError:
    """Rebuild the error that :func:`encode_error` encoded in the other process."""
    kind = getattr(errors, found["kind"])
    # Skip the constructor, which would compose the message a second time.
    error: KvtierError = kind.__new__(kind, found["text"])
    for name in _ATTRIBUTES:
        if name in found:
            setattr(error, name, found[name])
    return error
