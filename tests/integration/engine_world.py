"""An engine without a model: vLLM's own scheduler and block pool, and blocks that hold notes.

They drive both roles of :class:`KVTierConnector` over a cache without threads. A block holds a
note of what was written to it: by whom, of which group, and up to which token. So a block that
is read, shared or stored with anything but its own tokens' KV is noticed at once. A state is
one block that a request goes on in and that is left behind where a block of tokens ends.

Steps may be scheduled before the tokens of the last one are known, and either of vLLM's model
runners is played: the second one clears blocks, copies into some, and moves states, before it
asks for the stores that read these blocks.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.keys import ChunkKey, group_of, make_key, strip_adapter
from kvtier.manager import GroupReach, LoadPlan, StorePlan
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.types import Outcome
from kvtier.vllm import connector as entry_point
from kvtier.vllm.connector import KVTierConnector
from tests.integration.notes_device import NotesDevice
from tests.integration.scheduler_setup import Setup, make_request, scheduler_with
from tests.support.stepped import SteppedCache

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvtier.connector.service import CacheService

WRONG: Final = b"nothing right"
MODULE: Final = "tests.integration.engine_world"


class Held(NamedTuple):
    """What a request wrote to a block: of a group, up to so many of its tokens."""

    req_id: str
    group: int
    tokens: int


class Run(NamedTuple):
    """A request in a step.

    Attributes:
        request: The request.
        start: Its tokens that are computed.
        end: Those that are computed once what was guessed wrongly is taken back.
        last: Those that the pass computes.
        tokens: What it generates.
    """

    request: Request
    start: int
    end: int
    last: int
    tokens: list[int]


class KnownSlots:
    """A cache that remembers which chunk was planned into, or out of, which slot."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._keys: dict[tuple[int, int], ChunkKey] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def key_in(self, slot: int, generation: int) -> ChunkKey:
        return self._keys[slot, generation]

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        plan: LoadPlan = self._service.prepare_load(keys, req_id)
        places = zip(plan.slots, plan.generations, strict=True)
        self._keys.update(zip(places, keys, strict=True))
        return plan

    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool
    ) -> StorePlan | None:
        plan: StorePlan | None = self._service.prepare_store(keys, req_id, is_last=is_last)
        if plan is not None:
            places = ((slot, plan.generation) for slot in plan.slots)
            self._keys.update(zip(places, plan.keys, strict=True))
        return plan


