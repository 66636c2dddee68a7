"""One job's way through its route: whatever a tier does on it, the job ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kvtier.keys import short_key
from kvtier.logs import get_logger
from kvtier.tiers.base import SlotOutcomes, check_outcomes
from kvtier.transfer.jobs import Pending
from kvtier.transfer.routes import raising
from kvtier.types import Job, Outcome

__all__ = ["begin", "outcomes_of", "tell_of_losses"]

logger = get_logger(__name__)


def begin(pending: Pending) -> Coroutine[Any, Any, SlotOutcomes]:
    """Begin to move a job's chunks at once; never raises."""
    try:
        return pending.channel.route.run(pending.job)
    except Exception as raised:  # noqa: BLE001 - raised again where the job ends
        pending.channel.route.abandon(pending.job)
        return raising(raised)


async def outcomes_of(
    job: Job, moving: Coroutine[Any, Any, SlotOutcomes]
) -> tuple[Sequence[Outcome], str]:
    """Return what became of each chunk; a tier that breaks its word is one that failed."""
    chunks = len(job.source_slots)
    try:
        moved = check_outcomes(await moving, chunks)
    # Nobody cancels a job's task: a cancellation is that of something the tier waited for.
    except (Exception, asyncio.CancelledError, SystemExit) as raised:
        logger.exception("job %d, %s -> %s", job.job_id, job.source, job.destination)
        return [Outcome.FAILED] * chunks, f"{type(raised).__name__}: {raised}"
    return moved.outcomes, moved.error


def tell_of_losses(job: Job, outcomes: Sequence[Outcome], error: str) -> None:
    """Log that chunks failed or are corrupt, if some are, and the key of one of them.

    A failure of a device's job is told, too, though it names no keys; a corrupt slot is not,
    for it was only overwritten, and the worker tells of the request.
    """
    losses = {Outcome.FAILED, Outcome.CORRUPT}
    lost = [key for key, what in zip(job.keys, outcomes, strict=False) if what in losses]
    if lost or Outcome.FAILED in outcomes:
        logger.warning(
            "job %d, %s -> %s: %s%s",
            job.job_id,
            job.source,
            job.destination,
            f"chunk {short_key(lost[0])}, of {len(lost)} lost: " if lost else "",
            error,
        )
