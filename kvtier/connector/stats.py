"""What one half of a connector saw of transfers since it was last asked.

A worker records each copy it finishes; the statistics of all workers are added up, travel as
plain values, and end in a log line or in metrics. Whoever takes them starts a new interval. In
an interval that nobody ends, later operations are added to the last one of their type: totals
stay right, and memory bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypedDict

__all__ = ["ConnectorStats", "OperationMetrics", "transfer_type_of"]


_MOST_OPERATIONS: Final = 4096


class OperationMetrics(TypedDict):
    """One transfer."""

    op_size: int
    """Bytes that reached their destination."""
    op_time: float
    """Seconds from the first byte asked for to the last."""


def transfer_type_of(source: str, destination: str) -> str:
    """Name a kind of transfer.

    >>> transfer_type_of("gpu", "ram")
    'gpu_to_ram'
    """
    return f"{source}_to_{destination}"


class ConnectorStats:
    """Transfers by type, one entry each. Not thread-safe.

    Args:
        data: Operations by transfer type, as of :meth:`to_dict`; copied.

    Raises:
        ValueError: ``data`` is not of that form.

    Example:
        >>> stats = ConnectorStats()
        >>> stats.record_transfer(4096, 0.5, ("gpu", "ram"))
        >>> stats.reduce()
        {'gpu_to_ram_total_bytes': 4096, 'gpu_to_ram_total_time': 0.5}
    """

    __slots__ = ("_operations",)

    def __init__(self, data: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> None:
        self._operations: dict[str, list[OperationMetrics]] = {}
        for transfer_type, operations in (data or {}).items():
            self._operations[transfer_type] = [
                _operation(transfer_type, operation) for operation in operations
            ]

    @property
    def data(self) -> Mapping[str, Sequence[OperationMetrics]]:
        """The operations by transfer type; not to be changed."""
        return self._operations

    def record_transfer(
        self, num_bytes: int, seconds: float, transfer_type: tuple[str, str]
    ) -> None:
        """Add one transfer.

        Args:
            num_bytes: Bytes that reached their destination.
            seconds: How long that took, queueing excluded.
            transfer_type: Where from and where to, such as ``("gpu", "ram")``.
        """
        operation = OperationMetrics(op_size=num_bytes, op_time=seconds)
        self._add(transfer_type_of(*transfer_type), (operation,))

    def aggregate(self, other: ConnectorStats) -> Self:
        """Add what another worker recorded; ``other`` stays as it is."""
        for transfer_type, operations in other.data.items():
            self._add(transfer_type, operations)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return bytes and seconds by transfer type, for a log line."""
        reduced: dict[str, int | float] = {}
        for transfer_type, operations in self._operations.items():
            reduced[f"{transfer_type}_total_bytes"] = sum(
                each["op_size"] for each in operations
            )
            reduced[f"{transfer_type}_total_time"] = sum(each["op_time"] for each in operations)
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing was recorded since the last reset."""
        return not self._operations

    def reset(self) -> None:
        """Begin a new interval."""
        self._operations = {}

    def clone_and_reset(self) -> ConnectorStats:
        """Return what was recorded and begin a new interval."""
        taken = ConnectorStats()
        taken._operations, self._operations = self._operations, taken._operations
        return taken

    def to_dict(self) -> dict[str, list[OperationMetrics]]:
        """Return plain values that any serialiser takes; the inverse of the constructor."""
        return {
            transfer_type: [operation.copy() for operation in operations]
            for transfer_type, operations in self._operations.items()
        }

    def _add(self, transfer_type: str, operations: Sequence[OperationMetrics]) -> None:
        known = self._operations.setdefault(transfer_type, [])
        room = _MOST_OPERATIONS - len(known)
        known += [operation.copy() for operation in operations[:room]]
        for operation in operations[room:]:
            known[-1]["op_size"] += operation["op_size"]
            known[-1]["op_time"] += operation["op_time"]


def _operation(transfer_type: str, plain: Mapping[str, Any]) -> OperationMetrics:
    match plain:
        case {"op_size": int(size), "op_time": int(seconds) | float(seconds)}:
            return OperationMetrics(op_size=size, op_time=float(seconds))
        case _:
            raise ValueError(
                f"{transfer_type}: {plain!r} is no transfer; op_size and op_time make one"
            )
