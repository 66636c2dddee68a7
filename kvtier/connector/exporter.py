"""Serves kvtier's figures to Prometheus over HTTP, for engines without an exporter.

Two threads share the figures. The thread that drives the cache calls
:meth:`MetricsExporter.refresh` at every step; only this thread reads the cache. The server's
thread answers scrapes. A scrape sees all of a reading or none of it, and neither thread waits
for the other for longer than a copy takes.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from typing_extensions import override

from kvtier.connector.metrics import Kind, Publisher, Reporter, StatisticsSource
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

__all__ = ["MetricsExporter"]

_LOCALHOST: Final = "127.0.0.1"
_REASONS: Final = {
    errno.EADDRINUSE: "another process listens there: choose another port, or 0 for a free one",
    errno.EACCES: "that is not allowed: choose a port above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose one it has",
}


class _Registry(CollectorRegistry):
    """Metrics that are collected between two readings, without times of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    @override
    def collect(self) -> Iterator[Family]:
        with self.lock:
            families = list(super().collect())
        for family in families:
            family.samples = [
                each for each in family.samples if not each.name.endswith("_created")
            ]
        yield from families


class MetricsExporter:
    """Serves ``/metrics`` until it is closed; a context manager.

    Args:
        source: Its figures are served; only :meth:`refresh` reads it. Where a
            :class:`~kvtier.connector.scheduler.ConnectorScheduler` drives a cache, pass the
            scheduler side: it also has the copies of the workers.
        port: TCP port; 0 for any free port.
        host: Address to listen at; the default serves this machine only.
        labels: Labels of every series, such as ``{"job": "warm-up"}``.

    Attributes:
        port: The port that the server listens at.

    Raises:
        ConfigError: The server cannot listen at ``host`` and ``port``.
    """

    def __init__(
        self,
        source: StatisticsSource,
        port: int,
        *,
        host: str = _LOCALHOST,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        labels = labels or {}
        self._reporter = Reporter(source)
        self._registry = _Registry()
        makers = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
        self._publisher = Publisher(
            {kind: partial(make, registry=self._registry) for kind, make in makers.items()},
            tuple(labels),
        )
        self._label_values = tuple(labels.values())
        self.refresh()
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except (OSError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = _REASONS.get(number or 0, str(error))
            raise ConfigError(f"metrics cannot be served at {host}:{port}: {reason}") from error
        self.port = self._server.server_port

    def refresh(self) -> None:
        """Read the source if a reading is due; cheap otherwise.

        The thread that drives the source calls it at every step. A scrape sees the last
        reading, which is at most a second older than the last call.
        """
        changes = self._reporter.take()
        if changes:
            with self._registry.lock:
                self._publisher.publish(changes, self._label_values)

    def close(self) -> None:
        """Stop serving and release the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
