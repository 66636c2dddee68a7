"""Calls of a manager as lines of JSON.

The first line names the setup: what of the configuration decides, and the slots of each tier,
which depend on the machine. Every other line is one call. Keys are long and come again and
again, so a line gives the keys it mentions first in ``new``, as hexadecimal, and all lines
name them by number. Requests are numbered too, for their ids may be their clients' own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.config import KvtierConfig
from kvtier.keys import ChunkKey
from kvtier.manager import Lookup, RequestTerms
from kvtier.types import Job, TransferResult

__all__ = ["CALLS_MARK", "LETTERS", "CallEncoder", "ManagerSetup", "decisive"]

CALLS_MARK: Final = "kvtier_calls"
"""The key of the first line that says what the file is; its value is the format's version."""

LETTERS: Final = {
    Lookup.HIT: "h",
    Lookup.MISS: "m",
    Lookup.PENDING: "p",
    Lookup.RETRY: "r",
}
"""What stands for the answer of a lookup."""

_VERSION: Final = 3
_PART: Final = 4096
_NO_LOAD: Final = -1
"""Stands for a load of before a reset, whose end the manager ignores."""
_LOAD_ENDS: Final = ("complete_load", "request")


@dataclass(frozen=True, slots=True)
class ManagerSetup:
    """What a manager was built from.

    Attributes:
        config: The configuration.
        capacities: Slots of each tier.
        slot_nbytes: Bytes of a slot.
        chunk_tokens: Tokens of a chunk of the counting group.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
    """

    config: KvtierConfig
    capacities: Sequence[int]
    slot_nbytes: int
    chunk_tokens: int
    counting_group: int = 0

    def line(self) -> bytes:
        """Return the first line of a recording."""
        header = {
            CALLS_MARK: _VERSION,
            "capacities": list(self.capacities),
            "slot_bytes": self.slot_nbytes,
            "block_tokens": self.chunk_tokens,
            "counting_group": self.counting_group,
            "decides": decisive(self.config),
        }
        return _line(header)


def decisive(config: KvtierConfig) -> dict[str, Any]:
    """Return the part of ``config`` that decisions follow from, by key as in a file."""
    values = config.model_dump(mode="json", by_alias=True)
    decides = {
        f"tiers[{number}].{key}": tier[key]
        for number, tier in enumerate(values["tiers"])
        for key in ("name", "eviction")
    }
    for section in ("placement", "transfer"):
        decides |= {f"{section}.{key}": value for key, value in values[section].items()}
    return decides


class CallEncoder:
    """Turns calls into lines, one after the other."""

    def __init__(self) -> None:
        self._keys: dict[ChunkKey, int] = {}
        self._new: list[str] = []
        self._requests: dict[str, int] = {}
        self._loading: dict[str, deque[int]] = {}
        self._begun = 0
        self._plain: Mapping[str, Callable[[Any], Any]] = {
            "keys": self._numbers,
            "stored": self._numbers,
            "evicted": self._numbers,
            "request": self._number_of,
            "load": self._number_of_load,
            "started": self._known,
            "preempted": self._known,
            "jobs": self._described,
            "result": self._result,
            "terms": _terms,
        }

    def lines(self, name: str, values: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the lines of the call ``name``; one, but for a long recovery.

        Args:
            name: The manager's method.
            values: Its arguments and what it answered, by name.
        """
        if name == "recover":
            yield from self._recovery(**values)
            return
        line: dict[str, Any] = {"call": name}
        for field, value in values.items():
            plain = self._plain.get("load" if (name, field) == _LOAD_ENDS else field)
            line[field] = value if plain is None else plain(value)
        if name == "prepare_load":
            self._loading.setdefault(values["request"], deque()).append(line["request"])
        elif name == "reset":
            self._loading.clear()
        elif name == "end_request":
            del self._requests[values["request"]]
        yield self._finish(line)

    def _known(self, req_ids: Iterable[str]) -> list[int]:
        """Return the numbers of those of ``req_ids`` that the manager was told of."""
        return [self._requests[name] for name in req_ids if name in self._requests]

    def _described(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        return [self._job(job) for job in jobs]

    def _numbers(self, keys: Iterable[ChunkKey]) -> list[int]:
        known = self._keys
        numbers = []
        for key in keys:
            number = known.get(key)
            if number is None:
                number = known[key] = len(known)
                self._new.append(key.hex())
            numbers.append(number)
        return numbers

    def _number_of(self, req_id: str) -> int:
        number = self._requests.get(req_id)
        if number is None:
            number = self._requests[req_id] = self._begun
            self._begun += 1
        return number

    def _number_of_load(self, req_id: str) -> int:
        """Return the number of the request whose load is over; the request may be, too."""
        loads = self._loading.get(req_id)
        if loads is None:
            return _NO_LOAD
        number = loads.popleft()
        if not loads:
            del self._loading[req_id]
        return number

    def _job(self, job: Job) -> dict[str, Any]:
        return {
            "id": job.job_id,
            "source": job.source,
            "destination": job.destination,
            "keys": self._numbers(job.keys),
            "source_slots": list(job.source_slots),
            "destination_slots": list(job.destination_slots),
        }

    def _result(self, result: TransferResult) -> dict[str, Any]:
        outcomes = [outcome.value for outcome in result.outcomes]
        return {
            "id": result.job_id,
            "settled": result.settled,
            "outcomes": outcomes,
            "seconds": result.seconds,
            "queued_s": result.queued_s,
        }

    def _recovery(
        self, tier: int, keys: Sequence[ChunkKey], slots: Sequence[int]
    ) -> Iterator[bytes]:
        """Yield a recovery in parts: a disk holds millions of chunks."""
        for at in range(0, max(len(keys), 1), _PART):
            part = slice(at, at + _PART)
            yield self._finish(
                {
                    "call": "recover",
                    "tier": tier,
                    "keys": self._numbers(keys[part]),
                    "slots": list(slots[part]),
                    "more": at + _PART < len(keys),
                }
            )

    def _finish(self, line: dict[str, Any]) -> bytes:
        if self._new:
            line["new"] = self._new
            self._new = []
        return _line(line)


def _terms(terms: RequestTerms) -> dict[str, Any]:
    return {
        "load_tiers": None if terms.load_tiers is None else sorted(terms.load_tiers),
        "store_tiers": None if terms.store_tiers is None else sorted(terms.store_tiers),
        "session": terms.session,
    }


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"
