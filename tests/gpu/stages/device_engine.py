"""The engine's thread per job, and jobs from end to end, in kvtier's device engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvtier.memory import HostRegion
from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import RankShare
from kvtier.types import TransferResult
from kvtier.units import format_size
from tests.gpu.bench import Bench, SkippedStageError
from tests.gpu.paged import LAYERS, make_kv, opened_region
from tests.gpu.torch_device import synchronize

try:
    from kvtier.connector.device import DeviceEngine
except ModuleNotFoundError as error:
    raise SkippedStageError(f"{error}: see .ci/gpu_wheels") from error

PAGE_NBYTES: Final = 64 << 10
_CHUNKS: Final = (1, 16, 256, 2048)
_CLOSE_S: Final = 20.0
_JOB_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Job:
    """One job's times.

    Attributes:
        submit_us: On the engine's thread until the job is submitted.
        gb_per_s: Its bytes by the time until its result is there.
    """

    submit_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks that were stored.

    Attributes:
        blocks: The block of each.
        slots: The slot of each.
        stamps: What the store stamps each slot with.
    """

    blocks: npt.NDArray[np.int64]
    slots: list[int]
    stamps: list[int]


class Jobs:
    """Jobs of one engine.

    Blocks of the KV memory's first half are stored; loads fill their counterparts in the second
    half. Stores take the two halves of the slots in turn, so that one can run beside a load.
    """

    def __init__(self, engine: DeviceEngine, region: HostRegion, kv: KVBlocks) -> None:
        self._engine = engine
        self._region = region
        self._kv = kv
        self._half = kv.tensors[0].shape[0] // 2
        self._numbers = itertools.count(1)
        self._draw = np.random.default_rng(seed=1)
        self._stored = self._loaded = self._new_chunks(0)

    def store(self, chunks: int) -> Job:
        """Store new blocks."""
        self._stored = self._new_chunks(chunks)
        self._issue(self._stored)
        begun = time.perf_counter()
        return self._finish(begun, *self._submit_store(self._stored))

    def load(self) -> Job:
        """Load what was stored last."""
        self._loaded = self._stored
        self._issue(self._loaded)
        begun = time.perf_counter()
        return self._finish(begun, *self._submit_load(self._loaded))

    def both(self) -> Job:
        """Load what was stored last, and store as many new blocks at once."""
        self._loaded, self._stored = self._stored, self._new_chunks(len(self._stored.slots))
        self._issue(self._loaded, self._stored)
        begun = time.perf_counter()
        numbers, _ = self._submit_load(self._loaded)
        more, early = self._submit_store(self._stored)
        return self._finish(begun, numbers | more, early)

    def _new_chunks(self, chunks: int) -> Chunks:
        number = next(self._numbers)
        first = number % 2 * self._half
        slots = np.sort(self._draw.permutation(self._half)[:chunks]) + first
        blocks = self._draw.permutation(self._half)[:chunks]
        return Chunks(blocks, slots.tolist(), [number] * chunks)

    def _issue(self, *jobs: Chunks) -> None:
        """Count the jobs, as the scheduler side does when it plans them."""
        for chunks in jobs:
            self._region.control.issue(chunks.slots)

    def _submit_store(self, chunks: Chunks) -> tuple[set[int], list[TransferResult]]:
        number = next(self._numbers)
        plan = self._engine.plan(chunks.blocks, [len(chunks.slots)], [0], chunks.slots)
        self._engine.store(number, plan, chunks.stamps)
        self._engine.begin_stores()
        return {number}, []

    def _submit_load(self, chunks: Chunks) -> tuple[set[int], list[TransferResult]]:
        number = next(self._numbers)
        blocks = chunks.blocks + self._half
        plan = self._engine.plan(blocks, [len(chunks.slots)], [0], chunks.slots)
        self._engine.load(number, plan, chunks.stamps)
        return {number}, []

    def clear_loaded(self) -> None:
        """Make the blocks that loads fill wrong."""
        for tensor in self._kv.tensors:
            tensor[self._half :].zero_()

    def loaded_is_right(self) -> bool:
        """Return whether the last load filled its blocks with the right bytes."""
        blocks = torch.from_numpy(self._loaded.blocks).to(self._kv.tensors[0].device)
        return all(
            torch.equal(tensor[blocks], tensor[blocks + self._half])
            for tensor in self._kv.tensors
        )

    def _finish(self, begun: float, numbers: set[int], results: list[TransferResult]) -> Job:
        submitted = time.perf_counter()
        while len(results) < len(numbers):
            if not self._engine.wait_any(timeout_s=_JOB_S):
                raise TimeoutError(f"jobs did not end in {_JOB_S:.0f} s")
            results += self._engine.poll()
        ended = time.perf_counter()
        for result in results:
            if result.job_id not in numbers or not result.is_whole:
                raise RuntimeError(f"job {result.job_id} failed: {result.error}")
        nbytes = sum(result.nbytes for result in results)
        return Job((submitted - begun) * 1e6, nbytes / (ended - begun) / 1e9)


@contextmanager
def _opened(bench: Bench, chunks: int) -> Iterator[Jobs]:
    kv = make_kv(bench.device, 2 * chunks, PAGE_NBYTES)
    with opened_region("jobs", 2 * chunks, PAGE_NBYTES) as region:
        engine = DeviceEngine(
            kv,
            region,
            rank=0,
            share=RankShare(),
            blocks_per_chunk=1,
            close_timeout_s=_CLOSE_S,
        )
        try:
            yield Jobs(engine, region, kv)
        finally:
            engine.close()


def run(bench: Bench) -> None:
    """Measure jobs of several sizes."""
    counts: Sequence[int] = bench.sized(_CHUNKS, _CHUNKS[:2])
    with _opened(bench, max(counts)) as jobs:
        for chunks in bench.while_time(counts):
            _measure(bench, jobs, chunks)


def _measure(bench: Bench, jobs: Jobs, chunks: int) -> None:
    size = f"{chunks} x {format_size(LAYERS * PAGE_NBYTES)}"
    jobs.store(chunks)
    jobs.load()
    measured: dict[str, list[Job]] = {"store": [], "load": [], "both": []}
    for _ in bench.runs(share_s=bench.left_s / 4):
        measured["store"].append(jobs.store(chunks))
        for what, start in {"load": jobs.load, "both": jobs.both}.items():
            jobs.clear_loaded()
            synchronize(bench.device)
            measured[what].append(start())
            bench.require_right(jobs.loaded_is_right(), what, method="kvtier", size=size)
    for what, each in measured.items():
        rates = [job.gb_per_s for job in each]
        bench.figure(what, rates, "GB/s", method="kvtier", size=size)
        if what != "both":
            submits = [job.submit_us for job in each]
            bench.figure(f"submit {what}", submits, "us", method="kvtier", size=size)
