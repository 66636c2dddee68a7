"""Sets up a replay, runs it, and compares its figures with the simulator's."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvtier.config import (
    KvtierConfig,
    TraceConfig,
    check_chunk_fits,
    slot_nbytes,
)
from kvtier.connector.device import DeviceEngine
from kvtier.connector.figures import TierFigures
from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.connector.transfers import transfer_type_of
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import ConfigError, KvtierError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copiers import open_gds
from kvtier.memory.direct_files import PosixFiles
from kvtier.memory.paged import PagedMemory
from kvtier.memory.slot_layout import RankShare
from kvtier.replay._batching import Batcher
from kvtier.replay._engine import ReplayCounts, ReplayEngine
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
from kvtier.sim.time_model import TierSpeed
from kvtier.sim.traces import Trace
from kvtier.transfer import bounce_slots_for
from kvtier.types import LayoutFingerprint
from kvtier.units import approximate_size

__all__ = [
    "ReplayOptions",
    "ReplayResult",
    "ReplayedTraffic",
    "measure_copies",
    "open_engine",
    "replay_trace",
]

_LAYERS = 4
_OUTPUT_TOKENS = 16
"""Largest number of tokens that a request generates. The replay is about prompts."""
_STEP_TOKENS = 2048
_STEP_S = 0.005
"""Shortest duration of a computing step."""
_CONCURRENCY = 32
_CALIBRATION_NBYTES = 64 << 20
_CALIBRATION_ROUNDS = 5
_MEET_TIMEOUT_S = 60.0
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Settings of a replay.

    Attributes:
        chunk_bytes: Number of bytes of one chunk of the trace.
        gpu_bytes: Number of bytes of the paged KV memory.
        speedup: Factor by which arrivals are accelerated.
        requests: Number of requests to replay; None for all.
        tokens_per_s: Number of tokens computed per second. With None, the replay chooses a rate
            that would keep an engine without a cache busy for 70 % of the time.
        speeds: Measured speeds of the slower tiers, for the prediction.
    """

    chunk_bytes: int
    gpu_bytes: int
    speedup: float = 1.0
    requests: int | None = None
    tokens_per_s: float | None = None
    speeds: Mapping[str, TierSpeed] | None = None


@dataclass(frozen=True, slots=True)
class ReplayedTraffic:
    """Transfers of one tier.

    Attributes:
        name: The tier's name.
        hits: Number of chunks loaded into the GPU from this tier.
        predicted_hits: The simulator's prediction of ``hits``.
        read_bytes: Number of bytes read from the tier.
        read_bytes_per_s: Mean rate of one read, in bytes per second. Reads overlap.
        written_bytes: Number of bytes written to the tier from faster tiers or the GPU.
        write_bytes_per_s: Mean rate of one write, in bytes per second. Writes overlap.
        failed_chunks: Number of chunks with a failed or expired transfer, or with wrong bytes.
        skipped_chunks: Number of chunks that were computed, because loading them was estimated
            to take longer.
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
        requests: Number of served requests.
        skipped_requests: Number of requests whose prompt does not fit into the KV memory.
        refs: Number of chunks in all prompts; a chunk in two prompts counts twice.
        seconds: Seconds from the first arrival to the last token.
        counts: The counts of the engine's work.
        preemptions: Number of preemptions.
        tiers: Transfers of each tier, fastest first.
        hit_ratio: Number of loaded chunks, as a share of ``refs``.
        ttft_s: Seconds to the first token: ``p50``, ``p90``, ``p99``.
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
        """Return the relative errors of the predicted times and hit ratio, by name.

        The error is ``predicted / replayed - 1``. If the replayed value is 0, the error of a
        time is 0, and the error of the hit ratio is the predicted ratio.
        """
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

    The caches are in temporary directories beside the directories of ``config``.

    Args:
        trace: The trace. Prompts are rounded up to whole chunks.
        config: The configuration.
        options: Settings.
        progress: Called with the share of arrived requests, from 0 to 1.

    Raises:
        ConfigError: The chunk size, the memory and the configuration do not fit together.
        KvtierError: A tier cannot be opened, or a load returned wrong bytes.
    """
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
        concurrency=_CONCURRENCY,
        speeds={**guess.speeds, **(options.speeds or {})},
        step_tokens=_STEP_TOKENS,
        step_s=_STEP_S,
    )
    with _scratch_directories(config) as own:
        return _replay(trace, own, options, model, progress)


