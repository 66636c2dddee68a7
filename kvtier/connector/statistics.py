"""One engine's figures as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.manager import ManagerSnapshot, TierSnapshot
from kvtier.recording import RecorderStatistics
from kvtier.transfer import ChannelStatistics

__all__ = ["EngineStatistics", "ShadowFigures", "TierFigures", "engine_statistics"]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier; counters since the engine started, the rest as it is now.

    Attributes:
        name: The tier's name.
        hit_chunks: Chunks loaded into the GPU whose bytes came from here.
        hit_tokens: Prompt tokens they stand for.
        miss_chunks: Chunks asked for and not here: those found in a slower tier, and one per
            request for the first that was nowhere.
        stored_chunks: Chunks that became resident.
        evicted_chunks: Chunks that left to make room.
        promoted_chunks: Chunks that came up from here to RAM to stay.
        refused_chunks: Chunks not taken for lack of room or by policy.
        lost_chunks: Chunks that did not reach the slower tier they were meant for.
        unretained_chunks: Chunks asked to be kept that were not, or not as long.
        dropped_chunks: Chunks meant for the tier and not sent because it did not keep up.
        corrupt_chunks: Chunks dropped because their bytes were not the bytes stored.
        failed_reads: Chunks whose transfer out failed or expired.
        failed_writes: Chunks whose transfer in failed or expired.
        read_bytes: Bytes that left for another tier.
        written_bytes: Bytes that arrived from another tier.
        transfer_seconds: Run time of storage transfers.
        queue_seconds: Waiting time of storage transfers.
        refused_jobs: Transfers refused.
        expired_jobs: Transfers whose deadline passed.
        capacity_chunks: Slots.
        used_chunks: Slots not free.
        held_chunks: Copies that could not be evicted now.
        dirty_chunks: Copies that must still reach a slower tier.
        queued_bytes: Bytes queued or running.
        out_of_service: 1 while the tier is skipped, else 0.
    """

    name: str
    hit_chunks: int
    hit_tokens: int
    miss_chunks: int
    stored_chunks: int
    evicted_chunks: int
    promoted_chunks: int
    refused_chunks: int
    lost_chunks: int
    unretained_chunks: int
    dropped_chunks: int
    corrupt_chunks: int
    failed_reads: int
    failed_writes: int
    read_bytes: int
    written_bytes: int
    transfer_seconds: float
    queue_seconds: float
    refused_jobs: int
    expired_jobs: int
    capacity_chunks: int
    used_chunks: int
    held_chunks: int
    dirty_chunks: int
    queued_bytes: int
    out_of_service: int


@dataclass(frozen=True, slots=True)
class ShadowFigures:
    """One shadow policy in one tier, since the engine started.

    Attributes:
        tier: The tier's name.
        policy: The policy's name.
        asked_chunks: Chunks asked for; of a large tier a sample.
        hit_chunks: Those it would have had.
    """

    tier: str
    policy: str
    asked_chunks: int
    hit_chunks: int

    @property
    def hit_ratio(self) -> float:
        """Share of what was asked for."""
        return self.hit_chunks / max(self.asked_chunks, 1)


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """All tiers of one engine.

    Attributes:
        tiers: Fastest first.
        waiting_requests: Requests that wait for chunks on their way to RAM.
        granted_chunks: RAM slots kept for waiting requests.
        retained_chunks: RAM slots of chunks kept until a deadline.
        internal_errors: Unexpected errors answered as misses.
        trace_records: Records written to the trace.
        trace_dropped: Records that were not.
        shadows: Shadow policies, tier by tier.
    """

    tiers: Sequence[TierFigures]
    waiting_requests: int
    granted_chunks: int
    retained_chunks: int
    internal_errors: int
    trace_records: int
    trace_dropped: int
    shadows: Sequence[ShadowFigures]


def engine_statistics(
    manager: ManagerSnapshot,
    channels: Mapping[tuple[str, str], ChannelStatistics],
    *,
    hit_tokens: Sequence[int],
    internal_errors: int,
    shadows: Sequence[ShadowFigures],
    recorder: RecorderStatistics | None,
) -> EngineStatistics:
    """Put the manager's and the storage engine's figures together.

    Args:
        manager: The manager's snapshot.
        channels: The storage engine's, by (source, destination).
        hit_tokens: Prompt tokens loaded, per tier.
        internal_errors: Unexpected errors so far.
        shadows: Shadow policies, tier by tier.
        recorder: The recording's, if there is one.
    """
    return EngineStatistics(
        tiers=[
            _tier_figures(tier, channels, hit_tokens[number], fastest=not number)
            for number, tier in enumerate(manager.tiers)
        ],
        waiting_requests=manager.waiting,
        granted_chunks=manager.granted,
        retained_chunks=manager.retained,
        internal_errors=internal_errors,
        trace_records=0 if recorder is None else recorder.written,
        trace_dropped=0 if recorder is None else recorder.dropped,
        shadows=shadows,
    )


def _tier_figures(
    tier: TierSnapshot,
    channels: Mapping[tuple[str, str], ChannelStatistics],
    hit_tokens: int,
    *,
    fastest: bool,
) -> TierFigures:
    counters = tier.counters
    out = [stats for (source, _), stats in channels.items() if source == tier.name]
    into = [stats for (_, target), stats in channels.items() if target == tier.name]
    return TierFigures(
        name=tier.name,
        hit_chunks=counters.hits,
        hit_tokens=hit_tokens,
        miss_chunks=counters.misses,
        stored_chunks=counters.stored,
        evicted_chunks=counters.evicted,
        promoted_chunks=counters.promoted,
        refused_chunks=counters.refused,
        lost_chunks=counters.lost,
        unretained_chunks=counters.unretained,
        dropped_chunks=counters.dropped,
        corrupt_chunks=counters.corrupt,
        failed_reads=counters.read_failed,
        failed_writes=counters.failed,
        read_bytes=sum(stats.nbytes for stats in out),
        written_bytes=sum(stats.nbytes for stats in into),
        transfer_seconds=sum(stats.seconds for stats in (*out, *into)),
        queue_seconds=sum(stats.queued_s for stats in (*out, *into)),
        refused_jobs=sum(stats.refused for stats in (*out, *into)),
        expired_jobs=sum(stats.expired for stats in (*out, *into)),
        capacity_chunks=tier.capacity,
        used_chunks=tier.used,
        held_chunks=tier.held,
        dirty_chunks=tier.dirty,
        queued_bytes=sum(stats.queued_bytes for stats in (*out, *into)),
        # A channel's breaker is about the slower of its two ends.
        out_of_service=int(not fastest and any(s.out_of_service for s in (*out, *into))),
    )
