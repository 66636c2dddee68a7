"""Threads, clocks and event loops that a test plays, turn by turn, in one thread.

An engine has a thread for its scheduler, one for each transfer engine's loop, and some for
copies. A generator of random numbers chooses which of them runs next, so that every run can be
repeated from its seed. Nothing blocks: a thread that would block lets the others run until its
condition holds, or until its timeout passes on a clock that the test moves.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from kvtier.connector import device, service
from kvtier.memory import HostRegion
from kvtier.memory.control import ControlBlock
from kvtier.memory.copy import BlockCopier
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.os.iopool import IoPool
from kvtier.os.memory import map_shared
from kvtier.transfer import TransferEngine, engine, routes, runner
from kvtier.transfer import device as device_routes
from kvtier.types import JobId

if TYPE_CHECKING:
    import pytest

MOMENTS_S = (0.0005, 0.0005, 0.0005, 0.002, 0.02, 0.3)
"""What may pass before the next one gets on, ..."""
CALM_S = (0.00005,)
"""... and where everything is quick."""
JUMPS, JUMP_S = 0.0005, 120.0
"""How often a machine stands still for as long as nobody waits."""
DEEPEST = 3
LONGEST_HANG_S = 90.0
"""Longer than anybody waits for a copy."""


class Stage:
    """Everybody who may get on next.

    Args:
        seed: Of all that is left to chance.
        calm: Whether everybody is quick and nothing goes wrong.

    Attributes:
        draw: Where chance comes from.
        now_s: What every clock shows.
        actors: What may be called to let somebody go on; each does little, and never waits.
        complaints: What was wrong, for somebody whose errors are taken for something else.
    """

    def __init__(self, seed: int, *, calm: bool) -> None:
        self.draw = random.Random(seed)
        self.calm = calm
        self.now_s = 1000.0
        self.actors: list[Callable[[], None]] = [self._pass_time]
        self.complaints: list[str] = []
        self._depth = 0

    def monotonic(self) -> float:
        return self.now_s

    def act(self) -> None:
        """Let somebody go on."""
        self.draw.choice(self.actors)()
        assert not self.complaints, self.complaints

    def meanwhile(self) -> None:
        """Let others go on, perhaps, in the middle of what somebody does."""
        if self._depth < DEEPEST and self.draw.random() < 0.4:
            self._depth += 1
            for _ in range(self.draw.randint(1, 6)):
                self.act()
            self._depth -= 1

    def wait(self, until: Callable[[], bool], *, timeout_s: float) -> bool:
        """Let others go on until something is so; returns whether it is."""
        deadline_s = self.now_s + timeout_s
        while not until():
            if self.now_s >= deadline_s:
                return False
            self.act()
        return True

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def format_problem(self, what: str) -> None:
        self.complaints.append(what)

    def _pass_time(self) -> None:
        if self.calm:
            self.now_s += self.draw.choice(CALM_S)
        else:
            self.now_s += JUMP_S if self.chance(JUMPS) else self.draw.choice(MOMENTS_S)

    def take_over(self, patch: pytest.MonkeyPatch) -> None:
        """Be the clock and the threads of what is built from now on."""
        for module in (engine, runner, device_routes, service):
            patch.setattr(module, "time", self)
        patch.setattr(routes, "_LEAST_PART_NBYTES", 1)  # so that jobs are read in parts
        patch.setattr(engine, "start_thread", lambda thread: thread.run())
        patch.setattr(device, "TransferEngine", self.make(SteppedEngine))
        patch.setattr(device, "IoPool", self.make(SteppedPool))
        patch.setattr(device, "open_copier", self.make(SlowCopier))

    def make(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Return what builds one of ``kind`` that gets on when it is its turn here."""
        return lambda *args, **kwargs: kind(self, *args, **kwargs)


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop that runs what is ready and does not wait for more."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        super().__init__()

    @override
    def time(self) -> float:
        return self._stage.now_s

    def turn(self) -> None:
        if not is_in_loop():
            self.call_soon(self.stop)
            self.run_forever()


