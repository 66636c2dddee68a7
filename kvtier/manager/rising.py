"""Plans jobs that bring chunks up into RAM, for whoever needs them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.keys import ChunkKey
from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import BATCH_CHUNKS, JobRecord
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy
from kvtier.types import JobId, Why

__all__ = ["Rise", "Wanted", "plan_rise"]


class Wanted(NamedTuple):
    """A chunk that is not in RAM.

    Attributes:
        key: The chunk.
        tier: The tier it comes from.
        source: Its copy there.
    """

    key: ChunkKey
    tier: TierState
    source: ChunkCopy


class Rise(NamedTuple):
    """One job that was planned.

    Attributes:
        job_id: The job.
        copies: The RAM copies it writes.
    """

    job_id: JobId
    copies: Sequence[ChunkCopy]


def plan_rise(ladder: Ladder, wanted: Sequence[Wanted]) -> list[Rise] | None:
    """Give ``wanted`` RAM slots, evicting as needed, and plan the jobs that fill them.

    Returns:
        The jobs; None, and nothing changed, when there is not enough to evict.
    """
    if ladder.make_room(ladder.ram, [chunk.key for chunk in wanted]) is None:
        return None
    ladder.ram.counters.misses += len(wanted)
    slots = ladder.ram.slots.allocate(len(wanted))
    ladder.truth.withdraw(slots)
    by_tier: dict[int, list[tuple[Wanted, int]]] = {}
    for chunk, slot in zip(wanted, slots, strict=True):
        by_tier.setdefault(chunk.tier.index, []).append((chunk, slot))
    return [
        _plan_job(ladder, index, found[at : at + BATCH_CHUNKS])
        for index, found in by_tier.items()
        for at in range(0, len(found), BATCH_CHUNKS)
    ]


def _plan_job(ladder: Ladder, index: int, found: Iterable[tuple[Wanted, int]]) -> Rise:
    """Plan one job that brings chunks of tier ``index`` up into the slots beside them."""
    sources: list[ChunkCopy] = []
    copies: list[ChunkCopy] = []
    moved: set[ChunkCopy] = set()
    generation = ladder.next_generation()
    for (key, tier, source), slot in found:
        how = ladder.placement.promote(source, index, ladder.ctx)
        source.hits += 1
        copy = ChunkCopy(key, slot, source.parent, source.depth)
        copy.session, copy.targets = source.session, source.targets
        copy.origin = index
        copy.transient = how.keep_source and not how.stay
        copy.generation = generation
        tier.pin(source)
        if not how.keep_source:
            moved.add(source)
        sources.append(source)
        copies.append(copy)
    ladder.ram.add_writing(copies)
    ladder.ram.passing += sum(copy.transient for copy in copies)
    record = JobRecord(Why.PROMOTE, index, 0, sources, copies, ladder.epoch, moved=moved)
    job_id = ladder.ledger.open(
        record,
        names=ladder.names,
        timeout_s=ladder.limits.load_timeout_s,
        generations=[generation] * len(copies),
    )
    ladder.worth.sent(job_id, index, len(copies))
    return Rise(job_id, copies)
