"""Makes a store look as if an engine had used it for weeks."""

from __future__ import annotations

import random

from tests.bench.nvme.passes import TransferSpec
from tests.bench.nvme.workload import Request

__all__ = ["age"]

_REFILLS = 5
_PARTS = 8
_SEED = 20


def age(spec: TransferSpec) -> None:
    """Fill the store, replace all of it five times, and fill it with ``spec``'s generation.

    The replacements are requests of random lengths. Between them requests at random are used
    again, so those evicted next lie anywhere and are of any length, and so are the holes that
    the last generation has to fit into.
    """
    from tests.bench.nvme.sides import opened  # noqa: PLC0415 - imports vLLM

    draw = random.Random(_SEED)
    there: list[Request] = spec.workload.generation(-1)
    with opened(spec) as loop:
        loop.store(there)
        for refill in range(_REFILLS):
            new = spec.workload.ragged_generation(-2 - refill, draw)
            for part in range(_PARTS):
                loop.load(draw.sample(there, max(len(there) // (2 * _PARTS), 1)))
                loop.store(new[part::_PARTS])
            there = new
        loop.store(spec.workload.generation(spec.generation))
