"""An engine without a model whose layers keep states, and that may guess tokens.

vLLM's own scheduler and block pool drive :class:`KVTierConnector`, as in
:mod:`tests.integration.layerwise_world`. A state is one block that a request goes on in and
that is left behind, right, where a block of tokens ends; so what a block holds is noted with
the tokens that it follows. Steps may be scheduled before the tokens of the last one are known,
and either of vLLM's model runners is played: the second one clears blocks, copies into some,
and moves states, before it asks for the stores that read these blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from typing_extensions import override
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvtier.keys import group_of, make_key
from kvtier.vllm.contract import TransferResult
from tests.integration.layerwise_world import WRONG, LayerwiseWorld, Notes
from tests.integration.scheduler_setup import Setup

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtier.vllm.contract import GPULoadStoreSpec
    from kvtier.vllm.specs import SlotLoadStoreSpec


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


class SlowNotes(Notes):
    """One rank whose stores take until the pass is over, unless they are waited for."""

    def __init__(self, world: LayerwiseWorld) -> None:
        super().__init__(world)
        self._stores: dict[int, tuple[Any, Any]] = {}

    @property
    @override
    def is_idle(self) -> bool:
        return super().is_idle and not self._stores

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._stores[job_id] = src_spec, dst_spec
        return True

    @override
    def wait(self, job_ids: AbstractSet[int]) -> None:
        for job_id in sorted(self._stores.keys() & job_ids):
            super().submit_store(job_id, *self._stores.pop(job_id))

    def outlive_reset(self) -> None:
        """Leave the stores under way unchecked: nobody is to read what they bring."""
        self.give_up(self._stores.keys())

    @override
    def get_finished(self) -> list[TransferResult]:
        self.wait(set(self._stores))
        return super().get_finished()


class StatesWorld(LayerwiseWorld):
    """Requests and steps, drawn from one seed.

    Args:
        setup: As for :class:`LayerwiseWorld`; groups may keep states.
        model: A directory for the model's configuration.
        seed: Of everything.
    """

    def __init__(self, setup: Setup, model: Path, seed: int) -> None:
        self.notes: SlowNotes
        super().__init__(setup, model, seed, notes=SlowNotes)
        self._held: dict[int, Held | bytes] = cast("dict[int, Held | bytes]", self.contents)
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        """Of each request, the block of its table in which its state goes on."""
        self._astray: set[str] = set()
        """Requests that vLLM lets go on from what is not theirs."""
        self._before: dict[str, int] = {}
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    # -- what a client does --------------------------------------------------------------------

    @override
    def go_on(self, request: Request, prompt: Sequence[int], answer: int) -> None:
        assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        self._before[request.request_id] = request.num_tokens
        super().go_on(request, prompt, answer)

    @override
    def reset(self) -> None:
        super().reset()
        self.notes.outlive_reset()

    # -- what an engine does -------------------------------------------------------------------

    @override
    def step(self, *, abort: bool = False) -> None:
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
        self.spied.calls.clear()
        self._flying.append((output, answer))
        while len(self._flying) > int(self.setup.asynchronous):
            self._take()

    @override
    def settle(self, limit: int = 400) -> None:
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
            self._held[block] = WRONG
            self.seen["cleared in vain"] += not self._is_anyones(block)
        for pair in output.kv_cache_block_copies or ():
            self.seen["copies"] += 1
            self._held[pair.dst_block_id] = self._held[pair.src_block_id]
        for run in runs:
            for group in self.setup.states:
                table, size = self._table(run, group), self.setup.groups[group][0]
                before = self._columns.get(run.request.request_id, (run.start - 1) // size)
                column = (run.last - 1) // size
                if run.start and before != column:
                    self.seen["moves"] += 1
                    self._held[table[column]] = self._held.get(table[before], WRONG)

    def _compute(self, run: Run) -> None:
        """Check what the pass reads of a request, and write what it computes."""
        for group in self.setup.states:  # first: what they hold all of a pass is computed from
            self._go_on(run, group, self.setup.groups[group][0])
        for group, (size, window) in enumerate(self.setup.groups):
            if group not in self.setup.states:
                first = 0 if window is None else max(0, run.start - window + 1)
                self._attend(run, group, size, first)
        size = self.setup.groups[(*self.setup.states, 0)[0]][0]
        self._columns[run.request.request_id] = (run.last - 1) // size

    def _attend(self, run: Run, group: int, size: int, first: int) -> None:
        table, req_id = self._table(run, group), run.request.request_id
        for number in range(first // size, -(-run.start // size)):
            end = min((number + 1) * size, run.start)
            assert req_id in self._astray or self._has(
                table[number], run.request, group, end
            ), (
                f"{req_id} reads block {number} of group {group}, not its own: "
                f"{self._held.get(table[number])!r}"
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
                f"{self._held.get(table[column])!r}"
            )
            self._astray.add(req_id)
        for scratch in table[column + 1 :]:
            self._held[scratch] = WRONG
        self._write(table[column], Held(req_id, group, run.end))
        for end in range((run.start // size + 1) * size, run.end + 1, size):
            number = end // size - 1
            if number != column and run.tokens and table[number]:
                self._write(table[number], Held(req_id, group, end))

    def _write(self, block: int, held: Held) -> None:
        self._held[block] = WRONG if held.req_id in self._astray else held

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

    # -- contents ------------------------------------------------------------------------------

    def _has(self, block: int, request: Request, group: int, tokens: int) -> bool:
        """Return whether a block holds what ``request`` has in a group after its ``tokens``."""
        held, exact = self._held.get(block), group in self.setup.states
        if isinstance(held, Held) and held.req_id == request.request_id:
            reaches = held.tokens == tokens if exact else held.tokens >= tokens
            return held.group == group and reaches
        unit, size = self.setup.tokens_per_hash, self.setup.groups[group][0]
        last = tokens if exact else -(-tokens // size) * size  # more in it does no harm
        hashes = request.block_hashes[-(-tokens // unit) - 1 : last // unit]
        return any(self._is(block, make_key(each, group)) for each in hashes)

    def _is(self, block: int, key: bytes) -> bool:
        """Return whether a block holds what is kept under ``key``."""
        held = self._held.get(block)
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

    @override
    def check_store(self, blocks: GPULoadStoreSpec, slots: SlotLoadStoreSpec) -> None:
        for block, note in self.pairs_of(blocks, slots):
            assert self._is(block, note), (
                f"wrong KV is stored under a valid key: {self._held.get(block)!r} for group "
                f"{group_of(note)}"
            )
            self.seen[f"stored of group {group_of(note)}"] += 1
        self.seen["stored"] += len(slots.slots)
