"""Plans jobs that bring chunks up into RAM, for whoever needs them there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import JobRecord
from kvtier.policies import ChunkCopy
from kvtier.types import JobId, Why

__all__ = ["Rise", "plan_rise"]


class Rise(NamedTuple):
    """One job that was planned.

    Attributes:
        job_id: The job.
        copies: The RAM copies it writes.
    """

    job_id: JobId
    copies: Sequence[ChunkCopy]


def plan_rise(
    ladder: Ladder, sources: Sequence[ChunkCopy], tiers: Sequence[int]
) -> list[Rise] | None:
    """Give chunks RAM slots, evicting as needed, and plan the jobs that fill them.

    Args:
        ladder: The tiers.
        sources: Copies of chunks that are not in RAM; at least one.
        tiers: Index of the tier that each is in.

    Returns:
        The jobs; None, and nothing changed, when there is not enough to evict.
    """
    room = ladder.make_room(ladder.ram, [source.key for source in sources])
    if room is None:
        return None
    slots, _ = room
    ladder.ram.counters.misses += len(sources)
    ladder.truth.withdraw(slots)
    rises = []
    for index in dict.fromkeys(tiers):
        here = [tier == index for tier in tiers]
        some, places = list(compress(sources, here)), list(compress(slots, here))
        for at in range(0, len(some), ladder.limits.batch):
            end = at + ladder.limits.batch
            rises.append(_plan_job(ladder, index, some[at:end], places[at:end]))
    return rises


def _plan_job(
    ladder: Ladder, index: int, sources: Sequence[ChunkCopy], slots: Sequence[int]
) -> Rise:
    """Plan one job that brings chunks of tier ``index`` up into the slots beside them."""
    keys = [source.key for source in sources]
    generation = ladder.next_generation()
    copies = ladder.ram.begin_copying(keys, slots, sources, origin=index, generation=generation)
    ladder.tiers[index].pin_many(sources)
    ways = ladder.placement.promote_many(sources, index, ladder.ctx)
    moved: set[ChunkCopy] = set()
    how = ways[0]
    if not (how.keep_source and how.stay and ways.count(how) == len(ways)):
        for source, copy, how in zip(sources, copies, ways, strict=True):
            if not how.keep_source:
                moved.add(source)
            elif not how.stay:
                copy.transient = True
                ladder.ram.passing += 1
    for source in sources:
        source.hits += 1
    places = [source.slot for source in sources]
    record = JobRecord(
        Why.PROMOTE, index, 0, sources, keys, places, copies, ladder.epoch, moved=moved
    )
    job_id = ladder.ledger.open(
        record,
        slots=slots,
        names=ladder.names,
        timeout_s=ladder.limits.load_timeout_s,
        generations=[generation] * len(copies),
    )
    ladder.worth.sent(job_id, index, len(copies))
    return Rise(job_id, copies)
