"""What travels between an engine and the host of its tier.

A frame is a JSON object followed by packed arrays: the two lengths, the object, the arrays. The
JSON carries what there is one of, the arrays what there is one of per chunk. Both ends are the
same version of kvtier on the same machine, so there is no negotiation; nothing here is ever
kept.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier import errors
from kvtier.errors import KvtierError, StoreLockedError, TierError
from kvtier.keys import ChunkKey
from kvtier.types import Outcome

__all__ = [
    "READ_NBYTES",
    "Batch",
    "Frame",
    "FrameParser",
    "decode_error",
    "decode_outcomes",
    "encode_error",
    "encode_outcomes",
    "pack_keys",
    "unpack_keys",
]

READ_NBYTES: Final = 1 << 18
"""Bytes to ask a socket for: the arrays of some thousand chunks."""

_LENGTHS: Final = struct.Struct("<IQ")
_OUTCOMES: Final = tuple(Outcome)
_CODES: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_ALL_DONE: Final = "done"
_ATTRIBUTES: Final = {"tier": TierError, "holder": StoreLockedError}
"""What errors of these classes have besides their words; all of it is text."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        header: What there is one of; ``op`` says what the message is.
        arrays: Packed arrays, in an order that ``op`` implies.
    """

    header: dict[str, Any]
    arrays: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes to send."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        return b"".join((_LENGTHS.pack(len(text), len(self.arrays)), text, self.arrays))


class FrameParser:
    """Cuts a stream of bytes into frames; there is one for each direction of a connection."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole with ``data``; what is not taken comes next time."""
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
    """The chunks of a read or a write.

    Attributes:
        keys: The chunks' keys.
        slots: Their slots in the tier.
        offsets: Where their bytes are in the shared memory.
    """

    keys: Sequence[ChunkKey]
    slots: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def frame(self, header: dict[str, Any]) -> Frame:
        """Return ``header`` with this batch."""
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
    """Return the length of the keys, or of each if they differ, and the keys end to end."""
    widths = set(map(len, keys))
    width = widths.pop() if len(widths) == 1 else None
    return (list(map(len, keys)) if width is None else width), b"".join(keys)


def unpack_keys(widths: int | list[int], count: int, packed: bytes) -> list[ChunkKey]:
    """Undo :func:`pack_keys`.

    >>> unpack_keys(*((lambda w, p: (w, 2, p))(*pack_keys([b"ab", b"c"]))))
    [b'ab', b'c']
    """
    if isinstance(widths, int):
        return [packed[at : at + widths] for at in range(0, count * widths, widths)]
    ends = np.cumsum(widths, dtype=np.int64).tolist()
    return [packed[end - width : end] for width, end in zip(widths, ends, strict=True)]


def encode_outcomes(outcomes: Sequence[Outcome]) -> tuple[str, bytes]:
    """Return a word that stands for all ``outcomes``, or an empty one and a byte for each."""
    if outcomes.count(Outcome.DONE) == len(outcomes):
        return _ALL_DONE, b""
    return "", bytes([_CODES[outcome] for outcome in outcomes])


def decode_outcomes(word: str, codes: bytes, count: int) -> list[Outcome]:
    """Undo :func:`encode_outcomes`."""
    if word == _ALL_DONE:
        return [Outcome.DONE] * count
    return [_OUTCOMES[code] for code in codes]


def encode_error(error: BaseException) -> dict[str, str]:
    """Return what :func:`decode_error` needs; an error that is not kvtier's becomes words.

    A class that a plugin made, which the engine's process may not know, becomes the nearest one
    of :mod:`kvtier.errors` that is whole with the attributes there are.
    """
    if not isinstance(error, KvtierError):
        return {"kind": "KvtierError", "text": f"{type(error).__name__}: {error}"}
    there = {
        name: value
        for name in _ATTRIBUTES
        if isinstance(value := getattr(error, name, None), str)
    }
    kind = next(kind for kind in type(error).__mro__ if _is_whole(kind, there))
    needed = {name: there[name] for name in _attributes_of(kind)}
    return {"kind": kind.__name__, "text": str(error), **needed}


def _is_whole(kind: type, there: Container[str]) -> bool:
    ours = getattr(errors, kind.__name__, None) is kind
    return ours and all(name in there for name in _attributes_of(kind))


def _attributes_of(kind: type) -> list[str]:
    """Return the attributes that an error of ``kind``, one of ours, has."""
    return [name for name, owner in _ATTRIBUTES.items() if issubclass(kind, owner)]


def decode_error(found: dict[str, str]) -> KvtierError:
    """Rebuild an error of the other process, with its words and attributes."""
    kind = getattr(errors, found["kind"])
    # The constructors compose the text that is already composed here.
    error: KvtierError = kind.__new__(kind, found["text"])
    for name in _ATTRIBUTES:
        if name in found:
            setattr(error, name, found[name])
    return error
