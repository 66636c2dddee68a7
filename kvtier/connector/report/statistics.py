"""One engine's figures as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.manager import ManagerSnapshot, TierSnapshot
from kvtier.recording import RecorderStatistics
from kvtier.transfer import ChannelStatistics

__all__ = [
    "EngineStatistics",
    "ShadowFigures",
    "StoreInfo",
    "TierFigures",
    "engine_statistics",
]


class TierFigures(NamedTuple):
    """One tier; counters since the engine started, the rest as it is now.

    Attributes:
        name: The tier's name.
        hit_chunks: Chunks that loads brought to the GPU and whose bytes came from here; of a
            load that failed only those before its failure.
        hit_tokens: Prompt tokens they stand for, rounded up to whole chunks.
        miss_chunks: Chunks asked for and not here: those found in a slower tier, and one per
            request for the first that was nowhere.
        stranded_chunks: Chunks that were here and were computed all the same, because one that
            comes before them was in no tier.
        skipped_load_chunks: Chunks not loaded because computing them was expected to be faster,
            or because they were not expected in time.
        skipped_load_tokens: Prompt tokens they stand for.
        stored_chunks: Chunks that became resident.
        evicted_chunks: Chunks that left to make room.
        followed_chunks: Those of them whose reuse gap would be told; of a large tier a sample.
        promoted_chunks: Chunks that came up from here to RAM to stay.
        demoted_chunks: Chunks that went down from here and arrived.
        refused_chunks: Chunks not taken for lack of room or by policy.
        lost_chunks: Chunks that did not reach the slower tier they were meant for.
        unretained_chunks: Chunks asked to be kept that were not, or not as long.
        dropped_chunks: Chunks meant for the tier and not sent because it did not keep up; of
            RAM, those refused because others that wait for a slower tier filled it.
        corrupt_chunks: Chunks dropped because their bytes were not the bytes stored.
        failed_reads: Chunks whose transfer out failed.
        failed_writes: Chunks whose transfer in failed.
        failed_loads: Chunks of the tier that a worker could not load into the GPU.
        expired_chunks: Chunks whose transfer did not end before its deadline.
        shut_out_chunks: Chunks whose transfer was refused: out of service, or queue full.
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
        recovered_chunks: Chunks of earlier engines that were here at the start.
        load_seconds_per_gb: Estimate of what loading takes from here; 0 if never measured.
        out_of_service: 1 while the tier is not read from, or not written to, else 0.
    """

    name: str
    hit_chunks: int
    hit_tokens: int
    miss_chunks: int
    stranded_chunks: int
    skipped_load_chunks: int
    skipped_load_tokens: int
    stored_chunks: int
    evicted_chunks: int
    followed_chunks: int
    promoted_chunks: int
    demoted_chunks: int
    refused_chunks: int
    lost_chunks: int
    unretained_chunks: int
    dropped_chunks: int
    corrupt_chunks: int
    failed_reads: int
    failed_writes: int
    failed_loads: int
    expired_chunks: int
    shut_out_chunks: int
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
    recovered_chunks: int
    load_seconds_per_gb: float
    out_of_service: int


class StoreInfo(NamedTuple):
    """Where one tier keeps chunks, for people.

    Attributes:
        tier: The tier's name.
        namespace: What stored bytes mean, as the name of a directory.
        path: The store's directory; empty if there is none.
    """

    tier: str
    namespace: str
    path: str


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
        recompute_seconds_per_token: Estimate of what computing takes; 0 if never measured.
        internal_errors: Unexpected errors answered as misses.
        trace_records: Records written to the trace.
        trace_dropped: Records that were not.
        shadows: Shadow policies, tier by tier.
        stores: Where the tiers keep chunks; never changes.
    """

    tiers: Sequence[TierFigures]
    waiting_requests: int
    granted_chunks: int
    retained_chunks: int
    recompute_seconds_per_token: float
    internal_errors: int
    trace_records: int
    trace_dropped: int
    shadows: Sequence[ShadowFigures]
    stores: Sequence[StoreInfo] = ()


