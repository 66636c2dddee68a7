"""kvtier's numbers in vLLM's metrics.

vLLM's front end asserts that every name it is sent was declared, and dies otherwise, so the
definitions and the values come from the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier.connector.statistics import EngineStatistics, TierFigures
from kvtier.vllm.contract import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

__all__ = ["StatsReporter", "metric_definitions"]

_COUNTERS: Mapping[str, str] = {
    "hit_chunks": "Chunks loaded into the GPU, by the tier their bytes came from.",
    "hit_tokens": "Prompt tokens not computed, by the tier their KV came from.",
    "miss_chunks": (
        "Chunks asked for and not in the tier: those found in a slower one, and one per "
        "request for the first that was nowhere."
    ),
    "stored_chunks": "Chunks that became resident in the tier.",
    "evicted_chunks": "Chunks that left the tier to make room.",
    "promoted_chunks": "Chunks that came up from the tier to RAM to stay.",
    "refused_chunks": "Chunks not taken for lack of room or by policy.",
    "lost_chunks": "Chunks that did not reach the slower tier they were meant for.",
    "unretained_chunks": "Chunks asked to be kept that were not, or not as long.",
    "dropped_chunks": "Chunks meant for the tier and not sent because it did not keep up.",
    "corrupt_chunks": "Chunks dropped because their bytes were not the bytes stored.",
    "read_bytes": "Bytes read from the tier by transfers that completed.",
    "written_bytes": "Bytes written to the tier by transfers that completed.",
    "transfer_seconds": "Time spent in transfers to and from the tier, queueing excluded.",
    "queue_seconds": "Time transfers to and from the tier waited for their turn.",
    "refused_jobs": "Transfers refused: queue full or tier out of service.",
    "expired_jobs": "Transfers whose deadline passed.",
}
_GAUGES: Mapping[str, str] = {
    "capacity_chunks": "Chunks the tier can hold.",
    "used_chunks": "Slots of the tier that are not free.",
    "held_chunks": "Chunks that could not be evicted now.",
    "dirty_chunks": "Chunks that must still reach a slower tier.",
    "queued_bytes": "Bytes queued or running to and from the tier.",
    "out_of_service": "1 while the tier is skipped after repeated failures.",
}
_FAILED = "kvtier_failed_chunks"
_PREFIX = "kvtier_"
_ENGINE_GAUGES: Mapping[str, str] = {
    "waiting_requests": "Requests that wait for chunks on their way to RAM.",
    "granted_chunks": "RAM slots kept for waiting requests.",
    "retained_chunks": "RAM slots of chunks kept until a deadline.",
}
_ENGINE_COUNTERS: Mapping[str, str] = {
    "internal_errors": (
        "Unexpected errors in kvtier, answered as misses; anything but 0 is a bug."
    ),
    "trace_records": "Records written to the trace.",
    "trace_dropped": "Records of the trace that were not written.",
}
_SHADOW_COUNTERS: Mapping[str, str] = {
    "shadow_asked_chunks": "Chunks that a shadow policy was asked for.",
    "shadow_hit_chunks": "Chunks that a shadow policy would have had.",
}
_SHADOW_RATIO = "kvtier_shadow_hit_ratio"
_REUSE_GAP = "kvtier_evict_reuse_gap_seconds"
_REUSE_GAP_BUCKETS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric kvtier may report, for vLLM's front end."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, text in _COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(text, ("tier",))
    for name, text in _GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(text, ("tier",))
    for name, text in _ENGINE_GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(text)
    definitions[_FAILED] = OffloadingCounterMetadata(
        "Chunks whose transfer failed, by tier and by read or write.", ("tier", "cause")
    )
    for name, text in _ENGINE_COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(text)
    for name, text in _SHADOW_COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(text, ("tier", "policy"))
    definitions[_SHADOW_RATIO] = OffloadingGaugeMetadata(
        "Share of chunks that a shadow policy would have had, since the start.",
        ("tier", "policy"),
    )
    definitions[_REUSE_GAP] = OffloadingHistogramMetadata(
        "Time between evicting a chunk from the tier and being asked for it again.",
        ("tier",),
        buckets=_REUSE_GAP_BUCKETS,
    )
    return definitions


class StatsReporter:
    """Turns snapshots into what changed since the last one."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}

    def report(
        self, now: EngineStatistics, reuse_gaps: Sequence[Sequence[float]]
    ) -> OffloadingConnectorStats:
        """Return the changes since the last call, gauges as they are.

        Args:
            now: All figures.
            reuse_gaps: Per tier, seconds from an eviction to being asked for the chunk.
        """
        stats = OffloadingConnectorStats()
        for name, labels, total in self._totals(now):
            change = total - self._reported.get((name, labels), 0)
            if change:
                self._reported[name, labels] = total
                stats.increase_counter(name, change, labels)
        for name, labels, value in _gauges(now):
            stats.set_gauge(name, value, labels)
        for tier, gaps in zip(now.tiers, reuse_gaps, strict=True):
            for gap_s in gaps:
                stats.observe_histogram(_REUSE_GAP, gap_s, (tier.name,))
        return stats

    def _totals(self, now: EngineStatistics) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for tier in now.tiers:
            for name in _COUNTERS:
                yield _PREFIX + name, (tier.name,), getattr(tier, name)
            for cause, total in _failures(tier).items():
                yield _FAILED, (tier.name, cause), total
        for shadow in now.shadows:
            for name in _SHADOW_COUNTERS:
                total = getattr(shadow, name.removeprefix("shadow_"))
                yield _PREFIX + name, (shadow.tier, shadow.policy), total
        for name in _ENGINE_COUNTERS:
            yield _PREFIX + name, (), getattr(now, name)


def _gauges(now: EngineStatistics) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for tier in now.tiers:
        for name in _GAUGES:
            yield _PREFIX + name, (tier.name,), getattr(tier, name)
    for name in _ENGINE_GAUGES:
        yield _PREFIX + name, (), getattr(now, name)
    for shadow in now.shadows:
        yield _SHADOW_RATIO, (shadow.tier, shadow.policy), shadow.hit_ratio


def _failures(tier: TierFigures) -> dict[str, int]:
    return {
        "read": tier.failed_reads,
        "write": tier.failed_writes,
        "corrupt": tier.corrupt_chunks,
    }
