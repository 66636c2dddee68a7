"""Part hashes and the slot file of a tier in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from kvtier.config import NvmeTierConfig
from kvtier.testing.tier_harness import Arena, TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.types import Outcome


async def test_hashes_go_to_the_process_and_come_back_after_a_restart(
    options: NvmeTierConfig, context: TierContext, arena: Arena
) -> None:
    context = replace(context, hash_parts=2)
    harness = TierHarness(lambda: HostedTier.open(options, context), context.pool, arena)
    await harness.open()
    hashes = np.array([[1, 1 << 63], [5, 6]], np.uint64)
    keys = make_keys(range(2))
    assert await harness.put(keys, [3, 1]) == [Outcome.DONE] * 2
    harness.tier.keep_part_hashes([3, 1], hashes)
    file = harness.tier.slot_file
    assert file is not None
    assert os.stat(file.path).st_ino == file.inode  # noqa: PTH116 - a local disk
    await harness.tier.aclose()
    await harness.open()
    found = harness.tier.recovered_part_hashes()
    rows = dict(zip(found.slots.tolist(), found.hashes.tolist(), strict=True))
    assert rows == {3: [1, 1 << 63], 1: [5, 6]}
    assert harness.tier.slot_file == file
    assert not harness.tier.recovered_part_hashes().slots.size
    await harness.tier.aclose()
