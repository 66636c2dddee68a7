"""An engine's scheduler, reduced to what it asks of a manager.

One loop drives both peers, with the calls and the order of calls of vLLM's scheduler: every
waiting request is looked up at every step until its lookup is no longer deferred, by vLLM's
manager chunk by chunk and by kvtier in one call; ``on_schedule_end`` comes after the lookups
and before the stores; ``complete_*`` come after the workers' turn; events and statistics are
taken at every step; and a step in which no model runs ends with a sleep of 1 ms.

That sleep is also the measure of jitter. It is where a real engine loop gives up the
interpreter lock, and how much longer than 1 ms it takes to come back is what I/O threads cost
that loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

from kvtier.keys import ChunkKey
from tests.bench.nvme.measures import Pass, cpu_s
from tests.bench.nvme.workload import Request, Workload

__all__ = ["EngineLoop", "Moved", "Side", "WrongBytesError", "make_context"]

TICK_S = 0.001
STALLED_S = 120.0


class WrongBytesError(Exception):
    """A chunk was called a hit and its slot holds something else."""


class StalledError(Exception):
    """Nothing has moved for a long time."""


@dataclass(slots=True)
class Moved:
    """Bytes a side has moved since it was opened.

    Attributes:
        down: Bytes that reached the disk and are readable there.
        up: Bytes that came from the disk and are hits in RAM.
    """

    down: int = 0
    up: int = 0


class Side(Protocol):
    """One peer: a manager, and the workers' part in its RAM."""

    manager: Any
    """A vLLM ``OffloadingManager``, or what has the methods that are called of one."""
    ram_share_for_waiting: float
    """Share of RAM that chunks of waiting requests may hold."""

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None:
        """Return how many leading ``keys`` are hits, or None when the answer is deferred."""

    def deposit(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Do what workers do for a store: fill the slots, and say so."""

    def collect(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Do what workers do for a load.

        Raises:
            WrongBytesError: A slot holds another chunk.
        """

    def moved(self, stats: Any) -> Moved:
        """Return what was moved so far, given the manager's statistics of this step."""

    def close(self) -> None:
        """Close everything; idempotent."""


class EngineLoop:
    """Drives one side's manager.

    Args:
        side: The peer.
        workload: Sizes.
    """

    def __init__(self, side: Side, workload: Workload) -> None:
        self._side = side
        self._manager = side.manager
        self._workload = workload
        self._moved = Moved()
        self._pass = Pass()
        self._progress_s = 0.0

    def store(self, requests: Sequence[Request]) -> Pass:
        """Store ``requests`` in order and wait until all of them are on the disk.

        As many are under way as RAM holds. More are not offered: what a manager drops when the
        engine is faster than the disk is a policy and not a speed.
        """
        offered = 0
        waiting = deque(requests)
        contexts: dict[str, Any] = {}
        began = self._begin()
        while True:
            self._end_step(())
            stored: list[tuple[Any, set[ChunkKey]]] = []
            while waiting and offered - self._moved.down <= self._limit_nbytes(waiting[0]):
                request = waiting[0]
                context = contexts.get(request.req_id) or self._context(request)
                contexts[request.req_id] = context
                plan = self._manager.prepare_store(list(request.keys), context)
                if plan is None:
                    break
                waiting.popleft()
                self._side.deposit(plan.store_spec, plan.keys_to_store)
                offered += len(plan.keys_to_store) * self._workload.chunk_nbytes
                self._pass.missed_chunks += len(request.keys) - len(plan.keys_to_store)
                stored.append((context, set(plan.keys_to_store)))
            self._tick()
            for context, keys in stored:
                if keys:
                    self._manager.complete_store(keys, context)
                self._manager.on_request_finished(context)
            if not (waiting or stored or self._manager.has_pending_work()):
                break
        return self._end(began, upwards=False)

    def load(self, requests: Sequence[Request]) -> Pass:
        """Load ``requests``, as many waiting at once as the side takes at once.

        More would only wait in line, and kvtier sends who waits for 256 steps away; an engine
        that runs no model makes 256 steps in a third of a second.
        """
        window = self._workload.window(self._side.ram_share_for_waiting)
        waiting = deque(requests)
        asking: dict[str, tuple[Request, Any]] = {}
        began = self._begin()
        while waiting or asking or self._manager.has_pending_work():
            while waiting and len(asking) < window:
                request = waiting.popleft()
                asking[request.req_id] = request, self._context(request)
            started, loads = self._ask(asking)
            self._end_step(started)
            for _, keys, spec in loads:
                self._side.collect(spec, keys)
            self._tick()
            for context, keys, _ in loads:
                if keys:
                    self._manager.complete_load(set(keys), context)
                self._manager.on_request_finished(context)
        return self._end(began, upwards=True)

    def _ask(
        self, asking: dict[str, tuple[Request, Any]]
    ) -> tuple[list[str], list[tuple[Any, Sequence[ChunkKey], Any]]]:
        """Look up every waiting request; take those whose answer is not deferred."""
        started: list[str] = []
        loads: list[tuple[Any, Sequence[ChunkKey], Any]] = []
        for request, context in list(asking.values()):
            hits = self._side.look_up(request.keys, context)
            if hits is None:
                continue
            del asking[request.req_id]
            started.append(request.req_id)
            keys = request.keys[:hits]
            self._pass.missed_chunks += len(request.keys) - hits
            spec = self._manager.prepare_load(list(keys), context) if hits else None
            loads.append((context, keys, spec))
        return started, loads

    def _context(self, request: Request) -> Any:
        context = make_context(request)
        self._manager.on_new_request(context)
        return context

    def _limit_nbytes(self, request: Request) -> int:
        return self._workload.ram_nbytes - len(request.keys) * self._workload.chunk_nbytes

    def _end_step(self, started: Sequence[str]) -> None:
        self._manager.on_schedule_end(ScheduleEndContext(started, ()))
        for _ in self._manager.take_events():
            pass
        moved = self._side.moved(self._manager.get_stats())
        now = time.monotonic()
        if (moved.up, moved.down) != (self._moved.up, self._moved.down):
            self._progress_s = now
        elif now - self._progress_s > STALLED_S:
            raise StalledError(f"nothing was moved for {STALLED_S:.0f} s")
        self._moved = moved

    def _tick(self) -> None:
        began_s = time.perf_counter()
        time.sleep(TICK_S)
        self._pass.delays_s.append(time.perf_counter() - began_s - TICK_S)

    def _begin(self) -> tuple[float, float, Moved]:
        self._pass = Pass()
        self._progress_s = time.monotonic()
        moved = self._side.moved(None)
        self._moved = moved
        # The clock last: reading processor times opens many files, and beside a busy thread
        # each of those waits for the interpreter, a third of a second in all.
        began_cpu_s = cpu_s()
        return time.perf_counter(), began_cpu_s, Moved(moved.down, moved.up)

    def _end(self, began: tuple[float, float, Moved], *, upwards: bool) -> Pass:
        began_s, began_cpu_s, before = began
        self._pass.seconds = time.perf_counter() - began_s
        self._pass.cpu_s = cpu_s() - began_cpu_s
        after = self._side.moved(self._manager.get_stats())
        self._pass.nbytes = after.up - before.up if upwards else after.down - before.down
        return self._pass


def make_context(request: Request) -> Any:
    """Return what vLLM tells a manager about a request."""
    context = ReqContext(req_id=request.req_id)
    for position, key in enumerate(request.keys, start=1):
        context.set_offload_key_position(key, position)
    return context
