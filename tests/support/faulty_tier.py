"""An NVMe tier with a faulty disk, for tests with real engines.

:class:`FaultyTier` is the NVMe tier over system calls that fail, hang or flip bits for some
chunks. Everything else, checksums and index included, is production code. The tier reads a plan
file before each batch, so that a test controls a tier in any process while the engine runs. It
appends every injected fault to a ledger before it answers the batch; tests compare the engine's
counters with the ledger.

Of ``one_in`` consecutive chunks exactly one, at a random place, is affected.

The tier is no built-in kind. :func:`install` provides it to a process and its children.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.block_io import BlockIo, aligned_buffer
from kvtier.tiers.base import SlotOutcomes, TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import Outcome, Purpose

__all__ = ["DiskFault", "FaultPlan", "FaultyTier", "FaultyTierConfig", "Injection", "install"]

_ROTTEN_BYTE: Final = 100
"""Byte of a slot that is flipped."""
_ENTRY_POINTS: Final = f"[kvtier.tiers]\nfaulty = {__name__}:FaultyTier\n"
_METADATA: Final = "Metadata-Version: 2.1\nName: kvtier-faulty\nVersion: 1.0\n"


class DiskFault(StrEnum):
    """A fault of the read or write of a chunk."""

    FAIL = "fail"
    """The system call fails with EIO."""
    STALL = "stall"
    """It delays the whole batch by ``stall_s`` and then works."""
    ROT = "rot"
    """One bit is flipped."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FaultPlan(_Value):
    """A fault of the disk and how often it happens."""

    name: str
    """Name in the ledger."""
    fault: DiskFault
    one_in: int = Field(ge=1)
    """One of so many chunks is affected."""
    on: Literal["read", "write"] = "read"
    """Direction of the transfer."""


class Injection(_Value):
    """Faults of one batch: a line of the ledger."""

    plan: str
    fault: DiskFault
    chunks: int
    """Affected chunks; for a stall, the whole batch."""


class FaultyTierConfig(NvmeTierConfig):
    """The NVMe tier's section, with the files of the fault plan."""

    kind: str = "faulty"
    plan: Path
    """File of the :class:`FaultPlan`; without it there are no faults."""
    ledger: Path
    """File that each :class:`Injection` is appended to."""
    stall_s: float = 1.0
    """Duration of a stall."""
    seed: int = 0
    """Seed of the random choice of chunks."""


@dataclass(slots=True)
class _Illness:
    """A fault of some slots during a batch, and the slots that it affected."""

    fault: DiskFault
    struck: set[int] = field(default_factory=set)


