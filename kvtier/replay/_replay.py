"""Sets up a replay, runs it, and compares its figures with the simulator's."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from kvtier.config import (
    KvtierConfig,
    TraceConfig,
    check_chunk_fits,
    resolve_load_path,
    slot_nbytes,
)
from kvtier.connector.device import DeviceEngine
from kvtier.connector.figures import TierFigures
from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.connector.transfers import transfer_type_of
from kvtier.connector.worker import ConnectorWorker, WorkerOptions
from kvtier.errors import ConfigError, KvtierError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopyPlan
from kvtier.memory.paged import PagedMemory
from kvtier.memory.slot_layout import shard_of
from kvtier.replay._batching import Batcher, BatchLimits
from kvtier.replay._engine import Connector, ReplayCounts, ReplayEngine
from kvtier.replay._requests import (
    ReplayRequest,
    make_requests,
    pick_requests,
    shorten_sessions,
    with_chains,
)
from kvtier.sim.cache import (
    CacheResult,
    StepModel,
    default_time_model,
    simulate_cache,
    wait_quantiles,
)
from kvtier.sim.timing import TierSpeed
from kvtier.sim.traces import Trace
from kvtier.transfer import bounce_slots_for
from kvtier.types import LayoutFingerprint
from kvtier.units import approximate_size

__all__ = ["ReplayOptions", "ReplayResult", "ReplayedTraffic", "replay_trace"]

_LAYERS = 4
_CALIBRATION_NBYTES = 64 << 20
_CALIBRATION_ROUNDS = 5
_MEET_TIMEOUT_S = 60.0
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Settings of a replay.

    Attributes:
        chunk_bytes: Bytes of one of the trace's chunks.
        gpu_bytes: Bytes of the paged KV memory.
        speedup: Factor by which arrivals are accelerated.
        requests: Requests to replay; None for all.
        tokens_per_s: Tokens computed per second; None for a rate that keeps the engine busy
            70 % of the time without a cache.
        output_tokens: Most tokens a request generates.
        step_tokens: Most tokens of a step.
        step_s: Least time of a step that computes.
        concurrency: Most requests that have blocks or are looked up.
        speeds: Measured speeds of the slower tiers, for the prediction.
    """

    chunk_bytes: int
    gpu_bytes: int
    speedup: float = 1.0
    requests: int | None = None
    tokens_per_s: float | None = None
    output_tokens: int = 16
    step_tokens: int = 2048
    step_s: float = 0.005
    concurrency: int = 32
    speeds: Mapping[str, TierSpeed] | None = None


