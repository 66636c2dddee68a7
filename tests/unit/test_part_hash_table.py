"""Part hashes beside a slab's chunks: kept, void with their chunk, and harmless to others."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.config import NvmeTierConfig
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.part_hashes import PartHashes, StoredPartHashes
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

SLOT, SLOTS, PARTS = 8192, 8, 3
KEYS = make_keys(range(2 * SLOTS))
HASHES: PartHashes = np.random.default_rng(3).integers(1, 1 << 64, (SLOTS, PARTS), np.uint64)


class Slab:
    """A store, and the engine that has it open."""

    def __init__(self, root: Path, pool: IoPool) -> None:
        self.options = NvmeTierConfig(
            path=root / "store", capacity_bytes=SLOTS * SLOT, direct_io="off"
        )
        self.context = TierContext(
            SLOT, LayoutFingerprint({"model": "m"}), pool, hash_parts=PARTS
        )
        namespace = self.context.fingerprint.namespace()
        self.index = root / "store" / namespace / "index.sqlite"

    def start(self, *, parts: int = PARTS) -> tuple[int, StoredPartHashes]:
        """Open the store; return how many chunks and which hashes it has."""
        self.tier = SlabTier.open(self.options, replace(self.context, hash_parts=parts))
        found = self.tier.recovered_part_hashes()
        return len(list(self.tier.recovered())), found

    def stop(self) -> None:
        asyncio.run(self.tier.aclose())

    def put(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        sources = make_sources(keys, SLOT)
        moved = asyncio.run(self.tier.write(keys, slots, sources, purpose=Purpose.DEMOTE))
        assert set(moved.outcomes) == {Outcome.DONE}

    def fill(self) -> None:
        """Store a chunk with hashes in every slot."""
        self.put(KEYS[:SLOTS], range(SLOTS))
        self.tier.keep_part_hashes(range(SLOTS), HASHES)


@pytest.fixture
def slab(tmp_path: Path, pool: IoPool) -> Slab:
    return Slab(tmp_path, pool)


def check(found: StoredPartHashes, slots: Sequence[int]) -> None:
    assert sorted(found.slots.tolist()) == list(slots)
    for slot, hashes in zip(found.slots.tolist(), found.hashes.tolist(), strict=True):
        assert hashes == HASHES[slot].tolist()


def test_hashes_survive_a_restart_with_their_chunks(slab: Slab) -> None:
    slab.start()
    slab.fill()
    slab.stop()
    chunks, found = slab.start()
    assert chunks == SLOTS
    check(found, range(SLOTS))
    assert not slab.tier.recovered_part_hashes().slots.size, "given once"
    slab.stop()


def test_a_new_chunk_in_the_slot_has_no_hashes(slab: Slab) -> None:
    slab.start()
    slab.fill()
    slab.tier.keep_part_hashes([1, 4], HASHES[[1, 4]])  # not committed with the first ones
    slab.put(KEYS[SLOTS : SLOTS + 2], [1, 4])
    slab.stop()
    slab.start()
    slab.put(KEYS[SLOTS + 2 : SLOTS + 3], [6])  # after
    slab.stop()
    chunks, found = slab.start()
    assert chunks == SLOTS
    check(found, [0, 2, 3, 5, 7])
    slab.stop()


def test_the_same_chunk_stored_again_has_no_hashes_until_it_gets_new_ones(slab: Slab) -> None:
    slab.start()
    slab.fill()
    slab.put(KEYS[:2], [0, 1])
    slab.tier.keep_part_hashes([1], HASHES[1:2])
    slab.stop()
    _, found = slab.start()
    check(found, range(1, SLOTS))
    slab.stop()


def test_a_forgotten_chunk_leaves_no_hashes(slab: Slab) -> None:
    slab.start()
    slab.fill()
    slab.tier.forget([2, 3])
    slab.tier.keep_part_hashes([3], HASHES[3:4])
    slab.stop()
    chunks, found = slab.start()
    assert chunks == SLOTS - 2
    check(found, [0, 1, 4, 5, 6, 7])
    slab.stop()


def test_after_a_reset_no_new_chunk_finds_old_hashes(slab: Slab) -> None:
    slab.options = slab.options.model_copy(update={"keep_after_reset": True})
    slab.start()
    slab.fill()
    slab.stop()
    slab.start()
    asyncio.run(slab.tier.reset())
    slab.stop()
    slab.start()  # its logical clock begins anew
    slab.put(KEYS[:SLOTS], range(SLOTS))
    slab.stop()
    chunks, found = slab.start()
    assert chunks == SLOTS
    check(found, [])
    slab.stop()


def test_another_number_of_ranks_finds_none_and_may_keep_its_own(slab: Slab) -> None:
    slab.start()
    slab.fill()
    slab.stop()
    chunks, found = slab.start(parts=2)
    assert (chunks, found.hashes.shape) == (SLOTS, (0, 2))
    slab.tier.keep_part_hashes([5], HASHES[5:6, :2])
    slab.stop()
    _, found = slab.start()
    check(found, [0, 1, 2, 3, 4, 6, 7])
    slab.stop()


def test_engines_without_gds_reads_neither_make_nor_mind_the_table(slab: Slab) -> None:
    slab.start(parts=0)
    slab.fill()
    slab.stop()
    connection = sqlite3.connect(slab.index)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "part_hashes" not in tables
    _, found = slab.start()
    check(found, [])
    slab.tier.keep_part_hashes([0, 1], HASHES[:2])
    slab.stop()
    chunks, _ = slab.start(parts=0)
    assert chunks == SLOTS
    slab.put(KEYS[SLOTS : SLOTS + 1], [0])
    slab.stop()
    _, found = slab.start()
    check(found, [1])
    slab.stop()


def test_the_slot_file_is_named_with_its_identity(slab: Slab) -> None:
    slab.start()
    file = slab.tier.slot_file
    status = Path(file.path).stat()
    assert (file.device, file.inode) == (status.st_dev, status.st_ino)
    assert status.st_size == SLOTS * SLOT
    slab.stop()
