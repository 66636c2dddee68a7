"""``kvtier cache explain FILE KEY``: a chunk in a shared tier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtier.cli._cache_shared import explain_shared
from kvtier.config import SharedTierConfig, load_config
from kvtier.errors import TierUnavailableError
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_buffers
from kvtier.tiers.base import TierContext
from kvtier.tiers.registry import open_tier
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from tests.support.memory_shared_tier import MemoryService
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import FIELDS, KEYS, Store


@pytest.fixture
def file(tmp_path: Path, store: Store) -> Path:
    """A configuration with a local tier and a shared one, which has chunk 3."""
    text = (
        "tiers:\n- {kind: ram, capacity: 1MiB}\n"
        f"- {{kind: nvme, path: {store.root}, capacity: 1MiB}}\n"
        f"- {{kind: shared_dir, path: {tmp_path / 'shared'}, capacity: 64MiB}}\n"
    )
    path = tmp_path / "kvtier.yaml"
    path.write_text(text)
    store.start()
    store.fill()
    slot_nbytes, fingerprint = store.tier.slot_nbytes, LayoutFingerprint(FIELDS)
    store.stop()
    options = load_config(path).tiers[-1]
    assert isinstance(options, SharedTierConfig)
    pool = IoPool(1, name="kvtier-test")
    context = TierContext(slot_nbytes=slot_nbytes, fingerprint=fingerprint, pool=pool)
    tier = open_tier(options, context)

    async def put() -> None:
        sources = make_buffers(1, slot_nbytes)
        moved = await tier.write([KEYS[3]], [0], sources, purpose=Purpose.DEMOTE)
        assert moved.outcomes == [Outcome.DONE]
        await tier.aclose()

    asyncio.run(put())
    assert pool.close(timeout_s=10)
    return path


def test_explain_says_that_a_shared_tier_has_a_whole_chunk(shell: Shell, file: Path) -> None:
    text = flat(shell("explain", file, KEYS[3].hex()).out)
    assert text.startswith(KEYS[3].hex())
    assert "tier shared_dir shared_dir" in text
    assert "stored yes whole yes answered in" in text
    (answer,) = shell.json("explain", file, KEYS[3].hex())["answers"]
    assert (answer["is_stored"], answer["is_whole"]) == (True, True)


def test_explain_says_that_a_chunk_is_damaged(shell: Shell, file: Path, tmp_path: Path) -> None:
    (value,) = (tmp_path / "shared").rglob("*.kv")
    data = bytearray(value.read_bytes())
    data[100] ^= 1
    value.write_bytes(data)
    assert "whole no" in flat(shell("explain", file, KEYS[3].hex()).out)


def test_explain_says_that_a_shared_tier_lacks_a_chunk(shell: Shell, file: Path) -> None:
    ran = shell("explain", file, KEYS[4].hex())
    assert ran.code == 1
    assert "stored no: never stored, or evicted by the service" in flat(ran.out)


def test_a_namespace_without_a_local_tier_is_asked_for_by_its_name(
    shell: Shell, file: Path, tmp_path: Path
) -> None:
    (slots,) = tmp_path.rglob("slots.bin")
    name = slots.parent.name
    alone = tmp_path / "alone.yaml"
    lines = file.read_text().splitlines()
    alone.write_text("\n".join([*lines[:2], lines[3]]))
    assert "--namespace" in shell("explain", alone, KEYS[3].hex()).err
    text = flat(shell("explain", alone, KEYS[3].hex(), "--namespace", name).out)
    assert "stored yes answered in" in text


def test_a_service_that_hangs_is_given_up(tmp_path: Path) -> None:
    service = MemoryService.named("hanging")
    service.hang()
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "tiers:\n- {kind: ram, capacity: 1MiB}\n"
        "- {kind: tests.support.memory_shared_tier:MemorySharedTier, service: hanging}\n"
    )
    try:
        with pytest.raises(TierUnavailableError, match=r"no answer for 0\.2 s"):
            explain_shared(file, KEYS[3].hex(), "space", timeout_s=0.2)
    finally:
        service.release()


@pytest.mark.parametrize(
    ("key", "problem"),
    [("00010203ab", "only the beginning of a key"), ("xyz", "not a whole key")],
)
def test_a_key_that_is_not_whole_is_refused(
    shell: Shell, file: Path, key: str, problem: str
) -> None:
    ran = shell("explain", file, key)
    assert ran.code == 2
    assert problem in flat(ran.err)


def test_a_file_without_a_shared_tier_is_refused(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers:\n- {kind: ram, capacity: 1MiB}\n")
    ran = shell("explain", file, KEYS[3].hex())
    assert ran.code == 2
    assert "no shared tier" in flat(ran.err)