@dataclass(frozen=True, slots=True)
class ReplayedTraffic:
    """Transfers of one tier.

    Attributes:
        name: The tier's name.
        hits: Chunks loaded into the GPU from this tier.
        predicted_hits: The simulator's prediction of ``hits``.
        read_bytes: Bytes read from the tier.
        read_bytes_per_s: Mean rate of a read; several reads run at once.
        written_bytes: Bytes written to the tier from faster tiers or the GPU.
        write_bytes_per_s: Mean rate of a write.
        failed_chunks: Chunks with a failed or expired transfer, or wrong bytes.
        skipped_chunks: Chunks that were computed because the estimated load time was longer.
    """

    name: str
    hits: int
    predicted_hits: int
    read_bytes: int
    read_bytes_per_s: float
    written_bytes: int
    write_bytes_per_s: float
    failed_chunks: int
    skipped_chunks: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The figures of a replay, and the simulator's prediction.

    Attributes:
        trace: The trace's name.
        requests: Requests served.
        skipped_requests: Requests whose prompt does not fit the KV memory.
        refs: Chunk references.
        seconds: Time from the first arrival to the last token.
        counts: Counts of the engine's work.
        preemptions: Number of preemptions.
        tiers: Transfers of each tier, fastest first.
        hit_ratio: Chunks loaded, as a share of all references.
        ttft_s: Time to first token: ``p50``, ``p90``, ``p99``.
        predicted: The simulator's result for the same requests.
    """

    trace: str
    requests: int
    skipped_requests: int
    refs: int
    seconds: float
    counts: ReplayCounts
    preemptions: int
    tiers: tuple[ReplayedTraffic, ...]
    hit_ratio: float
    ttft_s: Mapping[str, float]
    predicted: CacheResult

    def apart(self) -> dict[str, float]:
        """Return the relative errors of the prediction."""
        shares = {
            name: self.predicted.ttft_s[name] / seconds - 1 if seconds else 0.0
            for name, seconds in self.ttft_s.items()
        }
        hits = self.predicted.total_hit_ratio
        shares["hit_ratio"] = hits / self.hit_ratio - 1 if self.hit_ratio else hits
        return shares


def replay_trace(
    trace: Trace,
    config: KvtierConfig,
    options: ReplayOptions,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> ReplayResult:
    """Replay ``trace`` through the tiers of ``config``, with real bytes.

    Stores are in temporary directories beside the directories of ``config``.

    Args:
        trace: The trace. Prompts are rounded up to whole chunks.
        config: The configuration. ``load_path: auto`` means the same as with kvtier's
            connector.
        options: Settings.
        progress: Called with the share of requests that arrived.

    Raises:
        ConfigError: The chunk size, the memory and the configuration do not fit together.
        KvtierError: A tier cannot be opened, or a load returned wrong bytes.
    """
    config = resolve_load_path(config)
    per_chunk = config.engine.blocks_per_chunk
    if trace.chunk_tokens % per_chunk or options.chunk_bytes % per_chunk:
        raise ConfigError(
            f"chunks of {trace.chunk_tokens} tokens and {options.chunk_bytes} bytes cannot be "
            f"cut into engine.blocks_per_chunk = {per_chunk} blocks: use a divisor of both"
        )
    trace = _prepare(trace, options)
    check_chunk_fits(config, options.chunk_bytes)
    guess = default_time_model(config, trace)
    model = StepModel(
        prefill_tokens_per_s=options.tokens_per_s or guess.prefill_tokens_per_s,
        concurrency=options.concurrency,
        speeds=guess.speeds,
        step_tokens=options.step_tokens,
        step_s=options.step_s,
    )
    with _scratch_stores(config) as own, _Bench(trace, own, options, model) as bench:
        speeds = {**model.speeds, **(options.speeds or {}), own.ram.name: bench.copy_speed}
        model = replace(model, speeds=speeds)
        served, seconds = bench.serve(progress)
        kept = [int(request.request_id) for request in served]
        predicted = simulate_cache(
            pick_requests(trace, kept), own, chunk_bytes=options.chunk_bytes, model=model
        )
        waits = [request.first_token_s - request.arrival_s for request in served]
        figures, moved = bench.figures(), bench.moved()
        names = [tier.name for tier in figures]
        refs = predicted.refs
        return ReplayResult(
            trace=trace.name,
            requests=len(served),
            skipped_requests=trace.requests - len(served),
            refs=refs,
            seconds=seconds,
            counts=bench.counts,
            preemptions=bench.preemptions,
            tiers=tuple(
                _traffic(tier, names[:number] or ["gpu"], guess.hits, moved)
                for number, (tier, guess) in enumerate(
                    zip(figures, predicted.tiers, strict=True)
                )
            ),
            hit_ratio=sum(tier.hit_chunks for tier in figures) / max(refs, 1),
            ttft_s=wait_quantiles(np.array(waits)),
            predicted=predicted,
        )


class _Bench:
    """Open resources of a replay: memory, tiers, both sides of the connector, the engine."""

    def __init__(
        self, trace: Trace, config: KvtierConfig, options: ReplayOptions, model: StepModel
    ) -> None:
        per_chunk = config.engine.blocks_per_chunk
        block_tokens = trace.chunk_tokens // per_chunk
        block_nbytes = options.chunk_bytes // per_chunk
        limits = BatchLimits(
            blocks=options.gpu_bytes // block_nbytes + 1,
            block_tokens=block_tokens,
            step_tokens=options.step_tokens,
            requests=options.concurrency,
        )
        memory = PagedMemory(layers=_LAYERS, blocks=limits.blocks, block_nbytes=block_nbytes)
        geometry = _geometry(config, options.chunk_bytes)
        name = f"replay-{os.getpid()}-{next(_NUMBERS)}"
        with contextlib.ExitStack() as stack:
            region = HostRegion.create(
                name,
                geometry,
                attachers=1,
                timeout_s=_MEET_TIMEOUT_S,
                huge_pages=config.ram.huge_pages,
            )
            stack.callback(region.close)
            self.copy_speed = _measure_copies(memory, geometry, limits, per_chunk)
            worker = ConnectorWorker(
                memory.kv,
                HostRegion.attach(name, geometry, timeout_s=_MEET_TIMEOUT_S),
                WorkerOptions(
                    rank=0,
                    share=shard_of(0),
                    blocks_per_chunk=per_chunk,
                    close_timeout_s=config.transfer.close_timeout_s,
                ),
            )
            stack.callback(worker.shutdown)
            scheduling = SchedulerOptions(
                groups=(CacheGroup(block_tokens),),
                tokens_per_hash=block_tokens,
                blocks_per_chunk=per_chunk,
                shares_blocks=False,
            )
            self._service = _open_service(config, region, scheduling, stack)
            self._scheduler = ConnectorScheduler(self._service, scheduling)
            stack.callback(self._scheduler.shutdown)
            self._stack = stack.pop_all()
        self._batcher = self._scheduler.tables = Batcher(self._scheduler, limits)
        self._requests = make_requests(trace, blocks_per_chunk=per_chunk)
        self._token_nbytes = options.chunk_bytes // trace.chunk_tokens
        self._engine = ReplayEngine(
            Connector(self._service, self._scheduler, worker),
            self._batcher,
            memory,
            block_tokens=block_tokens,
            model=model,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def counts(self) -> ReplayCounts:
        """Counts of the engine's work."""
        return self._engine.counts

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        return self._batcher.preemptions

    def serve(self, progress: Callable[[float], None]) -> tuple[list[ReplayRequest], float]:
        """Serve the requests that fit the memory; return them and the elapsed seconds."""
        requests = list(self._requests)
        fitting = [
            request
            for request in requests
            if request.num_prompt_tokens + request.output_tokens
            <= self._batcher.longest_prompt_tokens
        ]
        if not fitting:
            tokens = min(
                request.num_prompt_tokens + request.output_tokens for request in requests
            )
            raise ConfigError(
                "no prompt fits the KV memory, and the shortest takes "
                f"{approximate_size(tokens * self._token_nbytes)}: raise --gpu-memory or lower "
                "--chunk-bytes"
            )
        seconds = self._engine.serve(
            fitting, progress=lambda arrived: progress(arrived / len(fitting))
        )
        return fitting, seconds

    def moved(self) -> Mapping[str, tuple[int, float]]:
        """Return the copied bytes and the seconds spent, by transfer type."""
        return self._scheduler.take_transfers().totals()

    def figures(self) -> list[TierFigures]:
        """Return the tiers' figures."""
        return list(self._service.statistics().tiers)