class SteppedEngine(TransferEngine):
    """A transfer engine whose thread gets on when it is its turn."""

    def __init__(self, stage: Stage, *args: Any, **kwargs: Any) -> None:
        self._stage = stage
        super().__init__(*args, **kwargs)

    @override
    def _run(self) -> None:
        self._turns = SteppedLoop(self._stage)
        self._life = self._turns.create_task(self._main())
        while not self._started.is_set():
            self._turns.turn()
        self._stage.actors += [self._turn] * 3

    def _turn(self) -> None:
        if not self._turns.is_closed():
            self._turns.turn()

    @override
    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        def ended() -> bool:
            return self._results.wait(job_ids, timeout_s=0)

        return self._stage.wait(ended, timeout_s=timeout_s)

    @override
    def wait_any(self, *, timeout_s: float) -> bool:
        return self._stage.wait(
            lambda: self._results.wait_any(timeout_s=0), timeout_s=timeout_s
        )

    @override
    def exclusively_each(
        self, actions: Mapping[str, Callable[[], Awaitable[None]]], *, timeout_s: float
    ) -> bool:
        acting = self._runner.exclusively_each(actions)
        future = asyncio.run_coroutine_threadsafe(acting, self._turns)
        if not self._stage.wait(future.done, timeout_s=timeout_s):
            return False
        future.result(0)
        return True

    @override
    def close(self, *, timeout_s: float) -> bool:
        if self._turns.is_closed():
            return True
        drained = self._stage.wait(lambda: self.idle, timeout_s=timeout_s)
        self._closing = True
        self._runner.close()
        ended = self._stage.wait(self._life.done, timeout_s=timeout_s)
        if ended:
            self._life.result()
            self._turns.close()
        return drained and ended


class SteppedPool(IoPool):
    """Threads that make a call when it is their turn, or hang for a while."""

    hanging = 0.0

    def __init__(self, stage: Stage, threads: int, **named: Any) -> None:
        self._stage = stage
        self._most = threads
        self._making = 0
        self._stuck_until_s = 0.0
        super().__init__(threads, **named)
        self.threads = threads
        stage.actors.append(self._make_call)

    @override
    def _start(self, threads: int, name: str) -> None:
        """Start nothing."""

    def _make_call(self) -> None:
        if not self._heap or self._making >= self._most or is_in_loop():
            return
        if self._stage.now_s < self._stuck_until_s:
            return
        if self._stage.chance(self.hanging):
            self._stuck_until_s = self._stage.now_s + LONGEST_HANG_S * self._stage.draw.random()
            return
        call = heapq.heappop(self._heap)
        self._making += 1
        call.round.execute(call.number, call.call)
        self._making -= 1


class SlowCopier(BlockCopier):
    """Copies block by block, and lets others go on in between; may fail.

    As on a GPU, stores and loads have a thread each.
    """

    failing = 0.0
    is_concurrent = True

    def __init__(self, stage: Stage, *args: Any, **named: Any) -> None:
        self._stage = stage
        super().__init__(*args, **named)

    @override
    def store(self, plan: BlockCopyPlan, *, after: Any) -> None:
        for part in self._one_by_one(plan):
            super().store(part, after=after)

    @override
    def load(self, plan: BlockCopyPlan, *, after: Any) -> None:
        for part in self._one_by_one(plan):
            super().load(part, after=after)

    def _one_by_one(self, plan: BlockCopyPlan) -> Iterable[BlockCopyPlan]:
        for copy in plan.groups:
            for at in range(len(copy.blocks)):
                self._stage.meanwhile()
                if self._stage.chance(type(self).failing):
                    raise OSError("a copy that a test lets fail")
                part = copy.part(slice(at, at + 1))
                yield BlockCopyPlan([part], part.slots.tolist())
        self._stage.meanwhile()


class SlowTruth(ControlBlock):
    """What workers say, at which the scheduler looks while others go on."""

    _stage: Stage

    @classmethod
    def beside(cls, region: HostRegion, stage: Stage) -> Self:
        """Return another view of the control block of ``region``."""
        geometry = region.geometry
        mapping = memoryview(map_shared(region.shared.descriptor))
        words = mapping[geometry.shared_nbytes : geometry.nbytes]
        slot_status = cls(words, slots=geometry.slots, ranks=geometry.ranks)
        slot_status._stage = stage
        region.control.release()
        return slot_status

    @override
    def issue(self, slots: Any) -> None:
        self._stage.meanwhile()
        super().issue(slots)

    @override
    def clear_generations(self, slots: Any) -> None:
        self._stage.meanwhile()
        super().clear_generations(slots)
        self._stage.meanwhile()

    @override
    def stored(self, slots: Any, generations: Any) -> list[bool]:
        if not is_in_loop():  # else the transfer engine asks
            self._stage.meanwhile()
        return super().stored(slots, generations)

    @override
    def loaded(self, slots: Any, generations: Any) -> list[bool]:
        self._stage.meanwhile()
        return super().loaded(slots, generations)

    @override
    def all_acknowledged(self, slots: Any) -> list[bool]:
        self._stage.meanwhile()
        return super().all_acknowledged(slots)


def is_in_loop() -> bool:
    """Return whether a callback of an event loop is under way, in which none other can run."""
    return asyncio._get_running_loop() is not None
