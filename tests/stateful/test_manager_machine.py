"""The manager against a world that may do anything an engine, workers and disks may do.

The world knows what every slot of every tier really holds. It runs stores, loads and storage
jobs when hypothesis says so, in any order, with every outcome, and checks at each that the
bytes are those of the key, and that nobody else may touch the slot meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtier.keys import ChunkKey, group_of
from kvtier.manager import (
    NO_LOAD,
    GroupReach,
    HitRules,
    LoadPlan,
    ManagerLimits,
    Prompt,
    Reach,
    StorePlan,
)
from kvtier.policies import CopyState, TieredPlacement
from kvtier.types import Job, Outcome, Purpose, TransferResult
from tests.support.fakes import FakeGdsSlots, FakeSlotStatus
from tests.support.invariants import check_manager, eviction_order
from tests.support.workbench import TIER_NAMES, Workbench, prefix

FULL = GroupReach(chunk_tokens=1)
OTHERS = (
    FULL,
    GroupReach(1, Reach.WINDOW, window_tokens=3),
    GroupReach(2, Reach.LOCAL, window_tokens=4),
    GroupReach(2, Reach.STATE),
)
PATIENCE = 6
LONGEST = 5
Content = tuple[ChunkKey, int]
"""Key and cache epoch: after a reset the same key means other bytes."""


@dataclass(eq=False)
class Request:
    req_id: str
    prompt: int
    tokens: int
    local_tokens: int = 0
    running: bool = False
    lookups: int = 0
    loading: bool = False
    failed: bool = False


@dataclass(eq=False)
class WorkerOp:
    """A store or a load of the workers."""

    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    generations: Sequence[int]
    epoch: int
    writes: bool
    request: Request | None = None
    load_id: int = NO_LOAD
    failed: bool = False
    reads: dict[int, tuple[ChunkKey, int]] = field(default_factory=dict)
    """Key and slot of the second tier of what workers read there, by position."""
    failed_reads: dict[int, Outcome] = field(default_factory=dict)


@dataclass(eq=False)
class StorageOp:
    job: Job
    epoch: int
    late: bool = False


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        ram=st.one_of(st.just(6), st.integers(1, 6)),
        slower=st.lists(
            st.one_of(st.integers(4, 12), st.integers(0, 12)), min_size=1, max_size=2
        ),
        mode=st.sampled_from(["through", "evict", "move"]),
        budget=st.one_of(st.just(6), st.integers(0, 6)),
        reserve=st.sampled_from([0.0, 0.34, 1.0]),
        queue=st.integers(1, 8),
        retained=st.integers(0, 3),
        # Streams need a warm disk and a budget, which chance alone gives them rarely.
        warm=st.sampled_from([[0, 1, 2], [0, 1], [2], []]),
        direct_loads=st.sampled_from([True, False]),
        gds=st.booleans(),
        shared=st.booleans(),
        eviction=st.sampled_from(["lru", "lhd"]),
        other=st.sampled_from(OTHERS),
    )
    def start(
        self,
        *,
        ram: int,
        slower: list[int],
        mode: str,
        budget: int,
        reserve: float,
        queue: int,
        retained: int,
        warm: list[int],
        direct_loads: bool,
        gds: bool,
        shared: bool,
        eviction: str,
        other: GroupReach,
    ) -> None:
        self.hit_rules = HitRules([FULL, other])
        self.slot_status = FakeSlotStatus(driven=True)
        self.gds = FakeGdsSlots(slower[0])
        tiers = 1 + len(slower)
        self.bench = Workbench(
            ram,
            *slower,
            placement=TieredPlacement(
                tiers,
                write="through" if mode == "through" else "evict",
                promote="move" if mode == "move" else "copy",
            ),
            slot_status=self.slot_status,
            eviction=eviction,
            groups=self.hit_rules.groups,
            gds=self.gds if gds else None,
            limits=ManagerLimits(
                pin_budget=budget,
                reserve=reserve,
                queue=queue,
                retained=retained,
                max_queue_steps=PATIENCE,
                max_store_refusals=2,
                direct_loads=direct_loads,
            ),
            shared=shared,
        )
        self.manager = self.bench.manager
        self.budget = budget
        self.contents: list[dict[int, Content | None]] = [{} for _ in self.bench.tiers]
        self.rotten: set[tuple[int, int]] = set()
        self.requests: list[Request] = []
        self.born = 0
        self.epoch = 0
        self.now = 0.0
        self.orders: list[WorkerOp] = []
        self.acknowledged: list[WorkerOp] = []
        self.storage: list[StorageOp] = []
        self.listed: list[set[ChunkKey]] = [set() for _ in self.bench.tiers]
        for prompt in warm:
            self.recover(prompt)

    def recover(self, prompt: int) -> None:
        """Let the chunks of a prompt have survived a restart in the second tier."""
        tier = self.bench.tiers[1]
        slots = [slot for start, end in tier.slots.extents() for slot in range(start, end)]
        chunks = list(zip(self.keys(prompt, LONGEST), slots, strict=False))
        assert self.manager.recover(1, chunks) == len(chunks)
        for key, slot in chunks:
            self.contents[1][slot] = (key, self.epoch)

    # -- requests ---------------------------------------------------------------------------

    @rule(
        prompt=st.integers(0, 2),
        tokens=st.integers(1, LONGEST),
        local_tokens=st.one_of(st.just(0), st.integers(0, LONGEST)),
    )
    def arrive(self, prompt: int, tokens: int, local_tokens: int) -> None:
        if len(self.requests) < 5:
            self.born += 1
            request = Request(f"r{self.born}", prompt, tokens, min(local_tokens, tokens))
            self.requests.append(request)
            self.manager.begin_request(request.req_id)

    @precondition(lambda self: len(self.requests) < 5)
    @rule(prompt=st.integers(0, 2), tokens=st.integers(1, LONGEST))
    def start_at_once(self, prompt: int, tokens: int) -> None:
        """A request is scheduled in the step it arrives in, unless it has to wait."""
        self.arrive(prompt=prompt, tokens=tokens, local_tokens=0)
        request = self.requests[-1]
        hits = self.ask(request)
        if hits is not None:
            self.begin(request, hits)
        self.end_step([request] if request.running else [], [])

    @rule(data=st.data(), seats=st.integers(0, 3))
    def schedule(self, data: st.DataObject, seats: int) -> None:
        """One step of an engine's scheduler."""
        started = []
        for request in [each for each in self.requests if not each.running]:
            hits = self.ask(request)
            if hits is not None and seats:
                seats -= 1
                started.append(request)
                self.begin(request, hits)
        preempted = self.maybe_preempt(data, started)
        for request in self.requests:
            if request.running and not request.loading and data.draw(st.integers(0, 3)):
                self.offer(request)
        self.end_step(started, preempted)

    def ask(self, request: Request) -> int | None:
        """Look a request up; return the tokens to load, None if it has to wait."""
        request.lookups += 1
        hits = self.manager.lookup(request.req_id, self.prompt(request))
        if request.failed:
            assert hits == 0
        if hits:
            end = request.local_tokens + hits
            assert end <= request.tokens
            assert not end % self.hit_rules.alignment_tokens
        return hits

    def prompt(self, request: Request) -> Prompt:
        keys = [
            prefix(request.tokens // group.chunk_tokens, of=request.prompt, group=number)
            for number, group in enumerate(self.hit_rules.groups)
        ]
        return Prompt(keys, request.local_tokens, request.tokens)

    def begin(self, request: Request, hits: int) -> None:
        request.running = True
        request.lookups = 0
        if not hits:
            return
        keys = self.hit_rules.needed(self.prompt(request), request.local_tokens + hits)
        plan = self.manager.prepare_load(keys, request.req_id)
        op = self.order(keys, plan, request)
        assert all(op.generations), "a hit has no slot after all"
        for slot, generation in zip(op.slots, op.generations, strict=True):
            self.claim(0, slot, generation, writes=False)
        for _, slot in op.reads.values():
            self.claim(1, slot, writes=False)
        self.orders.append(op)
        self.collect()
        request.loading = True

    def order(self, keys: Sequence[ChunkKey], plan: LoadPlan, request: Request) -> WorkerOp:
        reads = {}
        if plan.gds is not None:
            found = zip(plan.gds.positions, plan.gds.slots, strict=True)
            reads = {at: (keys[at], slot) for at, slot in found}
        in_ram = [at for at in range(len(keys)) if at not in reads]
        return WorkerOp(
            [keys[at] for at in in_ram],
            [plan.slots[at] for at in in_ram],
            [plan.generations[at] for at in in_ram],
            self.epoch,
            writes=False,
            request=request,
            reads=reads,
            load_id=plan.load_id,
        )

    def maybe_preempt(self, data: st.DataObject, started: list[Request]) -> list[Request]:
        able = [
            each
            for each in self.requests
            if each.running and not each.loading and each not in started
        ]
        if not able or data.draw(st.integers(0, 5)) != 0:
            return []
        victim = data.draw(st.sampled_from(able))
        victim.running = False
        return [victim]

    def offer(self, request: Request) -> None:
        keys = self.keys(request.prompt, request.tokens)
        before = self.picture()
        new = [key for key in keys if key not in self.bench.ram.copies]
        refused = self.bench.ram.counters.refused
        plan = self.manager.prepare_store(keys, request.req_id)
        if plan is None:
            assert self.picture() == before, "a refused store changed something"
            return
        if not plan.keys:
            # Being offered is a use, so the order may differ.
            same = [
                after[:2] == tier[:2]
                for after, tier in zip(self.picture(), before, strict=True)
            ]
            assert all(same), "a store of nothing changed something"
        for group in {*map(group_of, new)}:
            offered, taken = (
                [k for k in ks if group_of(k) == group] for ks in (new, plan.keys)
            )
            assert taken == offered[: len(taken)], "the head goes first"
        if plan.keys:
            refused = self.bench.ram.counters.refused - refused
            assert len(plan.keys) + refused == len(new), "a chunk is neither stored nor counted"
            self.issue_store(plan)

    def issue_store(self, plan: StorePlan) -> None:
        for slot in plan.slots:
            self.claim(0, slot, plan.generation, writes=True)
        generations = [plan.generation] * len(plan.keys)
        self.orders.append(
            WorkerOp(plan.keys, plan.slots, generations, self.epoch, writes=True)
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request finishes or is aborted, whatever it is doing."""
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.end_request(request.req_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), seconds=st.integers(0, 4))
    def retain(self, data: st.DataObject, seconds: int) -> None:
        """Somebody knows that a prompt will be back."""
        request = data.draw(st.sampled_from(self.requests))
        self.manager.retain(self.keys(request.prompt, request.tokens), self.now + seconds)

    @rule()
    def reset(self) -> None:
        self.epoch += 1
        self.manager.reset()
        for request in self.requests:
            request.loading = False
            request.lookups = 0
        self.acknowledged = []
        self.collect()
        assert not any(self.bench.resident(tier.index) for tier in self.bench.tiers)

    @rule(leaving=st.booleans())
    def smooth(self, leaving: bool) -> None:
        """An engine's step in which nothing goes wrong."""
        started = []
        for request in [each for each in self.requests if not each.running]:
            hits = self.ask(request)
            if hits is not None:
                started.append(request)
                self.begin(request, hits)
        for request in self.requests:
            if request.running and not request.loading:
                self.offer(request)
        self.end_step(started, [])
        self.finish_everything()
        if leaving:
            for request in [each for each in self.requests if each.running]:
                self.requests.remove(request)
                self.manager.end_request(request.req_id)

    @rule()
    def flush(self) -> None:
        self.manager.flush()
        self.collect()

    # -- workers ----------------------------------------------------------------------------

    def awaits(self, op: WorkerOp) -> bool:
        """Whether a load's workers have to wait for one of its chunks."""
        return not op.writes and any(
            self.slot_status.generations.get(slot) != generation
            and (slot, generation) not in self.slot_status.lost
            for slot, generation in zip(op.slots, op.generations, strict=True)
        )

    @precondition(lambda self: any(not self.awaits(op) for op in self.orders))
    @rule(data=st.data(), fails=st.integers(0, 4))
    def work(self, data: st.DataObject, fails: int) -> None:
        """The workers do the oldest thing that they can; a chunk of it may fail."""
        op = next(op for op in self.orders if not self.awaits(op))
        self.orders.remove(op)
        for at, (key, slot, generation) in enumerate(
            zip(op.keys, op.slots, op.generations, strict=True)
        ):
            if not op.writes and (slot, generation) in self.slot_status.lost:
                self.slot_status.record_failed_loads([slot], [generation])
                op.failed = True
            elif not op.writes:
                assert self.contents[0].get(slot) == (key, op.epoch), "a wrong byte was loaded"
                assert self.slot_status.generations[slot] == generation
                if fails == 0 and at == data.draw(st.integers(0, len(op.keys) - 1)):
                    self.slot_status.record_failed_loads([slot], [generation])
                    op.failed = True
            elif fails == 0 and at == data.draw(st.integers(0, len(op.keys) - 1)):
                self.contents[0][slot] = None
            else:
                self.contents[0][slot] = (key, op.epoch)
                self.slot_status.set_generation([slot], generation)
        self.read(op, data.draw(st.sampled_from([None, *op.reads])) if fails == 0 else None)
        self.slot_status.acknowledge(op.slots)
        if op.epoch == self.epoch:
            self.acknowledged.append(op)

    def read(self, op: WorkerOp, failing: int | None) -> None:
        """The workers read chunks from the second tier, which they verify."""
        for at, (key, slot) in op.reads.items():
            if op.epoch != self.epoch:  # the slot may have another chunk since the reset
                continue
            assert self.contents[1].get(slot) == (key, op.epoch), "another chunk was read"
            if at == failing or (1, slot) in self.rotten:
                is_rotten = (1, slot) in self.rotten
                op.failed_reads[at] = Outcome.CORRUPT if is_rotten else Outcome.FAILED
                op.failed = True

    @rule()
    def gain_or_lose_gds_reads(self) -> None:
        """A worker gives up, or an engine begins with other hashes."""
        self.gds.is_off = not self.gds.is_off
        self.gds.known.update(range(0, 12, 2))

    @precondition(lambda self: any(self.awaits(op) for op in self.orders))
    @rule()
    def give_up_waiting(self) -> None:
        """The workers' own deadline passes before any chunk of a load has come."""
        op = next(op for op in self.orders if self.awaits(op))
        self.orders.remove(op)
        self.slot_status.record_failed_loads(op.slots, op.generations)
        op.failed_reads = dict.fromkeys(op.reads, Outcome.EXPIRED)
        op.failed = True
        self.slot_status.acknowledge(op.slots)
        if op.epoch == self.epoch:
            self.acknowledged.append(op)

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        op = data.draw(st.sampled_from(self.acknowledged))
        self.acknowledged.remove(op)
        if op.writes:
            self.manager.complete_store(set(op.keys))
            return
        self.end_load(op)

    def end_load(self, op: WorkerOp) -> None:
        if op.request is not None:
            failed = op.failed_reads
            wrong = {op.reads[at][1] for at in failed if failed[at] is Outcome.CORRUPT}
            copies = self.bench.tiers[1].copies.values()
            expected = {(1, copy.slot) for copy in copies if copy.slot in wrong}
            self.manager.complete_load(
                op.request.req_id, op.load_id, failed_reads=op.failed_reads
            )
            assert set(self.manager.take_corrupt()) == expected
            op.request.loading = False
            if op.failed:  # the engine computes it, after asking again
                op.request.failed = True
                op.request.running = False

    # -- storage ----------------------------------------------------------------------------

    @precondition(lambda self: self.storage)
    @rule(data=st.data(), ending=st.sampled_from([None, *Outcome]))
    def transfer(self, data: st.DataObject, ending: Outcome | None) -> None:
        """A storage job ends, each chunk in its own way where ``ending`` is None."""
        op = data.draw(st.sampled_from(self.storage))
        outcomes = [ending or data.draw(st.sampled_from(Outcome)) for _ in op.job.keys]
        self.finish(op, outcomes)

    @precondition(lambda self: any(not op.late for op in self.storage))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """A job's deadline passes while a thread still touches its slots."""
        op = data.draw(st.sampled_from([op for op in self.storage if not op.late]))
        op.late = True
        outcomes = [Outcome.EXPIRED] * len(op.job.keys)
        if op.job.purpose is Purpose.PROMOTE:
            self.slot_status.mark_lost(op.job.destination_slots, op.job.payload)
        self.manager.apply(TransferResult(op.job.job_id, outcomes, settled=False))

    @precondition(lambda self: any(self.contents[1:]))
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A disk loses what it was given."""
        tier = data.draw(st.sampled_from(range(1, len(self.contents))))
        if self.contents[tier]:
            self.rotten.add((tier, data.draw(st.sampled_from(sorted(self.contents[tier])))))

    def finish(self, op: StorageOp, outcomes: list[Outcome]) -> None:
        """Do what ``outcomes`` say to the bytes, and tell the manager."""
        job = op.job
        if job.purpose is Purpose.QUESTION:
            self.answer(op, outcomes)
            return
        source = TIER_NAMES.index(job.source)
        destination = TIER_NAMES.index(job.destination)
        corrupt = set()
        if not source:
            intact = self.slot_status.stored(job.source_slots, job.payload)
            assert all(intact), "a slot was reused while it was demoted"
        for at, (key, src, dst) in enumerate(
            zip(job.keys, job.source_slots, job.destination_slots, strict=True)
        ):
            assert self.contents[source].get(src) == (key, op.epoch), "a wrong byte was moved"
            if (source, src) in self.rotten and outcomes[at] is Outcome.DONE:
                outcomes[at] = Outcome.CORRUPT
            if outcomes[at] is Outcome.CORRUPT and source:
                corrupt.add((source, src))
            done = outcomes[at] is Outcome.DONE
            self.contents[destination][dst] = (key, op.epoch) if done else None
            if not destination:
                (self.slot_status.publish if done else self.slot_status.mark_lost)(
                    [dst], [job.payload[at]]
                )
            self.rotten.discard((destination, dst))
        self.storage.remove(op)
        resident = {
            (tier.index, copy.slot)
            for tier in self.bench.tiers
            for copy in tier.copies.values()
        }
        self.manager.apply(TransferResult(job.job_id, outcomes))
        named = set(self.manager.take_corrupt())
        if op.epoch == self.epoch:
            assert named == corrupt & resident
        else:
            assert named == {(destination, dst) for dst in job.destination_slots if destination}

    def answer(self, op: StorageOp, outcomes: list[Outcome]) -> None:
        """Answer a question; what is found is in the service under the current epoch."""
        self.storage.remove(op)
        self.manager.apply(TransferResult(op.job.job_id, outcomes))
        last = self.bench.tiers[-1]
        for copy in last.copies.values():
            if copy.state == CopyState.RESIDENT and copy.key in op.job.keys:
                self.contents[-1][copy.slot] = (copy.key, self.epoch)

    def collect(self) -> None:
        """Take the jobs the manager planned."""
        for job in self.manager.take_jobs():
            op = StorageOp(job, self.epoch)
            if job.purpose is Purpose.QUESTION:
                self.storage.append(op)
                continue
            source = TIER_NAMES.index(job.source)
            destination = TIER_NAMES.index(job.destination)
            generations = [0] * len(job.keys) if destination else job.payload
            for slot in job.source_slots:
                self.claim(source, slot, writes=False)
            for slot, generation in zip(job.destination_slots, generations, strict=True):
                self.claim(destination, slot, generation, writes=True)
            self.storage.append(op)
        self.manager.take_cancels()

    # -- what must hold ---------------------------------------------------------------------

    def claim(self, tier: int, slot: int, generation: int = 0, *, writes: bool) -> None:
        """Check that whoever still touches ``slot`` does not mind the new user.

        Workers that read a slot of the second tier since before a reset find out by themselves.
        A load and the write it waits for name the same generation, and do not mind each other.
        """
        read = {
            at for op in self.orders if op.epoch == self.epoch for _, at in op.reads.values()
        }
        assert not (tier == 1 and writes and slot in read), f"slot {slot} goes while read"
        for op in self.orders:
            if tier == 0 and slot in op.slots:
                if generation and op.generations[list(op.slots).index(slot)] == generation:
                    continue
                assert not writes, f"slot {slot} is given away while a worker uses it"
                assert not op.writes, f"slot {slot} is read while a worker writes it"
        moves = [op.job for op in self.storage if op.job.purpose is not Purpose.QUESTION]
        for job in moves:
            if tier == TIER_NAMES.index(job.source) and slot in job.source_slots:
                assert not writes, f"slot {slot} of tier {tier} is given away while read"
            if tier == TIER_NAMES.index(job.destination):
                if generation and (slot, generation) in zip(
                    job.destination_slots, job.payload, strict=True
                ):
                    continue
                assert slot not in job.destination_slots, f"slot {slot} is being written"

    def end_step(self, started: list[Request], preempted: list[Request]) -> None:
        self.now += 1.0
        self.manager.end_step(
            started=[each.req_id for each in started],
            preempted=[each.req_id for each in preempted],
            now=self.now,
        )
        self.collect()
        if self.manager.can_skip_step:
            before = self.picture(), self.manager.snapshot()
            self.manager.end_step(now=self.now)
            assert (self.picture(), self.manager.snapshot()) == before, "it was not at rest"
            assert self.manager.can_skip_step

    def keys(self, prompt: int, tokens: int) -> list[ChunkKey]:
        """Return the keys of a prompt's whole chunks, group after group."""
        return [
            key
            for number, group in enumerate(self.hit_rules.groups)
            for key in prefix(tokens // group.chunk_tokens, of=prompt, group=number)
        ]

    def picture(self) -> list[Any]:
        """Everything a refusal must leave alone."""
        return [
            (
                {
                    key: (copy.slot, copy.state, copy.pins, copy.dirty, copy.hits)
                    for key, copy in tier.copies.items()
                },
                tier.slots.extents(),
                [copy.key for copy in eviction_order(tier.eviction) or ()],
                (tier.idle, tier.dirty, tier.writing, set(tier.leaving)),
            )
            for tier in self.bench.tiers
        ]

    @invariant()
    def the_books_are_right(self) -> None:
        check_manager(self.manager)
        snapshot = self.manager.snapshot()
        assert snapshot.granted <= self.budget
        for event in self.manager.take_events():
            for key in event.keys:
                listed = self.listed[event.tier]
                assert (key in listed) == event.removed, "an event out of order"
                listed.symmetric_difference_update((key,))
        for tier in self.bench.tiers:
            assert self.listed[tier.index] == self.bench.resident(tier.index)

    @invariant()
    def a_hit_is_whole(self) -> None:
        for tier in self.bench.tiers:
            for key, copy in tier.copies.items():
                if copy.state == CopyState.RESIDENT:
                    held = self.contents[tier.index].get(copy.slot)
                    assert held == (key, self.epoch), f"{copy} of {tier.name} holds {held}"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.drain()
        note(f"after draining: {self.manager.snapshot()}")
        snapshot = self.manager.snapshot()
        assert (snapshot.requests, snapshot.granted, snapshot.jobs) == (0, 0, 0)
        assert not snapshot.retained
        assert not self.manager.has_work()
        for tier in self.bench.tiers:
            assert not any(copy.pins for copy in tier.copies.values()), "a pin is left"
            assert not tier.writing
            assert tier.slots.free + len(tier.copies) == tier.slots.capacity
        self.the_books_are_right()

    def drain(self) -> None:
        """Let everybody finish; every request must be answered in a bounded number of steps."""
        bound = (PATIENCE + 4) * (len(self.requests) + 1)
        for request in self.requests:
            request.lookups = 0
        for _ in range(bound):
            if all(request.running for request in self.requests):
                break
            self.smooth(leaving=False)
        assert all(request.running for request in self.requests), "a request starves"
        for request in self.requests:
            self.manager.end_request(request.req_id)
        self.requests = []
        self.finish_everything()
        self.now += 100.0
        for _ in range(60):
            self.end_step([], [])
            self.finish_everything()
            if not self.manager.has_work():
                break

    def finish_everything(self) -> None:
        if any(self.awaits(op) for op in self.orders):
            for storage in list(self.storage):
                self.finish(storage, [Outcome.DONE] * len(storage.job.keys))
        while self.orders:
            op = self.orders[0]
            self.work_well(op)
        for op in self.acknowledged:
            if op.writes:
                self.manager.complete_store(set(op.keys))
            else:
                self.end_load(op)
        self.acknowledged = []
        for storage in list(self.storage):
            self.finish(storage, [Outcome.DONE] * len(storage.job.keys))
        self.the_books_are_right()
        self.a_hit_is_whole()

    def work_well(self, op: WorkerOp) -> None:
        self.orders.remove(op)
        for key, slot, generation in zip(op.keys, op.slots, op.generations, strict=True):
            if op.writes:
                self.contents[0][slot] = (key, op.epoch)
                self.slot_status.set_generation([slot], generation)
            elif (slot, generation) in self.slot_status.lost:
                self.slot_status.record_failed_loads([slot], [generation])
                op.failed = True
            else:
                assert self.contents[0].get(slot) == (key, op.epoch)
        self.read(op, None)
        self.slot_status.acknowledge(op.slots)
        if op.epoch == self.epoch:
            self.acknowledged.append(op)


TestManagerMachine = pytest.mark.untraced(ManagerMachine.TestCase)
