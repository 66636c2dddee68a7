"""The tier that a test makes sick does what the plan says, and says what it did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from kvtier.config import NvmeTierConfig
from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_buffers, make_keys, make_payload, make_sources
from kvtier.tiers.base import TierContext
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from tests.support.faulty_tier import (
    DiskFault,
    FaultPlan,
    FaultyTier,
    FaultyTierConfig,
    Injection,
)

SLOT = 8192
CHUNKS = 12
KEYS = make_keys(range(CHUNKS))
STALL_S = 0.05


class Patient:
    """A faulty tier that holds ``KEYS[i]`` in slot ``i``."""

    def __init__(self, directory: Path, pool: IoPool) -> None:
        self.options = FaultyTierConfig(
            path=directory / "store",
            capacity_bytes=CHUNKS * SLOT,
            plan=directory / "plan.json",
            ledger=directory / "ledger.jsonl",
            stall_s=STALL_S,
        )
        context = TierContext(SLOT, LayoutFingerprint({"model": "m"}), pool)
        self.tier = FaultyTier.open(self.options, context)

    def fall_ill(
        self, fault: DiskFault, one_in: int, on: Literal["read", "write"] = "read"
    ) -> None:
        plan = FaultPlan(name=str(fault), fault=fault, one_in=one_in, on=on)
        self.options.plan.write_text(plan.model_dump_json())

    async def read(self) -> Sequence[Outcome]:
        """Read all chunks in one batch; those that are DONE have their bytes."""
        into = make_buffers(CHUNKS, SLOT)
        moved = await self.tier.read(KEYS, range(CHUNKS), into, purpose=Purpose.LOAD)
        for key, buffer, outcome in zip(KEYS, into, moved.outcomes, strict=True):
            assert (outcome is not Outcome.DONE) or buffer == make_payload(key, SLOT)
        return moved.outcomes

    async def write(self) -> Sequence[Outcome]:
        """Write all chunks in one batch, whose sources stay as they are."""
        sources = make_sources(KEYS, SLOT)
        moved = await self.tier.write(KEYS, range(CHUNKS), sources, purpose=Purpose.STORE)
        assert sources == [make_payload(key, SLOT) for key in KEYS]
        return moved.outcomes

    def ledger(self) -> list[Injection]:
        lines = self.options.ledger.read_text().splitlines()
        return [Injection.model_validate_json(line) for line in lines]


@pytest_asyncio.fixture
async def patient(tmp_path: Path, pool: IoPool) -> AsyncIterator[Patient]:
    patient = await pool.run(lambda: Patient(tmp_path, pool), priority=0)
    assert set(await patient.write()) == {Outcome.DONE}
    yield patient
    await patient.tier.aclose()


@pytest.mark.parametrize(
    ("fault", "outcome"), [(DiskFault.FAIL, Outcome.FAILED), (DiskFault.ROT, Outcome.CORRUPT)]
)
async def test_one_chunk_of_so_many_is_lost_and_written_down(
    patient: Patient, fault: DiskFault, outcome: Outcome
) -> None:
    patient.fall_ill(fault, 4)
    first, second = await patient.read(), await patient.read()
    for outcomes in (first, second):
        assert [outcomes[at : at + 4].count(outcome) for at in (0, 4, 8)] == [1, 1, 1]
        assert outcomes.count(Outcome.DONE) == CHUNKS - 3
    assert patient.ledger() == [Injection(plan=fault, fault=fault, chunks=3)] * 2


async def test_a_batch_that_stalls_takes_its_time_and_then_works(patient: Patient) -> None:
    patient.fall_ill(DiskFault.STALL, CHUNKS)
    began_s = time.monotonic()
    outcomes = await patient.read()
    assert time.monotonic() - began_s >= STALL_S
    assert set(outcomes) == {Outcome.DONE}
    stall = Injection(plan="stall", fault=DiskFault.STALL, chunks=CHUNKS)
    assert patient.ledger() == [stall]


async def test_a_batch_of_writes_that_stalls_takes_its_time_and_then_works(
    patient: Patient,
) -> None:
    patient.fall_ill(DiskFault.STALL, CHUNKS, "write")
    began_s = time.monotonic()
    assert set(await patient.write()) == {Outcome.DONE}
    assert time.monotonic() - began_s >= STALL_S
    stall = Injection(plan="stall", fault=DiskFault.STALL, chunks=CHUNKS)
    assert patient.ledger() == [stall]
    assert set(await patient.read()) == {Outcome.DONE}
    assert patient.ledger() == [stall], "reads are none of its business"


async def test_writes_that_fail_are_misses_and_written_down(patient: Patient) -> None:
    patient.fall_ill(DiskFault.FAIL, 4, "write")
    outcomes = await patient.write()
    # A write fails as a piece, with its neighbours.
    failed = {at for at, outcome in enumerate(outcomes) if outcome is Outcome.FAILED}
    assert failed
    found = await patient.read()
    assert {at for at, what in enumerate(found) if what is Outcome.CORRUPT} == failed
    (injection,) = patient.ledger()
    assert injection.chunks >= 1


async def test_writes_that_rot_are_found_out_by_the_next_read(patient: Patient) -> None:
    patient.fall_ill(DiskFault.ROT, 4, "write")
    assert set(await patient.write()) == {Outcome.DONE}
    outcomes = await patient.read()
    assert [outcomes[at : at + 4].count(Outcome.CORRUPT) for at in (0, 4, 8)] == [1, 1, 1]
    assert patient.ledger() == [Injection(plan="rot", fault=DiskFault.ROT, chunks=3)]


async def test_a_write_that_a_reset_overtakes_fails(patient: Patient) -> None:
    writing = asyncio.ensure_future(patient.write())
    await asyncio.sleep(0)
    await patient.tier.reset()
    assert set(await writing) == {Outcome.FAILED}
    assert set(await patient.read()) == {Outcome.CORRUPT}


async def test_the_medium_itself_is_well(patient: Patient) -> None:
    patient.fall_ill(DiskFault.ROT, 1)
    assert set(await patient.read()) == {Outcome.CORRUPT}
    patient.options.plan.unlink()
    assert set(await patient.read()) == {Outcome.DONE}


def test_a_faulty_tier_takes_only_its_own_options(tmp_path: Path, pool: IoPool) -> None:
    options = NvmeTierConfig(path=tmp_path, capacity_bytes=SLOT)
    context = TierContext(SLOT, LayoutFingerprint({"model": "m"}), pool)
    with pytest.raises(ConfigError, match="takes FaultyTierConfig"):
        FaultyTier.open(options, context)