def engine_statistics(  # noqa: PLR0913 - one keyword for each source
    manager: ManagerSnapshot,
    channels: Mapping[tuple[str, str], ChannelStatistics],
    *,
    tokens_per_chunk: int,
    internal_errors: int,
    shadows: Sequence[ShadowFigures],
    recorder: RecorderStatistics | None,
    recovered: Mapping[str, int],
    stores: Sequence[StoreInfo],
) -> EngineStatistics:
    """Put the manager's and the storage engine's figures together.

    Args:
        manager: The manager's snapshot.
        channels: The storage engine's, by (source, destination).
        tokens_per_chunk: Tokens of a chunk of the counting group.
        internal_errors: Unexpected errors so far.
        shadows: Shadow policies, tier by tier.
        recorder: The recording's, if there is one.
        recovered: Chunks found at the start, by the tier's name.
        stores: Where the tiers keep chunks.
    """
    cost_model = manager.cost_model
    per_gb = [0.0 if price is None else price.seconds(10**9) for price in cost_model.load_costs]
    loads = zip(cost_model.skipped_chunks, cost_model.skipped_tokens, per_gb, strict=True)
    return EngineStatistics(
        tiers=[
            _tier_figures(
                tier,
                channels,
                tier.counters.prompt_hits * tokens_per_chunk,
                load,
                fastest=manager.tiers[0].name,
                recovered_chunks=recovered.get(tier.name, 0),
            )
            for tier, load in zip(manager.tiers, loads, strict=True)
        ],
        waiting_requests=manager.waiting,
        granted_chunks=manager.granted,
        retained_chunks=manager.retained,
        recompute_seconds_per_token=cost_model.recompute_s_per_token or 0.0,
        internal_errors=internal_errors,
        trace_records=0 if recorder is None else recorder.written,
        trace_dropped=0 if recorder is None else recorder.dropped,
        shadows=shadows,
        stores=stores,
    )


def _tier_figures(
    tier: TierSnapshot,
    channels: Mapping[tuple[str, str], ChannelStatistics],
    hit_tokens: int,
    load: tuple[int, int, float],
    *,
    fastest: str,
    recovered_chunks: int,
) -> TierFigures:
    counters = tier.counters
    read_bytes = written_bytes = queued_bytes = refused = expired = 0
    seconds = queued_s = 0.0
    out_of_service = False
    for ends, channel in channels.items():
        if tier.name not in ends:
            continue
        if tier.name == ends[0]:
            read_bytes += channel.nbytes
        else:
            written_bytes += channel.nbytes
        seconds += channel.seconds
        queued_s += channel.queued_s
        queued_bytes += channel.queued_bytes
        refused += channel.refused
        expired += channel.expired
        # Between two slower tiers a channel says of neither that it is skipped.
        meets_ram = fastest in ends and tier.name != fastest
        out_of_service = out_of_service or (channel.out_of_service and meets_ram)
    return TierFigures(
        name=tier.name,
        hit_chunks=counters.hits,
        hit_tokens=hit_tokens,
        miss_chunks=counters.misses,
        stranded_chunks=counters.stranded,
        skipped_load_chunks=load[0],
        skipped_load_tokens=load[1],
        stored_chunks=counters.stored,
        evicted_chunks=counters.evicted,
        followed_chunks=counters.followed,
        promoted_chunks=counters.promoted,
        demoted_chunks=counters.demoted,
        refused_chunks=counters.refused,
        lost_chunks=counters.lost,
        unretained_chunks=counters.unretained,
        dropped_chunks=counters.dropped,
        corrupt_chunks=counters.corrupt,
        failed_reads=counters.read_failed,
        failed_writes=counters.failed,
        failed_loads=counters.load_failed,
        expired_chunks=counters.expired,
        shut_out_chunks=counters.shut_out,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        transfer_seconds=seconds,
        queue_seconds=queued_s,
        refused_jobs=refused,
        expired_jobs=expired,
        capacity_chunks=tier.capacity,
        used_chunks=tier.used,
        held_chunks=tier.held,
        dirty_chunks=tier.dirty,
        queued_bytes=queued_bytes,
        recovered_chunks=recovered_chunks,
        load_seconds_per_gb=load[2],
        out_of_service=int(out_of_service),
    )
