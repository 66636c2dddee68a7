"""Tiers without time: one reference after the other, each job over as soon as it is made.

That is the model of the reference figures, in which a two-level cache is a state machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager import Prompt, TieredOffloadingManager
from kvtier.types import Outcome, TransferResult

__all__ = ["replay_references"]


def replay_references(references: Iterable[ChunkKey], manager: TieredOffloadingManager) -> None:
    """Take every reference as a request of its own, whose storage jobs end at once.

    Args:
        references: Chunks, in the order they are asked for.
        manager: The manager; the counters of its tiers say what happened.
    """
    for number, key in enumerate(references):
        _reference(manager, key, str(number), float(number))


def _reference(
    manager: TieredOffloadingManager, key: ChunkKey, req_id: str, now_s: float
) -> None:
    prompt = Prompt(((key,),), local_tokens=0, limit_tokens=1)
    hits = manager.lookup(req_id, prompt)
    while hits is None:
        _settle(manager, (), now_s)
        hits = manager.lookup(req_id, prompt)
    if hits:
        manager.prepare_load((key,), req_id)
        manager.complete_load(req_id)
    else:
        plan = manager.prepare_store((key,), req_id)
        if plan is not None and plan.keys:
            manager.complete_store(plan.keys)
    manager.end_request(req_id)
    _settle(manager, (req_id,), now_s)


def _settle(manager: TieredOffloadingManager, started: Sequence[str], now_s: float) -> None:
    """End the step, and run jobs at once until they lead to no more."""
    manager.end_step(started=started, now=now_s)
    while jobs := manager.take_jobs():
        for job in jobs:
            manager.apply(TransferResult(job.job_id, [Outcome.DONE] * len(job.keys)))
        manager.end_step(now=now_s)
