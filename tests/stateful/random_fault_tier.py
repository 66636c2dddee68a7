"""A storage tier whose every move takes as long as chance says, and may fail in any way.

It checks on every read what it was given with the write, as the real one does; it moves chunks
half by half while others go on; and it complains of whoever breaks the rules of
:class:`kvtier.tiers.base.StorageTier`: of two batches that touch a slot or a buffer, of what is
forgotten while it is written, and of a reset while anything moves.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import xxhash
from typing_extensions import override

from kvtier.config import TierConfig
from kvtier.keys import ChunkKey
from kvtier.os.iopool import UncancellableFuture, wait_uncancelled
from kvtier.tiers.base import SlotOutcomes, StorageTier, TierContext
from kvtier.types import Outcome, Purpose
from tests.stateful.stepping import Stage

FAILS, ROTS, HANGS, DIES = 0.03, 0.02, 0.03, 0.002
LONGEST_HANG_S = 40.0


@dataclass(eq=False, slots=True)
class Move:
    """One chunk on its way in or out.

    Attributes:
        key: The chunk's key.
        slot: Where it is in the tier.
        view: Where it is in memory.
        payload: Its bytes on the medium, as far as they are there.
        digest: What they should hash to.
        steps: How many of its steps were done.
        stuck_until_s: When it gets on again.
        outcome: How it ended.
    """

    key: ChunkKey
    slot: int
    view: memoryview
    payload: bytearray
    digest: int
    steps: int = 0
    stuck_until_s: float = 0.0
    outcome: Outcome | None = None

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))


@dataclass(eq=False, slots=True)
class Batch:
    """Chunks that are answered for together."""

    moves: list[Move]
    writes: bool
    answer: UncancellableFuture[SlotOutcomes]
    dying: bool = False


class RandomFaultTier(StorageTier):
    """A medium of a few slots.

    Args:
        stage: Says whose turn it is.
        name: The tier's name.
        slots: Its slots.
        slot_nbytes: Bytes of each.

    Attributes:
        held: Key, bytes and checksum of what each slot holds.
        faulty: Whether anything fails, hangs or dies.
    """

    Options: ClassVar[type[TierConfig]] = TierConfig

    def __init__(self, stage: Stage, name: str, slots: int, slot_nbytes: int) -> None:
        self.name = name
        self.capacity_slots = slots
        self.slot_nbytes = slot_nbytes
        self.held: dict[int, tuple[ChunkKey, bytes, int]] = {}
        self.faulty = not stage.calm
        self._stage = stage
        self._batches: list[Batch] = []
        self._resets: list[UncancellableFuture[None]] = []
        stage.actors += [self._go_on] * 4

    @classmethod
    @override
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        raise NotImplementedError

    @override
    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        return iter([(key, slot) for slot, (key, _, _) in self.held.items()])

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        moves = [
            Move(key, slot, view, bytearray(len(view)), digest(key, view))
            for key, slot, view in zip(keys, slots, sources, strict=True)
        ]
        for slot in slots:
            self.held.pop(slot, None)
        return await self._begin(moves, writes=True)

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        moves = []
        for key, slot, view in zip(keys, slots, into, strict=True):
            held_key, payload, wanted = self.held.get(slot, (b"", b"", 0))
            move = Move(key, slot, view, bytearray(payload), wanted)
            if held_key != key:
                move.outcome = Outcome.CORRUPT
            moves.append(move)
        return await self._begin(moves, writes=False)

    @override
    def forget(self, slots: Sequence[int]) -> None:
        for batch in self._batches:
            if batch.writes and not set(slots).isdisjoint(move.slot for move in batch.moves):
                self._stage.format_problem(
                    f"slots {slots} are forgotten while they are written"
                )
        for slot in slots:
            self.held.pop(slot, None)

    @override
    def touch(self, slots: Sequence[int]) -> None:
        """Keep no order."""

    @override
    async def reset(self) -> None:
        if self._batches:
            self._stage.format_problem("a tier is reset while chunks move")
        answer: UncancellableFuture[None] = UncancellableFuture(loop=asyncio.get_running_loop())
        self._resets.append(answer)
        await wait_uncancelled(answer)

    @override
    async def aclose(self) -> None:
        if self._batches:
            self._stage.format_problem("a tier is closed while chunks move")

    def calm_down(self) -> None:
        """Let nothing go wrong any more, and nothing hang."""
        self.faulty = False
        for batch in self._batches:
            for move in batch.moves:
                move.stuck_until_s = 0.0

    async def _begin(self, moves: list[Move], *, writes: bool) -> SlotOutcomes:
        self._watch(moves, writes=writes)
        batch = Batch(moves, writes, UncancellableFuture(loop=asyncio.get_running_loop()))
        self._batches.append(batch)
        for move in moves:
            if self.faulty and self._stage.chance(HANGS):
                hang_s = LONGEST_HANG_S * self._stage.draw.random() ** 3
                move.stuck_until_s = self._stage.now_s + hang_s
        return await wait_uncancelled(batch.answer)

    def _watch(self, moves: Sequence[Move], *, writes: bool) -> None:
        """Complain of moves that another batch does not go well with."""
        for batch in self._batches:
            for other in batch.moves:
                for move in moves:
                    if move.slot == other.slot and (writes or batch.writes):
                        self._stage.format_problem(f"two batches touch slot {move.slot}")
                    if move.address == other.address and not (writes and batch.writes):
                        self._stage.format_problem("two batches touch a buffer")

    def _go_on(self) -> None:
        """Do a little of what is to be done."""
        if self._resets and self._stage.chance(0.1):
            self.held.clear()
            self._resets.pop().set_result(None)
        if not self._batches:
            return
        if self.faulty and self._stage.chance(DIES):
            for batch in self._batches:
                batch.dying = True
        dying = [batch for batch in self._batches if batch.dying]
        batch = self._stage.draw.choice(dying or self._batches)
        if batch.dying and self._stage.chance(0.2):  # its process has ended
            self._end(batch, [Outcome.FAILED] * len(batch.moves), "its process ended")
            return
        self._move(batch)

    def _move(self, batch: Batch) -> None:
        """Move some bytes of ``batch``, and answer for it when all are moved."""
        now_s = self._stage.now_s
        able = [
            each for each in batch.moves if not each.outcome and each.stuck_until_s <= now_s
        ]
        if able:
            self._step(self._stage.draw.choice(able), writes=batch.writes)
        outcomes = [each.outcome for each in batch.moves if each.outcome]
        if len(outcomes) < len(batch.moves) or batch.dying:
            return
        if batch.writes:
            for move in batch.moves:
                if move.outcome is Outcome.DONE:
                    self.held[move.slot] = (move.key, bytes(move.payload), move.digest)
        self._end(batch, outcomes, "" if set(outcomes) == {Outcome.DONE} else "random fault")

    def _end(self, batch: Batch, outcomes: Sequence[Outcome], error: str) -> None:
        self._batches.remove(batch)
        batch.answer.set_result(SlotOutcomes(outcomes, error))

    def _step(self, move: Move, *, writes: bool) -> None:
        half = len(move.view) // 2
        part = slice(0, half) if not move.steps else slice(half, None)
        if move.steps < 2:
            target, source = (move.payload, move.view) if writes else (move.view, move.payload)
            target[part] = source[part]
            if self.faulty and self._stage.chance(ROTS / 2):
                target[part.start] ^= 4
            if self.faulty and self._stage.chance(FAILS / 2):
                move.outcome = Outcome.FAILED
        elif writes:
            move.outcome = Outcome.DONE
        else:
            right = digest(move.key, move.view) == move.digest
            move.outcome = Outcome.DONE if right else Outcome.CORRUPT
        move.steps += 1


def digest(key: ChunkKey, payload: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key))
