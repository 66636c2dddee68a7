"""An engine without a model that loads within its forward passes, some of which fail.

vLLM's own scheduler and block pool drive both roles of :class:`KVTierConnector` over a cache
whose copies are notes. A block holds a note of what was written to it: the hash of its tokens,
or nothing right. So whatever reads a block whose load failed, shares it, or stores what was
computed from it, is noticed at once; and so is a block of a window that was left behind.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.config import parse_config
from kvtier.connector.service import CacheService
from kvtier.keys import group_of, make_key
from kvtier.testing.stepped import SteppedCache
from kvtier.vllm import connector as door
from kvtier.vllm.adapters import without_adapter
from kvtier.vllm.connector import KVTierConnector
from kvtier.vllm.contract import GPULoadStoreSpec, TransferResult
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.specs import SlotLoadStoreSpec
from kvtier.vllm.worker import EndedLoad, KVTierWorker
from tests.integration.scheduler_pair import SpiedService
from tests.integration.scheduler_setup import Setup, make_request, scheduler_with

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput

WRONG: Final = b"nothing right"
SETTINGS: Final = "tiers:\n- {{kind: ram, capacity: 1GiB}}\ntransfer: {{load_mode: {}}}\n"


class Notes(KVTierWorker):
    """One rank whose blocks and slots hold notes.

    Args:
        world: Whose.
    """

    def __init__(self, world: LayerwiseWorld) -> None:
        self._world = world
        self._finished: list[int] = []
        self._ended: dict[int, EndedLoad] = {}
        self._step: list[tuple[int, SlotLoadStoreSpec, GPULoadStoreSpec]] = []
        self._bad_stores: set[int] = set()
        self.lost: set[int] = set()
        """Blocks that this step's failed loads left as they were."""

    @property
    @override
    def is_idle(self) -> bool:
        return not self._finished

    @override
    def open_steps(self, layers: Sequence[str], *, timeout_s: float) -> None:
        raise NotImplementedError

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        stored = dst_spec.generations[0]
        if job_id in self._bad_stores:
            self._world.seen["stores spoiled"] += 1
            stored = None
        else:
            self._world.check_store(src_spec, dst_spec)
        self._world.cache.finish(dst_spec.slots, stored=stored)
        self._finished.append(job_id)
        return True

    @override
    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self._step.append((job_id, src_spec, dst_spec))
        if not src_spec.in_step:
            self._world.seen["loads ahead"] += 1
            self._settle(*self._step.pop())
        return True

    @override
    def start_step(self) -> None:
        self.lost.clear()
        for job in self._step:
            self._world.seen["loads in step"] += 1
            self._settle(*job)

    @override
    def end_step(self) -> list[int]:
        jobs, self._step = self._step, []
        return [job_id for job_id, *_ in jobs if not self._ended[job_id].is_whole]

    @override
    def spoil(self, job_ids: Iterable[int]) -> None:
        self._bad_stores.update(job_ids)

    @override
    def give_up(self, job_ids: AbstractSet[int]) -> None:
        self._bad_stores |= job_ids

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return [TransferResult(job_id, True) for job_id in finished]

    @override
    def take_ended_loads(self) -> dict[int, EndedLoad]:
        ended, self._ended = self._ended, {}
        return ended

    @override
    def wait(self, job_ids: set[int]) -> None:
        return

    def _settle(self, job_id: int, slots: SlotLoadStoreSpec, blocks: GPULoadStoreSpec) -> None:
        world = self._world
        works = world.draw.random() >= world.setup.failing
        world.loaded.update(world.spied.keys_of(slots.slots, slots.generations))
        for block, note in world.pairs_of(blocks, slots):
            world.contents[block] = note if works else WRONG
            if slots.in_step and not works:
                self.lost.add(block)
        world.seen["loads that failed"] += not works
        if not works:
            world.cache.truth.refuse(slots.slots, slots.generations)
        world.cache.finish(slots.slots)
        self._finished.append(job_id)
        self._ended[job_id] = EndedLoad(works, None, "" if works else "drawn")


class NotesSpec(OffloadingSpec):
    """Builds the halves of a :class:`LayerwiseWorld`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._world: LayerwiseWorld = config.extra_config["world"]

    @override
    def get_manager(self) -> KVTierManager:
        service = cast("CacheService", self._world.spied)
        return KVTierManager(service, persistent=False, report_metrics=False)

    @override
    def get_worker(self, kv_caches: Any) -> Notes:
        return self._world.notes


class NotesConnector(KVTierConnector):
    """The connector with the halves of :class:`NotesSpec`; loaded by vLLM's scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        world = vllm_config.kv_transfer_config.kv_connector_extra_config["world"]
        if role == KVConnectorRole.SCHEDULER:
            world.worker = NotesConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        else:
            self._stepping = self.connector_worker.worker = world.notes