def _geometry(config: KvtierConfig, chunk_bytes: int) -> RegionGeometry:
    """Return the shape of the RAM tier and the bounce buffer, for an engine of one rank."""
    slot_bytes = slot_nbytes(chunk_bytes)
    return RegionGeometry(
        slots=config.ram.capacity_bytes // slot_bytes,
        slot_nbytes=slot_bytes,
        stripe_nbytes=chunk_bytes,
        stripes=1,
        ranks=1,
        bounce_slots=bounce_slots_for(config, slot_bytes),
    )


def _open_service(
    config: KvtierConfig,
    region: HostRegion,
    scheduling: SchedulerOptions,
    stack: contextlib.ExitStack,
) -> CacheService:
    """Open the tiers and return the cache over them; ``stack`` closes the tiers."""
    timeout_s = config.transfer.close_timeout_s
    slot_bytes = region.geometry.slot_nbytes
    layouts = build_layouts(scheduling)
    chunk_tokens = layouts[0].tokens_per_chunk
    storage = open_storage(
        config,
        region,
        LayoutFingerprint({"model": "kvtier replay", "chunk_nbytes": slot_bytes}),
        tokens_per_chunk=chunk_tokens,
        groups=[layout.reach for layout in layouts],
        record_events=False,
    )
    stack.callback(storage.close, timeout_s=timeout_s)
    return CacheService(
        storage,
        tokens_per_chunk=chunk_tokens,
        retain_s=config.placement.retain_s or 0.0,
        close_timeout_s=timeout_s,
    )


def _prepare(trace: Trace, options: ReplayOptions) -> Trace:
    """Return the requests to replay, with prompts in whole chunks and accelerated arrivals."""
    if options.requests is not None:
        trace = pick_requests(trace, range(min(options.requests, trace.requests)))
    trace = shorten_sessions(trace)
    trace = with_chains(trace, [list(dict.fromkeys(chain)) for chain in trace.chains()])
    lengths = np.diff(trace.offsets)
    return replace(
        trace,
        input_tokens=lengths * trace.chunk_tokens,
        output_tokens=np.minimum(trace.output_tokens, options.output_tokens),
        timestamps_s=trace.timestamps_s / options.speedup,
    )


