"""Cost models, and the measurements they are given."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.manager import CostModel, LoadChoice
from kvtier.types import Outcome, TransferResult

CHUNK = 1 << 20
TOKENS = 16
US_PER_TOKEN = 100e-6
CHUNK_S = TOKENS * US_PER_TOKEN
"""What computing a chunk takes: a tier is as fast as computing at 655 MB/s."""


def cost_model(*, recompute_s: float | None = US_PER_TOKEN) -> CostModel:
    return CostModel(
        tiers=3,
        chunk_nbytes=CHUNK,
        chunk_tokens=TOKENS,
        recompute_s_per_token=recompute_s,
    )


def measure(
    gate: CostModel, tier: int, chunks: int, seconds: float, *, now: float = 0.0, job: int = 1
) -> None:
    """Let a load of ``chunks`` chunks take ``seconds``, a third of it in the queue."""
    gate.record_job(job, tier, chunks)
    result = TransferResult(
        job, [Outcome.DONE] * chunks, queued_s=seconds / 3, seconds=seconds * 2 / 3
    )
    gate.record_result(result, timeout_s=10.0, now=now)


def expire(
    gate: CostModel, job: int, chunks: int, *, ran: bool = True, now: float = 0.0
) -> None:
    """Let a load that was sent reach its deadline of ten seconds, running or in the queue."""
    late = TransferResult(job, [Outcome.EXPIRED] * chunks, settled=not ran)
    gate.record_result(late, timeout_s=10.0, now=now)


def kept(gate: CostModel, sources: Sequence[int], *, groups: int = 1, now: float = 0.0) -> int:
    choice = gate.choose(sources, counted=len(sources) // groups, now=now)
    return len(sources) if choice is None else choice.kept


def choice_of(gate: CostModel, sources: Sequence[int]) -> LoadChoice:
    choice = gate.choose(sources, counted=len(sources), now=0.0)
    assert choice is not None
    return choice