def with_notes(vllm_config: Any, kv_cache_config: Any = None) -> Any:
    """Stand in for the connector's own choice of a spec."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra |= {"spec_name": NotesSpec.__name__, "spec_module_path": NotesSpec.__module__}
    return vllm_config


class LayerwiseWorld:
    """Requests and steps, drawn from one seed.

    Args:
        setup: One rank, ``failing`` the share of loads that fail. Only with one group of full
            attention do loads happen within the passes.
        model: A directory for the model's configuration.
        seed: Of everything.
        adapters: Of which each request asks for one that is drawn, None for none.
        notes: What the rank is.
    """

    def __init__(
        self,
        setup: Setup,
        model: Path,
        seed: int,
        adapters: Sequence[LoRARequest | None] = (None,),
        notes: type[Notes] = Notes,
    ) -> None:
        self.setup = setup
        self.draw = random.Random(seed)
        self._adapters = adapters
        self.cache = SteppedCache(*setup.slots, seed=seed, slowest_steps=2)
        self.spied = SpiedService(self.cache.service)
        self.notes = notes(self)
        self.worker: Any = None
        self.seen: Counter[str] = Counter()
        self.loaded: set[bytes] = set()
        self.contents: dict[int, bytes] = {}
        self.requests: dict[str, Request] = {}
        self._parents: dict[bytes, bytes | None] = {}
        self._hasher = get_request_block_hasher(setup.tokens_per_hash, sha256)
        extra = {"world": self}
        self.scheduler = scheduler_with(
            NotesConnector.__name__, NotesConnector.__module__, extra, setup, model
        )

    # -- what a client does --------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], answer: int, *, resumable: bool = False) -> Request:
        # Nothing is drawn where there is no choice: other tests go by their seeds.
        many = len(self._adapters) > 1
        adapter = self.draw.choice(self._adapters) if many else self._adapters[0]
        request = make_request(
            len(self.requests),
            prompt,
            answer,
            self._hasher,
            adapter=adapter,
            resumable=resumable,
            priority=self.draw.randint(0, 3) if self.setup.priorities else 0,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def go_on(self, request: Request, prompt: Sequence[int], answer: int) -> None:
        """Send the next part of a prompt that comes in parts."""
        self._send(request, prompt, answer, resumable=True)

    def end(self, request: Request) -> None:
        """Say that there is no further part."""
        self._send(request, [0], 1, resumable=False)

    def _send(
        self, request: Request, prompt: Sequence[int], answer: int, *, resumable: bool
    ) -> None:
        number = int(request.request_id.removeprefix("r"))
        part = make_request(number, prompt, answer, self._hasher, resumable=resumable)
        self.scheduler.add_request(part)

    def abort(self, request: Request) -> None:
        self.seen["aborts"] += 1
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache(reset_connector=True)

    def alive(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished()]

    # -- what an engine does -------------------------------------------------------------------

    def step(self, *, abort: bool = False) -> None:
        """Take one step; with ``abort`` a request in it is aborted while its pass runs."""
        self.seen["steps"] += 1
        self.cache.tick()
        output = self.scheduler.schedule()
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        metadata, worker = output.kv_connector_metadata, self.worker
        for block in output.new_block_ids_to_zero or ():  # first, as Model Runner V2 does
            self.contents[block] = WRONG
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            worker.start_load_kv(cast("Any", None))
        wrong = self._forward(output)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(cast("Any", None))
        worker.wait_for_save()
        answer = self._answer(output, wrong, self._results(output))
        worker.clear_connector_metadata()
        if abort:
            self._abort_one_of(output.num_scheduled_tokens)
        self.spied.calls.clear()
        self.scheduler.update_from_output(output, answer)
        for request in self.requests.values():
            self._note_parents(request)

    def settle(self, limit: int = 400) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.has_requests():
                return
        raise AssertionError(f"still busy after {limit} steps")

    def token_at(self, request: Request, place: int) -> int:
        """Return the token that a right pass generates as the ``place``-th of all."""
        return zlib.crc32(f"{request.prompt_token_ids[:8]}.{place}".encode()) % 500

    def _abort_one_of(self, req_ids: Iterable[str]) -> None:
        # vLLM's engine takes aborts between a pass and what the scheduler makes of it.
        alive = [self.requests[req_id] for req_id in req_ids]
        if alive:
            self.seen["aborts within a step"] += 1
            self.abort(self.draw.choice(alive))

    def _results(self, output: SchedulerOutput) -> KVConnectorOutput:
        results = self.worker.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )

    def _forward(self, output: SchedulerOutput) -> set[str]:
        """Check what the pass reads, write what it computes, and return who computed wrong."""
        wrong: set[str] = set()
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            self._note_parents(request)
            end = request.num_computed_tokens
            for group in range(len(self.setup.groups)):
                self._pass(request, group, range(end - count, end), wrong)
        self.seen["wrong passes"] += len(wrong)
        return wrong

    def _pass(self, request: Request, group: int, tokens: range, wrong: set[str]) -> None:
        """Do so for the ``tokens`` of one request in one group."""
        req_id, (size, window) = request.request_id, self.setup.groups[group]
        seen = 0 if window is None else max(0, tokens.start - window + 1)
        blocks = self._blocks(req_id, group)
        before = range(seen // size, tokens.start // size)
        if self.notes.lost.intersection(blocks[number] for number in before):
            wrong.add(req_id)
        for number in before:
            right = self.contents.get(blocks[number]) == self._note(request, group, number)
            assert right or req_id in wrong, f"{req_id} reads block {number}, not its own"
        for number in range(tokens.start // size, -(-tokens.stop // size)):
            full = (number + 1) * size <= min(tokens.stop, request.num_tokens)
            self.contents[blocks[number]] = (
                self._note(request, group, number) if full and req_id not in wrong else WRONG
            )

    def _note(self, request: Request, group: int, number: int) -> bytes:
        """Return what the block of that ``number`` in a group should hold."""
        hashes = (number + 1) * self.setup.groups[group][0] // self.setup.tokens_per_hash
        return make_key(request.block_hashes[hashes - 1], group)

    def _answer(
        self, output: SchedulerOutput, wrong: set[str], results: KVConnectorOutput
    ) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for req_id in req_ids:
            request = self.requests[req_id]
            token = self.token_at(request, request.num_computed_tokens)
            token = 499 - token if req_id in wrong else token
            sampled.append([] if request.is_prefill_chunk else [token])
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: at for at, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=results,
        )

    def _blocks(self, req_id: str, group: int) -> list[int]:
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        return [block.block_id for block in manager.req_to_blocks[req_id]]

    # -- contents ------------------------------------------------------------------------------

    def check_store(self, blocks: GPULoadStoreSpec, slots: SlotLoadStoreSpec) -> None:
        """Check that what is stored is what its keys say."""
        for block, note in self.pairs_of(blocks, slots):
            assert self.contents.get(block) == note, "wrong KV is stored under a valid key"
        self.seen["stored"] += len(slots.slots)

    def pairs_of(
        self, blocks: GPULoadStoreSpec, slots: SlotLoadStoreSpec
    ) -> list[tuple[int, bytes]]:
        """Return each block of a job with what it should hold."""
        keys = iter(self.spied.keys_of(slots.slots, slots.generations))
        ids = iter(blocks.block_ids.tolist())
        pairs: list[tuple[int, bytes]] = []
        for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            skip, own = first % self.setup.blocks_per_chunk, list(islice(ids, count))
            while own:
                notes = self._notes_of(next(keys))[skip:]
                pairs += zip(own, notes, strict=False)
                own, skip = own[len(notes) :], 0
        return pairs

    def _notes_of(self, key: bytes) -> list[bytes]:
        """Return what the blocks of a chunk should hold."""
        key = without_adapter(key)
        group = group_of(key)
        step = self.setup.groups[group][0] // self.setup.tokens_per_hash
        chain = [key[:-4]]
        while len(chain) <= step * (self.setup.blocks_per_chunk - 1):
            parent = self._parents[chain[-1]]
            assert parent is not None
            chain.append(parent)
        return [make_key(block_hash, group) for block_hash in reversed(chain[::step])]

    def _note_parents(self, request: Request) -> None:
        hashes = request.block_hashes
        for at in range(len(hashes) - 1, -1, -1):
            if hashes[at] in self._parents:
                break
            self._parents[hashes[at]] = hashes[at - 1] if at else None


def arrange(monkeypatch: Any, load_mode: str = "layerwise") -> None:
    """Let connectors be built over notes, from no file."""
    settings = parse_config(SETTINGS.format(load_mode), source="test")
    monkeypatch.setattr(door, "_with_spec", with_notes)
    monkeypatch.setattr(door, "_settings", lambda _: settings)
