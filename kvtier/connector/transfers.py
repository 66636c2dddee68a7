"""Records of finished transfers, kept until a caller takes the records.

A worker records each copy that it finishes. The records of all workers are merged, sent to the
scheduler side and exported as metrics. If no caller takes the records, later transfers are
added to the last record of their type. So totals stay exact and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Transfers", "transfer_type_of"]

_MAX_RECORDS: Final = 4096


def transfer_type_of(source: str, destination: str) -> str:
    """Return the type name of transfers from ``source`` to ``destination``.

    >>> transfer_type_of("gpu", "ram")
    'gpu_to_ram'
    """
    return f"{source}_to_{destination}"


@dataclass(slots=True)
class Transfers:
    """Finished transfers, grouped by type. Not thread-safe.

    Attributes:
        by_type: Per transfer type, the number of bytes and the seconds of each transfer.

    Example:
        >>> transfers = Transfers()
        >>> transfers.record("gpu", "ram", nbytes=4096, seconds=0.5)
        >>> transfers.totals()
        {'gpu_to_ram': (4096, 0.5)}
    """

    by_type: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_type)

    def record(self, source: str, destination: str, *, nbytes: int, seconds: float) -> None:
        """Add one transfer.

        Args:
            source: Name of the source, such as ``gpu``.
            destination: Name of the destination, such as ``ram``.
            nbytes: Number of bytes that reached the destination.
            seconds: Run time in seconds, without the time in the queue.
        """
        self._extend(transfer_type_of(source, destination), [(nbytes, seconds)])

    def add(self, other: Transfers) -> None:
        """Add all transfers of ``other`` to this object; ``other`` stays unchanged."""
        for transfer_type, records in other.by_type.items():
            self._extend(transfer_type, records)

    def take(self) -> Transfers:
        """Remove and return all transfers."""
        taken, self.by_type = self.by_type, {}
        return Transfers(taken)

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return the total bytes and the total seconds of each transfer type."""
        return {
            transfer_type: (sum(size for size, _ in records), sum(time for _, time in records))
            for transfer_type, records in self.by_type.items()
        }

    def _extend(self, transfer_type: str, records: Sequence[tuple[int, float]]) -> None:
        known = self.by_type.setdefault(transfer_type, [])
        room = _MAX_RECORDS - len(known)
        known += records[:room]
        for nbytes, seconds in records[room:]:
            known[-1] = (known[-1][0] + nbytes, known[-1][1] + seconds)
