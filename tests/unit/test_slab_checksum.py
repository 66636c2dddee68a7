"""Checksums of slots: the same whatever slices they are computed in."""

from __future__ import annotations

import random

import pytest
import xxhash

from kvtier.tiers.slab.checksum import select_digest

EDGES = (
    4096,
    64 << 10,
    128 << 10,
    (256 << 10) - 1,
    256 << 10,
    1 << 20,
    (1 << 20) + 4096,
    9 << 20,
)


@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize("alone", [True, False])
def test_slices_do_not_change_what_a_store_already_holds(nbytes: int, *, alone: bool) -> None:
    payload = memoryview(random.Random(nbytes).randbytes(nbytes))
    seed = 2**64 - nbytes
    whole = xxhash.xxh3_64_intdigest(payload, seed=seed)
    assert select_digest("xxh3", alone=alone)(payload, seed) == whole


def test_a_checksum_that_is_off_says_nothing() -> None:
    assert select_digest("off", alone=True)(memoryview(b"bytes"), 7) == 0