def _replay(
    trace: Trace,
    config: KvtierConfig,
    options: ReplayOptions,
    model: StepModel,
    progress: Callable[[float], None],
) -> ReplayResult:
    """Replay the requests that fit the memory, and simulate the same requests."""
    per_chunk = config.engine.blocks_per_chunk
    block_nbytes = options.chunk_bytes // per_chunk
    blocks = options.gpu_bytes // block_nbytes + 1
    memory = PagedMemory(layers=_LAYERS, blocks=blocks, block_nbytes=block_nbytes)
    speed = measure_copies(memory, config, options.chunk_bytes)
    model = replace(model, speeds={**model.speeds, config.ram.name: speed})
    # A prompt needs room for one generated token.
    room_tokens = (blocks - 2) * trace.chunk_tokens // per_chunk
    requests = _fitting(trace, options.chunk_bytes, room_tokens, per_chunk)
    with open_engine(trace, config, options.chunk_bytes, memory, model) as engine:
        seconds = engine.serve(
            requests, progress=lambda arrived: progress(arrived / len(requests))
        )
        kept = [int(request.request_id) for request in requests]
        predicted = simulate_cache(
            pick_requests(trace, kept), config, chunk_bytes=options.chunk_bytes, model=model
        )
        waits = [request.first_token_s - request.arrival_s for request in requests]
        figures = engine.cache.statistics().tiers
        moved = engine.cache.take_transfers().totals()
        names = [tier.name for tier in figures]
        return ReplayResult(
            trace=trace.name,
            requests=len(requests),
            skipped_requests=trace.requests - len(requests),
            refs=predicted.refs,
            seconds=seconds,
            counts=engine.counts,
            preemptions=engine.batcher.preemptions,
            tiers=tuple(
                _traffic(tier, names[:number] or ["gpu"], guess.hits, moved)
                for number, (tier, guess) in enumerate(
                    zip(figures, predicted.tiers, strict=True)
                )
            ),
            hit_ratio=sum(tier.hit_chunks for tier in figures) / max(predicted.refs, 1),
            ttft_s=wait_quantiles(np.array(waits)),
            predicted=predicted,
        )


def _fitting(
    trace: Trace, chunk_bytes: int, room_tokens: int, blocks_per_chunk: int
) -> list[ReplayRequest]:
    """Return the requests with at most ``room_tokens`` tokens in prompt plus answer.

    Raises:
        ConfigError: No request fits.
    """
    requests = list(make_requests(trace, blocks_per_chunk=blocks_per_chunk))
    tokens = [request.num_prompt_tokens + request.output_tokens for request in requests]
    if min(tokens) > room_tokens:
        raise ConfigError(
            "no prompt fits the KV memory, and the shortest takes "
            f"{approximate_size(min(tokens) * (chunk_bytes // trace.chunk_tokens))}: raise "
            "--gpu-memory or lower --chunk-bytes"
        )
    return [
        each for each, needed in zip(requests, tokens, strict=True) if needed <= room_tokens
    ]


@contextlib.contextmanager
def open_engine(
    trace: Trace,
    config: KvtierConfig,
    chunk_bytes: int,
    memory: PagedMemory,
    model: StepModel,
) -> Iterator[ReplayEngine]:
    """Yield an engine with the memory, the tiers and both sides of the connector."""
    per_chunk, timeout_s = config.engine.blocks_per_chunk, config.transfer.close_timeout_s
    block_tokens = trace.chunk_tokens // per_chunk
    scheduling = SchedulerOptions(
        groups=(CacheGroup(block_tokens),),
        tokens_per_hash=block_tokens,
        blocks_per_chunk=per_chunk,
        shares_blocks=False,
    )
    name = f"replay-{os.getpid()}-{next(_NUMBERS)}"
    geometry = _geometry(config, chunk_bytes)
    with contextlib.ExitStack() as stack:
        region = HostRegion.create(
            name,
            geometry,
            attachers=1,
            timeout_s=_MEET_TIMEOUT_S,
            huge_pages=config.ram.huge_pages,
        )
        stack.callback(region.close)
        attached = HostRegion.attach(name, geometry, timeout_s=_MEET_TIMEOUT_S)
        device = _open_device(memory, attached, config)
        worker = ConnectorWorker(device, ram_name=config.ram.name)
        stack.callback(worker.shutdown)
        storage = open_storage(
            config,
            region,
            LayoutFingerprint({"model": "kvtier replay", "chunk_nbytes": geometry.slot_nbytes}),
            tokens_per_chunk=trace.chunk_tokens,
            groups=[layout.reach for layout in build_layouts(scheduling)],
            record_events=False,
        )
        stack.callback(storage.close, timeout_s=timeout_s)
        cache = CacheService(
            storage,
            tokens_per_chunk=trace.chunk_tokens,
            retain_s=config.placement.retain_s or 0.0,
            close_timeout_s=timeout_s,
        )
        stack.callback(cache.shutdown)
        scheduler = ConnectorScheduler(cache, scheduling)
        scheduler.tables = batcher = Batcher(
            scheduler,
            blocks=len(memory.kv.tensors[0]),
            block_tokens=block_tokens,
            step_tokens=model.step_tokens,
            concurrency=model.concurrency,
        )
        yield ReplayEngine(cache, worker, batcher, memory, model)