@contextlib.contextmanager
def _scratch_stores(config: KvtierConfig) -> Iterator[KvtierConfig]:
    """Yield ``config`` with an empty temporary directory in place of every tier's directory.

    Request recording and shadow policies are off, because both are for live engines.
    """
    with contextlib.ExitStack() as stack:
        tiers = []
        for tier in config.tiers:
            if store := tier.local_store():
                scratch = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=".kvtier-replay-", dir=store.path.parent)
                )
                tier = tier.model_copy(update={store.key: Path(scratch) / "store"})  # noqa: PLW2901
            tiers.append(tier)
        own = {"tiers": tuple(tiers), "trace": TraceConfig(), "shadow": ()}
        yield config.model_copy(update=own)


def _measure_copies(
    memory: PagedMemory,
    geometry: RegionGeometry,
    limits: BatchLimits,
    blocks_per_chunk: int,
) -> TierSpeed:
    """Return the best measured copy rate between RAM slots and blocks.

    Uses a separate region.
    """
    chunks = min(
        max(_CALIBRATION_NBYTES // geometry.slot_nbytes, 1),
        geometry.slots,
        max((limits.blocks - 1) // blocks_per_chunk, 1),
    )
    name = f"replay-copies-{os.getpid()}-{next(_NUMBERS)}"
    region = HostRegion.create(
        name,
        replace(geometry, slots=chunks, bounce_slots=0),
        attachers=0,
        timeout_s=_MEET_TIMEOUT_S,
    )
    try:
        device = DeviceEngine(
            memory.kv,
            region,
            rank=0,
            share=shard_of(0),
            blocks_per_chunk=blocks_per_chunk,
            close_timeout_s=_MEET_TIMEOUT_S,
        )
    except BaseException:
        region.close()
        raise
    try:
        blocks = range(1, chunks * blocks_per_chunk + 1)
        plan = device.plan(list(blocks), [len(blocks)], [0], list(range(chunks)))
        load_s, store_s = _best_times(device, plan, [1] * chunks)
    finally:
        device.close()
    nbytes = chunks * geometry.slot_nbytes
    # No latency: the model already makes the engine wait for the end of a step.
    return TierSpeed(nbytes / load_s, nbytes / store_s, 0.0)


def _best_times(
    device: DeviceEngine, plan: BlockCopyPlan, generations: Sequence[int]
) -> tuple[float, float]:
    """Return the shortest times of a load and of a store of ``plan``, in seconds.

    Raises:
        KvtierError: A copy failed.
    """
    jobs = itertools.count()
    seconds: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(_CALIBRATION_ROUNDS):
        for way, start in (("store", device.store), ("load", device.load)):
            job_id = next(jobs)
            began_s = time.perf_counter()
            start(job_id, plan, generations)
            device.wait({job_id})
            seconds[way].append(time.perf_counter() - began_s)
            if not all(result.is_whole for result in device.poll()) or not device.idle:
                raise KvtierError(f"a {way} between RAM slots and blocks failed")
    return min(seconds["load"]), min(seconds["store"])


def _traffic(
    tier: TierFigures,
    above: Sequence[str],
    predicted_hits: int,
    moved: Mapping[str, tuple[int, float]],
) -> ReplayedTraffic:
    """Return the traffic of ``tier`` to the fastest tier ``above``, and from all of them."""
    read_bytes, read_s = moved.get(transfer_type_of(tier.name, above[0]), (0, 0.0))
    down = [moved.get(transfer_type_of(name, tier.name), (0, 0.0)) for name in above]
    written_bytes, written_s = sum(size for size, _ in down), sum(time for _, time in down)
    return ReplayedTraffic(
        name=tier.name,
        hits=tier.hit_chunks,
        predicted_hits=predicted_hits,
        read_bytes=read_bytes,
        read_bytes_per_s=read_bytes / read_s if read_s else 0.0,
        written_bytes=written_bytes,
        write_bytes_per_s=written_bytes / written_s if written_s else 0.0,
        failed_chunks=tier.failed_reads
        + tier.failed_writes
        + tier.failed_loads
        + tier.corrupt_chunks
        + tier.expired_chunks,
        skipped_chunks=tier.skipped_load_chunks,
    )