class NotesConnector(KVTierConnector):
    """The connector of an :class:`EngineWorld`; loaded by vLLM's scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            world = vllm_config.kv_transfer_config.kv_connector_extra_config["world"]
            world.worker = NotesConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
            world.worker.register_kv_caches({})


def arrange(monkeypatch: Any) -> None:
    """Let connectors be built over notes in place of memory and files."""

    def open_cache(engine: Any, _: Any, groups: Sequence[GroupReach], __: Any) -> Any:
        return engine.extra_config["world"].open_cache(groups)

    nothing = SimpleNamespace(share=None, close=lambda: None)
    monkeypatch.setattr(entry_point, "open_cache", open_cache)
    monkeypatch.setattr(entry_point, "kv_content", lambda *_: "")
    monkeypatch.setattr(entry_point, "find_pages", lambda *_: None)
    monkeypatch.setattr(entry_point, "share_slots", lambda *_, **__: nothing)
    monkeypatch.setattr(
        entry_point,
        "open_device",
        lambda engine, *_, **__: engine.extra_config["world"].device,
    )


class EngineWorld:
    """Requests and steps, drawn from one seed.

    Args:
        setup: How the engine is set up; ``failing`` is the share of copies that fail.
        model: A directory for the model's configuration.
        seed: Of everything.
        adapters: Of which each request asks for one that is drawn, None for none.
        connector: The connector's class, of the module that it is in.
    """

    cache: Any

    def __init__(
        self,
        setup: Setup,
        model: Path,
        seed: int,
        adapters: Sequence[LoRARequest | None] = (None,),
        connector: type[NotesConnector] = NotesConnector,
    ) -> None:
        self.setup = setup
        self.seed = seed
        self.draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.requests: dict[str, Request] = {}
        self.contents: dict[int, Held | bytes] = {}
        self.loaded: set[ChunkKey] = set()
        self.device = NotesDevice(self)
        self.worker: Any = None
        self._adapters = adapters
        self._parents: dict[bytes, bytes | None] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        """Of each request, the block of its table in which its state goes on."""
        self._astray: set[str] = set()
        """Requests that vLLM lets go on from what is not theirs."""
        self._before: dict[str, int] = {}
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.hasher = get_request_block_hasher(setup.tokens_per_hash, sha256)
        extra = {"world": self}
        self.scheduler = scheduler_with(
            connector.__name__, connector.__module__, extra, setup, model
        )

    def open_cache(self, groups: Sequence[GroupReach]) -> CacheService:
        """Return the connector's cache."""
        self.cache = self.make_cache(groups)
        self.known = KnownSlots(self.cache.service)
        return cast("CacheService", self.known)

    def make_cache(self, groups: Sequence[GroupReach]) -> Any:
        setup = self.setup
        return SteppedCache(
            *setup.slots,
            seed=self.seed,
            slowest_steps=2,
            failing=setup.failing,
            groups=groups,
        )

    def close(self) -> None:
        assert self.cache.service.statistics().internal_errors == 0
        assert self.scheduler.connector is not None
        self.scheduler.connector.shutdown()

    # -- what a client does --------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        answer: int,
        params: dict[str, Any] | None = None,
        *,
        resumable: bool = False,
    ) -> Request:
        # Nothing is drawn where there is no choice: other tests go by their seeds.
        many = len(self._adapters) > 1
        adapter = self.draw.choice(self._adapters) if many else self._adapters[0]
        request = make_request(
            len(self.requests),
            prompt,
            answer,
            self.hasher,
            {"kv_transfer_params": params} if params else None,
            adapter=adapter,
            resumable=resumable,
            priority=self.draw.randint(0, 3) if self.setup.priorities else 0,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def go_on(self, request: Request, prompt: Sequence[int], answer: int) -> None:
        """Send the next part of a prompt that comes in parts."""
        assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        self._before[request.request_id] = request.num_tokens
        self._send(request, prompt, answer, resumable=True)

    def end(self, request: Request) -> None:
        """Say that there is no further part."""
        self._send(request, [0], 1, resumable=False)

    def _send(
        self, request: Request, prompt: Sequence[int], answer: int, *, resumable: bool
    ) -> None:
        number = int(request.request_id.removeprefix("r"))
        part = make_request(number, prompt, answer, self.hasher, resumable=resumable)
        self.scheduler.add_request(part)

    def abort(self, request: Request) -> None:
        self.seen["aborts"] += 1
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self.seen["aborts while loading"] += loading
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        self.seen["resets"] += 1
        self.scheduler.reset_prefix_cache(reset_connector=True)

    def alive(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished()]

    def token_at(self, request: Request, place: int) -> int:
        """Return the token that a right pass generates as the ``place``-th of all."""
        return zlib.crc32(f"{request.prompt_token_ids[:8]}.{place}".encode()) % 500

    # -- what an engine does -------------------------------------------------------------------

    def step(self) -> None:
        self.seen["steps"] += 1
        self.cache.tick()
        output = self.scheduler.schedule()
        for request in self.requests.values():
            self._note_parents(request)
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        metadata, worker = output.kv_connector_metadata, self.worker
        late = self.scheduler.use_v2_model_runner
        if not late:
            worker.handle_preemptions(metadata)
        self._follow(output)
        runs = [self._run(req_id, output) for req_id in output.num_scheduled_tokens]
        self._prepare(output, runs)
        if late:
            worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for run in runs:
            self._compute(run)
        worker.start_load_kv(cast("Any", None))
        worker.wait_for_save()
        answer = self._told(runs, self._results(output))
        worker.clear_connector_metadata()
        self._flying.append((output, answer))
        while len(self._flying) > int(self.setup.asynchronous):
            self._take()

    def settle(self, limit: int = 400) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.has_requests():
                break
        else:
            raise AssertionError(f"still busy after {limit} steps")
        while self._flying:
            self._take()

    def _take(self) -> None:
        output, answer = self._flying.popleft()
        self.scheduler.update_from_output(output, answer)
        if self.setup.guesses and not self.setup.asynchronous:
            req_ids = list(answer.req_ids)
            guesses = [[7] * self.setup.guesses for _ in req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, guesses))

    def _follow(self, output: SchedulerOutput) -> None:
        """Keep the tables of blocks as workers do, which only ever get longer."""
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for at, (req_id, blocks) in enumerate(
            zip(cached.req_ids, cached.new_block_ids, strict=True)
        ):
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                self._begin(req_id, blocks, cached.num_computed_tokens[at])
                continue
            for table, own in zip(self._tables[req_id], blocks or (), strict=False):
                table.extend(own)

    def _begin(self, req_id: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        before = self._before.pop(req_id, None)
        if before is None:  # all of it is computed anew
            self._astray.discard(req_id)
        elif computed > before:
            self._astray.add(req_id)
        self._tables[req_id] = [list(own) for own in blocks]
        self._computed[req_id] = computed
        self._known[req_id] = self.requests[req_id].num_tokens
        self._columns.pop(req_id, None)

    def _run(self, req_id: str, output: SchedulerOutput) -> Run:
        request, start = self.requests[req_id], self._computed[req_id]
        guessed = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
        last = start + output.num_scheduled_tokens[req_id]
        if last - guessed < self._known[req_id]:
            self._computed[req_id] = last
            return Run(request, start, last, last, [])
        assert last - guessed == self._known[req_id]
        right = self.draw.randint(0, guessed) if req_id in self._columns else 0
        self.seen["guessed rightly"] += right
        end = last - guessed + right
        tokens = [self.token_at(request, place) for place in range(last - guessed, end + 1)]
        self._computed[req_id], self._known[req_id] = end, end + 1
        return Run(request, start, end, last, tokens)

    def _prepare(self, output: SchedulerOutput, runs: Sequence[Run]) -> None:
        """Clear blocks, copy into some, and move states into the blocks they go on in."""
        for block in output.new_block_ids_to_zero or ():
            self.contents[block] = WRONG
            self.seen["cleared in vain"] += not self._is_anyones(block)
        for pair in output.kv_cache_block_copies or ():
            self.seen["copies"] += 1
            self.contents[pair.dst_block_id] = self.contents[pair.src_block_id]
        for run in runs:
            for group in self.setup.states:
                table, size = self._table(run, group), self.setup.groups[group][0]
                before = self._columns.get(run.request.request_id, (run.start - 1) // size)
                column = (run.last - 1) // size
                if run.start and before != column:
                    self.seen["moves"] += 1
                    self.contents[table[column]] = self.contents.get(table[before], WRONG)

    def _compute(self, run: Run) -> None:
        """Check what the pass reads of a request, and write what it computes."""
        for group in self.setup.states:  # first: what they hold all of a pass is computed from
            self._go_on(run, group, self.setup.groups[group][0])
        for group, (size, _) in enumerate(self.setup.groups):
            if group not in self.setup.states:
                self._attend(run, group, size)
        size = self.setup.groups[(*self.setup.states, 0)[0]][0]
        self._columns[run.request.request_id] = (run.last - 1) // size

    def _attend(self, run: Run, group: int, size: int) -> None:
        table, req_id = self._table(run, group), run.request.request_id
        first = self.setup.first_token_read(group, run.start)
        for number in range(first // size, -(-run.start // size)):
            end = min((number + 1) * size, run.start)
            assert req_id in self._astray or self._has(
                table[number], run.request, group, end
            ), (
                f"{req_id} reads block {number} of group {group}, not its own: "
                f"{self.contents.get(table[number])!r}"
            )
        for number in range(run.start // size, -(-run.last // size)):
            end = min((number + 1) * size, run.end)
            self._write(table[number], Held(req_id, group, end))

    def _go_on(self, run: Run, group: int, size: int) -> None:
        table, req_id = self._table(run, group), run.request.request_id
        column = (run.last - 1) // size
        if run.start and not self._has(table[column], run.request, group, run.start):
            assert run.request.resumable, (
                f"{req_id} goes on from a state that is not its own after {run.start} tokens: "
                f"{self.contents.get(table[column])!r}"
            )
            self._astray.add(req_id)
        for scratch in table[column + 1 :]:
            self.contents[scratch] = WRONG
        self._write(table[column], Held(req_id, group, run.end))
        for end in range((run.start // size + 1) * size, run.end + 1, size):
            number = end // size - 1
            if number != column and run.tokens and table[number]:
                self._write(table[number], Held(req_id, group, end))

    def _write(self, block: int, held: Held) -> None:
        self.contents[block] = WRONG if held.req_id in self._astray else held

    def _results(self, output: SchedulerOutput) -> KVConnectorOutput:
        results = self.worker.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )

    def _told(self, runs: Sequence[Run], results: KVConnectorOutput) -> ModelRunnerOutput:
        req_ids = [run.request.request_id for run in runs]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: at for at, req_id in enumerate(req_ids)},
            sampled_token_ids=[run.tokens for run in runs],
            kv_connector_output=results,
        )

    def _is_anyones(self, block: int) -> bool:
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = chain.from_iterable(manager.req_to_blocks.values() for manager in managers)
        return any(block == own.block_id for own in chain.from_iterable(tables))

    def _table(self, run: Run, group: int) -> list[int]:
        return self._tables[run.request.request_id][group]

    # -- what copies do ------------------------------------------------------------------------

    def note_load(
        self, plan: BlockCopyPlan, generations: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        """Write what a load brought into its blocks."""
        whole = {
            slot
            for slot, outcome in zip(plan.slots, outcomes, strict=True)
            if outcome is Outcome.DONE
        }
        generation_of = dict(zip(plan.slots, generations, strict=True))
        self.loaded.update(self.known.key_in(slot, generation_of[slot]) for slot in whole)
        for block, slot, note in self._pairs(plan, generation_of):
            self.contents[block] = note if slot in whole else WRONG

    def check_store(self, plan: BlockCopyPlan, generations: Sequence[int]) -> None:
        """Check that what is stored is what its keys say."""
        generation_of = dict(zip(plan.slots, generations, strict=True))
        for block, _, note in self._pairs(plan, generation_of):
            assert self._is(block, note), (
                f"wrong KV is stored under a valid key: {self.contents.get(block)!r} for group "
                f"{group_of(note)}"
            )
            self.seen[f"stored of group {group_of(note)}"] += 1
        self.seen["stored"] += len(plan.slots)

    def _pairs(
        self, plan: BlockCopyPlan, generation_of: dict[int, int]
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield each block of a job with its slot and what it should hold."""
        for part in plan.groups:
            for block, slot, place in zip(part.blocks, part.slots, part.places, strict=True):
                if not generation_of[int(slot)]:
                    yield int(block), int(slot), WRONG
                    continue
                key = self.known.key_in(int(slot), generation_of[int(slot)])
                assert group_of(key) == part.group
                yield int(block), int(slot), self._notes_of(key)[int(place)]

    def _notes_of(self, key: ChunkKey) -> list[bytes]:
        """Return what the blocks of a chunk should hold."""
        key = strip_adapter(key)
        group = group_of(key)
        step = self.setup.groups[group][0] // self.setup.tokens_per_hash
        hashes = [key[:-4]]
        while len(hashes) <= step * (self.setup.blocks_per_chunk - 1):
            parent = self._parents[hashes[-1]]
            assert parent is not None
            hashes.append(parent)
        return [make_key(block_hash, group) for block_hash in reversed(hashes[::step])]

    def _note_parents(self, request: Request) -> None:
        hashes = request.block_hashes
        for at in range(len(hashes) - 1, -1, -1):
            if hashes[at] in self._parents:
                break
            self._parents[hashes[at]] = hashes[at - 1] if at else None

    # -- contents ------------------------------------------------------------------------------

    def _has(self, block: int, request: Request, group: int, tokens: int) -> bool:
        """Return whether a block holds what ``request`` has in a group after its ``tokens``."""
        held, exact = self.contents.get(block), group in self.setup.states
        if isinstance(held, Held) and held.req_id == request.request_id:
            reaches = held.tokens == tokens if exact else held.tokens >= tokens
            return held.group == group and reaches
        unit, size = self.setup.tokens_per_hash, self.setup.groups[group][0]
        last = tokens if exact else -(-tokens // size) * size  # more in it does no harm
        hashes = request.block_hashes[-(-tokens // unit) - 1 : last // unit]
        return any(self._is(block, make_key(each, group)) for each in hashes)

    def _is(self, block: int, key: bytes) -> bool:
        """Return whether a block holds what is kept under ``key``."""
        held = self.contents.get(block)
        group, unit = group_of(key), self.setup.tokens_per_hash
        size = 1 if group in self.setup.states else self.setup.groups[group][0]
        if not isinstance(held, Held):
            return held is not None and key in self._begins_of(held, size)
        if held.group != group:
            return False
        first = (held.tokens - 1) // size * size
        hashes = self.requests[held.req_id].block_hashes
        ends = range(first // unit + 1, held.tokens // unit + 1)
        return any(hashes[at - 1 : at] == [key[:-4]] for at in ends)

    def _begins_of(self, key: bytes, size: int) -> Iterator[bytes]:
        """Yield ``key``, and the keys of what else a block of ``size`` tokens holds with it."""
        begin: bytes | None = key[:-4]
        for _ in range(0, size, self.setup.tokens_per_hash):
            if begin is None:
                return
            yield make_key(begin, group_of(key))
            begin = self._parents.get(begin)