def _open_device(memory: PagedMemory, region: HostRegion, config: KvtierConfig) -> DeviceEngine:
    """Return a :class:`DeviceEngine` that copies between ``memory`` and ``region``.

    Closing the engine closes ``region``.

    Without a GPU, GDS reads are reads into memory of this process.
    """
    per_chunk = config.engine.blocks_per_chunk
    with contextlib.ExitStack() as opened:
        opened.callback(region.close)
        gds = open_gds(
            config.gds,
            memory.kv,
            region,
            share=RankShare(),
            blocks_per_chunk=per_chunk,
            files=PosixFiles(),
        )
        if gds is not None:
            opened.callback(gds.close)
        device = DeviceEngine(
            memory.kv,
            region,
            rank=0,
            share=RankShare(),
            blocks_per_chunk=per_chunk,
            close_timeout_s=config.transfer.close_timeout_s,
            gds=gds,
        )
        opened.pop_all()
    return device


def _geometry(config: KvtierConfig, chunk_bytes: int) -> RegionGeometry:
    """Return the sizes of the RAM tier and the bounce buffer for an engine with one rank."""
    slot_bytes = slot_nbytes(chunk_bytes)
    return RegionGeometry(
        slots=config.ram.capacity_bytes // slot_bytes,
        slot_nbytes=slot_bytes,
        block_nbytes=chunk_bytes // config.engine.blocks_per_chunk,
        ranks=1,
        bounce_slots=bounce_slots_for(config, slot_bytes),
    )


def _prepare(trace: Trace, options: ReplayOptions) -> Trace:
    """Return the trace to replay, with prompts of whole chunks and accelerated arrivals."""
    if options.requests is not None:
        trace = pick_requests(trace, range(min(options.requests, trace.requests)))
    trace = shorten_sessions(trace)
    trace = with_chains(trace, [list(dict.fromkeys(chain)) for chain in trace.chains()])
    lengths = np.diff(trace.offsets)
    return replace(
        trace,
        input_tokens=lengths * trace.chunk_tokens,
        output_tokens=np.minimum(trace.output_tokens, _OUTPUT_TOKENS),
        timestamps_s=trace.timestamps_s / options.speedup,
    )


@contextlib.contextmanager
def _scratch_directories(config: KvtierConfig) -> Iterator[KvtierConfig]:
    """Yield ``config`` with an empty temporary directory in place of every tier's directory.

    Recording of requests and shadow policies are disabled, because both are for live engines.
    """
    with contextlib.ExitStack() as stack:
        tiers = []
        for tier in config.tiers:
            if store := tier.local_directory():
                scratch = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=".kvtier-replay-", dir=store.path.parent)
                )
                tier = tier.model_copy(update={store.key: Path(scratch) / "store"})  # noqa: PLW2901
            tiers.append(tier)
        own = {"tiers": tuple(tiers), "trace": TraceConfig(), "shadow": ()}
        yield config.model_copy(update=own)


def measure_copies(memory: PagedMemory, config: KvtierConfig, chunk_bytes: int) -> TierSpeed:
    """Measure copies between blocks and temporary RAM slots; return the best rates.

    Raises:
        KvtierError: A copy failed.
    """
    geometry = _geometry(config, chunk_bytes)
    blocks_per_chunk = config.engine.blocks_per_chunk
    chunks = min(
        max(_CALIBRATION_NBYTES // geometry.slot_nbytes, 1),
        geometry.slots,
        max((len(memory.kv.tensors[0]) - 1) // blocks_per_chunk, 1),
    )
    region = HostRegion.create(
        f"replay-copies-{os.getpid()}-{next(_NUMBERS)}",
        replace(geometry, slots=chunks, bounce_slots=0),
        attachers=0,
        timeout_s=_MEET_TIMEOUT_S,
    )
    with contextlib.closing(_open_device(memory, region, config)) as device:
        blocks = range(1, chunks * blocks_per_chunk + 1)
        plan = device.plan(list(blocks), [len(blocks)], [0], list(range(chunks)))
        best_s = {"store": math.inf, "load": math.inf}
        ways = [("store", device.store), ("load", device.load)] * _CALIBRATION_ROUNDS
        for job_id, (way, start) in enumerate(ways):
            began_s = time.perf_counter()
            start(job_id, plan, [1] * chunks)
            device.wait({job_id})
            best_s[way] = min(best_s[way], time.perf_counter() - began_s)
            if not all(result.is_whole for result in device.poll()) or not device.idle:
                raise KvtierError(f"a {way} between RAM slots and blocks failed")
    nbytes = chunks * geometry.slot_nbytes
    # The latency is 0, because the model already makes the engine wait for the step's end.
    return TierSpeed(nbytes / best_s["load"], nbytes / best_s["store"], 0.0)


def _traffic(
    tier: TierFigures,
    above: Sequence[str],
    predicted_hits: int,
    moved: Mapping[str, tuple[int, float]],
) -> ReplayedTraffic:
    """Return the traffic of ``tier``.

    Reads go to the next faster tier, ``above[0]``, or to the GPU. Writes come from ``above``.
    """
    up = [moved.get(transfer_type_of(tier.name, name), (0, 0.0)) for name in {above[0], "gpu"}]
    read_bytes, read_s = sum(size for size, _ in up), sum(time for _, time in up)
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
