"""An engine without a model: vLLM's own scheduler and block pool, and workers that keep books.

A block's content is a note of who wrote which of its own blocks there. A worker's copy takes as
many steps as the seed says and is made at the end of them, so whatever is overwritten too early
is noticed: what is stored, and what a forward pass reads, must be the tokens' own.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.connector.metadata import ConnectorMetadata, FailedLoad, TransferJob
from kvtier.keys import make_key
from kvtier.testing.stepped import SteppedCache
from tests.integration.scheduler_pair import Pair, TeeConnector, options_of
from tests.integration.scheduler_setup import Setup, build_scheduler, make_request

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Written(NamedTuple):
    """What a block of the engine holds."""

    req_id: str
    group: int
    place: int
    whole: bool


@dataclass
class Copy:
    """A job in the workers: how many more steps each rank needs."""

    job: TransferJob
    is_store: bool
    steps: list[int]
    done: list[bool]
    works: bool


class World:
    """Requests, steps and workers, all drawn from one seed."""

    def __init__(self, setup: Setup, model: Path, seed: int) -> None:
        self.setup = setup
        self.draw = random.Random(seed)
        options = options_of(
            setup.groups,
            tokens_per_hash=setup.tokens_per_hash,
            blocks_per_chunk=setup.blocks_per_chunk,
            ranks=setup.ranks,
            store_decode=setup.store_decode,
            retention_tokens=setup.retention_tokens,
        )
        self.pair = Pair(
            lambda: SteppedCache(
                *setup.slots,
                seed=seed,
                slowest_steps=setup.slowest_steps,
                failing=setup.failing,
            ),
            options,
        )
        self.scheduler = build_scheduler(setup, model, self.pair)
        connector = self.scheduler.connector
        assert isinstance(connector, TeeConnector)
        connector.holds = self._holds  # type: ignore[method-assign]
        self.connector = connector
        self.requests: dict[str, Request] = {}
        self.seen = self.pair.seen
        self._copies: dict[int, Copy] = {}
        self._contents: dict[int, Written] = {}
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._hasher = get_request_block_hasher(setup.tokens_per_hash, sha256)

    # -- what a client does --------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], answer: int, params: dict[str, Any] | None = None
    ) -> Request:
        extra = {"kv_transfer_params": params} if params else None
        request = make_request(len(self.requests), prompt, answer, self._hasher, extra)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.seen["aborts"] += 1
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self.seen["aborts while loading"] += loading
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        self.seen["resets"] += 1
        self.seen["resets with jobs in flight"] += bool(self._copies)
        self.scheduler.reset_prefix_cache(reset_connector=True)

    def alive(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished()]

    # -- what an engine does -------------------------------------------------------------------

    def step(self) -> None:
        self.seen["steps"] += 1
        self.pair.tick()
        output = self.scheduler.schedule()
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        metadata = self.pair.metadata.popleft()
        self._flush(metadata)
        self._forward(output)
        tokens = self._sample(output)
        self._begin(metadata)
        self._flying.append((output, self._answer(output, tokens)))
        while len(self._flying) > int(self.setup.asynchronous):
            self.scheduler.update_from_output(*self._flying.popleft())

    def settle(self, limit: int = 400) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not (self.scheduler.has_requests() or self._copies):
                break
        else:
            raise AssertionError(f"still busy after {limit} steps")
        while self._flying:
            self.scheduler.update_from_output(*self._flying.popleft())

    def close(self) -> None:
        self.pair.close()

    def _sample(self, output: SchedulerOutput) -> dict[str, int | None]:
        tokens: dict[str, int | None] = {}
        for req_id in output.num_scheduled_tokens:
            request = self.requests[req_id]
            place = request.num_computed_tokens
            text = f"{request.prompt_token_ids[:8]}.{place}"
            tokens[req_id] = (
                None if request.is_prefill_chunk else zlib.crc32(text.encode()) % 500
            )
        return tokens

    def _answer(
        self, output: SchedulerOutput, tokens: dict[str, int | None]
    ) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        sampled = [tokens[req_id] for req_id in req_ids]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: at for at, req_id in enumerate(req_ids)},
            sampled_token_ids=[[] if token is None else [token] for token in sampled],
            kv_connector_output=self._work(),
        )

    def _forward(self, output: SchedulerOutput) -> None:
        """Check what the pass reads, and write what it computes."""
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            end = request.num_computed_tokens
            start = end - count
            for group, (size, window) in enumerate(self.setup.groups):
                blocks = self._blocks(req_id, group)
                seen = 0 if window is None else max(0, start - window + 1)
                for index in range(seen // size, start // size):
                    assert self._is(blocks[index], request, group, index), (
                        f"{req_id} reads block {index} of group {group}: "
                        f"{self._contents.get(blocks[index])}"
                    )
                for index in range(start // size, -(-end // size)):
                    whole = (index + 1) * size <= end
                    self._contents[blocks[index]] = Written(req_id, group, index, whole)

    def _blocks(self, req_id: str, group: int) -> list[int]:
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        return [block.block_id for block in manager.req_to_blocks[req_id]]

    # -- what workers do -----------------------------------------------------------------------

    def _begin(self, metadata: ConnectorMetadata) -> None:
        for is_store, jobs in ((False, metadata.load_jobs), (True, metadata.store_jobs)):
            for job_id, job in jobs.items():
                if job_id in self._copies:
                    continue  # It was flushed in the step that began it.
                self._add(job_id, job, is_store=is_store)

    def _add(self, job_id: int, job: TransferJob, *, is_store: bool) -> None:
        steps = [
            self.draw.randint(int(is_store), self.setup.slowest_steps + 1)
            for _ in range(self.setup.ranks)
        ]
        works = self.draw.random() >= self.setup.failing
        self._copies[job_id] = Copy(job, is_store, steps, [False] * self.setup.ranks, works)

    def _flush(self, metadata: ConnectorMetadata) -> None:
        """End jobs before the forward pass; they are reported with this step's output."""
        for job_id in metadata.jobs_to_flush:
            if job_id in metadata.store_jobs:
                self._add(job_id, metadata.store_jobs[job_id], is_store=True)
            copy = self._copies.get(job_id)
            if copy is None:
                continue  # It ended, and the scheduler does not know yet.
            self.seen["flushes"] += 1
            for rank, steps in enumerate(copy.steps):
                if steps >= 0:
                    copy.steps[rank] = 0
                    self._copy(copy, rank)

    def _work(self) -> KVConnectorOutput | None:
        """Let each rank go on, and say what ended."""
        completed: dict[int, int] = {}
        received: set[str] = set()
        failed: set[str] = set()
        for job_id, copy in list(self._copies.items()):
            for rank, steps in enumerate(copy.steps):
                copy.steps[rank] = steps - 1
                if steps == 0:
                    self._copy(copy, rank)
                    completed[job_id] = completed.get(job_id, 0) + 1
            if all(steps < 0 for steps in copy.steps):
                del self._copies[job_id]
                self._finish(job_id, copy)
                if not copy.is_store:
                    received.add(copy.job.request_id)
                    if not copy.works:
                        failed.add(copy.job.request_id)
        if not completed:
            return None
        return KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failed,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=completed),
        )

    def _copy(self, copy: Copy, rank: int) -> None:
        if copy.done[rank] or not copy.works:
            return
        copy.done[rank] = True
        places = list(self._places(copy))
        request = self.requests[copy.job.request_id]
        if copy.is_store:
            for block, group, index in places:
                assert self._is(block, request, group, index), (
                    f"block {index} of group {group} of {request.request_id} is stored, and "
                    f"holds {self._contents.get(block)}"
                )
        else:
            for block, group, index in places:
                self._contents[block] = Written(request.request_id, group, index, whole=True)

    def _finish(self, job_id: int, copy: Copy) -> None:
        """Write into the control block what became of a job, as the last rank does."""
        slots = copy.job.slots
        kind = "stored" if copy.is_store else "loaded"
        self.seen[kind if copy.works else f"not {kind}"] += len(slots.slots)
        if copy.is_store:
            self.pair.finish(slots.slots, stored=slots.generations[0] if copy.works else None)
            return
        if not copy.works:
            blocks = frozenset(copy.job.blocks.block_ids)
            self.pair.failed[job_id] = FailedLoad(copy.job.request_id, blocks, "drawn")
            self.pair.refuse(slots.slots, slots.generations)
        self.pair.finish(slots.slots)

    def _places(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        """Yield (block, group, index in the request) of a job, as its slots' keys have it."""
        job, size = copy.job, self.setup.blocks_per_chunk
        request = self.requests[job.request_id]
        keys = iter(self.pair.ours.keys_of(job.slots.slots, job.slots.generations))
        blocks = iter(job.blocks.block_ids)
        for group, (count, first) in enumerate(
            zip(job.blocks.group_sizes, job.blocks.first_blocks, strict=True)
        ):
            tokens = self.setup.groups[group][0]
            skip, left = first % size, count
            while left:
                key = next(keys)
                number = request.block_hashes.index(key[:-4]) + 1
                start = number * self.setup.tokens_per_hash // tokens - size
                assert key == make_key(request.block_hashes[number - 1], group)
                for index in range(start + skip, start + min(size, skip + left)):
                    yield next(blocks), group, index
                    left -= 1
                skip = 0
        assert next(keys, None) is None

    # -- contents ------------------------------------------------------------------------------

    def _is(self, block: int, request: Request, group: int, index: int) -> bool:
        """Return whether ``block`` holds just what ``request`` has at ``index``."""
        written = self._contents.get(block)
        if written is None or (written.group, written.whole) != (group, True):
            return False
        if written.place != index:
            return False
        end = (index + 1) * self.setup.groups[group][0] // self.setup.tokens_per_hash - 1
        hashes = self.requests[written.req_id].block_hashes
        if written.req_id == request.request_id:
            return True  # Under async scheduling its last tokens may not be known yet.
        return len(hashes) > end < len(request.block_hashes) and (
            hashes[end] == request.block_hashes[end]
        )

    def _holds(self, request: Any, group: int, blocks: Sequence[int], end: int) -> bool:
        tokens = self.setup.groups[group][0]
        first = end // tokens - len(blocks)
        now = len(self.requests[request.request_id].block_hashes)
        computing = now if request.is_finished() else request.num_computed_tokens // tokens
        return bool(blocks) and all(
            self._is(block, request, group, at) or at >= computing
            for at, block in enumerate(blocks, start=first)
        )