class _SickDisk(BlockIo):
    """System calls that inject faults into chosen slots."""

    def __init__(self, slot_nbytes: int, *, stall_s: float) -> None:
        self._slot_nbytes = slot_nbytes
        self._stall_s = stall_s
        self._ill: dict[int, _Illness] = {}

    @contextmanager
    def ill(self, slots: Sequence[int], fault: DiskFault) -> Iterator[_Illness]:
        """Inject ``fault`` into transfers of ``slots`` inside the ``with`` block."""
        illness = _Illness(fault)
        self._ill |= dict.fromkeys(slots, illness)
        try:
            yield illness
        finally:
            for slot in slots:
                del self._ill[slot]

    @override
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        rotten = self._suffer(offset, sum(map(len, buffers)))
        moved = super().preadv(fd, buffers, offset)
        for at in rotten:
            _flip(buffers, at)
        return moved

    @override
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        rotten = self._suffer(offset, sum(map(len, buffers)))
        if rotten:
            # What was to be written is the caller's, and stays as it is.
            buffers = [_copy(buffer) for buffer in buffers]
        for at in rotten:
            _flip(buffers, at)
        return super().pwritev(fd, buffers, offset)

    def _suffer(self, offset: int, nbytes: int) -> list[int]:
        """Fail or stall if these bytes are affected, and return the bytes to flip.

        Counted from ``offset`` on.
        """
        size = self._slot_nbytes
        slots = range(offset // size, -(-(offset + nbytes) // size))
        found = {slot: illness for slot in slots if (illness := self._ill.get(slot))}
        for slot, illness in found.items():
            illness.struck.add(slot)
        faults = {illness.fault for illness in found.values()}
        if DiskFault.STALL in faults:
            threading.Event().wait(self._stall_s)
        if DiskFault.FAIL in faults:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return [
            slot * size + _ROTTEN_BYTE - offset
            for slot, illness in found.items()
            if illness.fault is DiskFault.ROT
        ]


class _Draws:
    """Picks one of every ``one_in`` slots."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._plan: FaultPlan | None = None
        self._at = 0
        self._hit = 0

    def hit(self, plan: FaultPlan, slots: Sequence[int]) -> list[int]:
        """Return the ``slots`` that ``plan`` affects."""
        if plan != self._plan:
            self._plan, self._at = plan, 0
        return [slot for slot in slots if self._hits(plan.one_in)]

    def _hits(self, one_in: int) -> bool:
        if not self._at:
            self._hit = self._draw.randrange(one_in)
        hits = self._at == self._hit
        self._at = (self._at + 1) % one_in
        return hits


class FaultyTier(SlabTier):
    """An NVMe tier with faults on request."""

    Options: ClassVar[type[TierConfig]] = FaultyTierConfig

    _disk: _SickDisk
    _draws: _Draws
    _sick_options: FaultyTierConfig

    @classmethod
    @override
    def open(
        cls, options: TierConfig, context: TierContext, *, io: BlockIo | None = None
    ) -> Self:
        """See :meth:`SlabTier.open`; ``io`` must be left out.

        Raises:
            ConfigError: These are not options of this tier.
        """
        if not isinstance(options, FaultyTierConfig) or io is not None:
            raise ConfigError(f"{cls.__name__} takes FaultyTierConfig and its own system calls")
        disk = _SickDisk(context.slot_nbytes, stall_s=options.stall_s)
        tier = super().open(options, context, io=disk)
        tier._disk = disk
        tier._draws = _Draws(options.seed)
        tier._sick_options = options
        return tier

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        plan = await self._plan("read", purpose)
        moving = super().read(keys, slots, into, purpose=purpose)
        return await self._suffer(plan, slots, moving, purpose)

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        epoch = self._epoch
        plan = await self._plan("write", purpose)
        if epoch != self._epoch:
            return SlotOutcomes((Outcome.FAILED,) * len(keys), "the tier was reset meanwhile")
        moving = super().write(keys, slots, sources, purpose=purpose)
        return await self._suffer(plan, slots, moving, purpose)

    async def _plan(self, on: str, purpose: Purpose) -> FaultPlan | None:
        """Return the plan for this direction, if there is one."""
        plan = await self._pool.run(self._read_plan, priority=int(purpose))
        return plan if plan is not None and plan.on == on else None

    async def _suffer(
        self,
        plan: FaultPlan | None,
        slots: Sequence[int],
        moving: Awaitable[SlotOutcomes],
        purpose: Purpose,
    ) -> SlotOutcomes:
        """Move a batch under ``plan`` and record the injected faults."""
        hit = [] if plan is None else self._draws.hit(plan, slots)
        if plan is None or not hit:
            return await moving
        with self._disk.ill(hit, plan.fault) as illness:
            moved = await moving
        if illness.struck:
            whole = plan.fault is DiskFault.STALL
            chunks = len(slots) if whole else len(illness.struck)
            injection = Injection(plan=plan.name, fault=plan.fault, chunks=chunks)
            await self._pool.run(lambda: self._note(injection), priority=int(purpose))
        return moved

    def _read_plan(self) -> FaultPlan | None:
        try:
            return FaultPlan.model_validate_json(self._sick_options.plan.read_bytes())
        except FileNotFoundError:
            return None

    def _note(self, injection: Injection) -> None:
        with self._sick_options.ledger.open("a") as ledger:
            ledger.write(injection.model_dump_json() + "\n")


def install(directory: Path) -> None:
    """Write a package to ``directory`` that provides the tier kind ``faulty``."""
    metadata = directory / "kvtier_faulty-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)


def _copy(buffer: memoryview) -> memoryview:
    copy = aligned_buffer(len(buffer))
    copy[:] = buffer
    return copy


def _flip(buffers: Sequence[memoryview], at: int) -> None:
    """Flip a bit of byte ``at`` of the concatenated ``buffers``."""
    for buffer in buffers:
        if 0 <= at < len(buffer):
            buffer[at] ^= 4
        at -= len(buffer)
