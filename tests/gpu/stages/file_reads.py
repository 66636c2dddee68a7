"""Reads of one large file into GPU memory, past the page cache."""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch

from kvtier.memory import ControlBlock, RegionGeometry
from kvtier.memory.copy import Copier, KVBlocks
from kvtier.memory.copy_plan import plan_copy
from kvtier.memory.cuda_driver import CudaDriver
from kvtier.memory.direct_files import PosixFiles
from kvtier.memory.gds_staging import GdsStaging
from kvtier.memory.kvikio_files import open_direct_files
from kvtier.memory.part_hashes import Hashes, HashPlanner, open_hasher
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import use_one_torch_thread
from kvtier.os.iopool import IoPool
from kvtier.types import GdsReads, Job, Purpose, SlotFileId
from kvtier.units import format_size
from tests.gpu.bench import Bench
from tests.gpu.machine import file_system
from tests.gpu.torch_device import page_locked, random_bytes, seconds

_NBYTES: Final = 1 << 30
_PIECE_NBYTES: Final = 4 << 20
_THREADS: Final = 8
_SHORT_S: Final = 1.5
"""A read takes about as long: of a slow disk only a part of the file is read."""
_LEAST_NBYTES: Final = 64 << 20
_PATIENCE_S: Final = 60.0


class File:
    """A file of random bytes, and their copy on the device.

    Args:
        bench: The stage's bench.
        path: The file.
        nbytes: Its size.
    """

    def __init__(self, bench: Bench, path: Path, nbytes: int) -> None:
        self.device = bench.device
        self.path = path
        self.expected = random_bytes(bench.device, nbytes)
        self.into = torch.empty_like(self.expected)
        with path.open("wb") as file:
            file.write(self.expected.cpu().numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())

    def shorten(self, nbytes: int) -> None:
        """Let reads end after ``nbytes``."""
        self.expected, self.into = self.expected[:nbytes], self.into[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes that a read reads."""
        return self.into.numel()

    def forget(self) -> None:
        """Drop the file from the page cache."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


Read = Callable[[], object]


@contextmanager
def _by_preadv(file: File) -> Iterator[Read]:
    """Yield threads that read pieces with direct I/O, each into memory that is copied on."""
    flags = os.O_RDONLY | os.O_DIRECT
    try:
        descriptor = os.open(file.path, flags)
    except OSError:  # a file system in memory
        descriptor = os.open(file.path, os.O_RDONLY)
    pieces = range(0, file.nbytes, _PIECE_NBYTES)
    buffer = torch.frombuffer(mmap.mmap(-1, _THREADS * _PIECE_NBYTES), dtype=torch.int8)
    rooms = buffer.view(_THREADS, _PIECE_NBYTES)

    def read(thread: int) -> None:
        room = rooms[thread]
        for offset in pieces[thread::_THREADS]:
            place = file.into[offset : offset + _PIECE_NBYTES]
            nbytes = os.preadv(descriptor, [room.numpy()[: place.numel()].data], offset)
            if nbytes != place.numel():
                raise OSError(f"{nbytes} bytes of {place.numel()} at {offset}")
            place.copy_(room[:nbytes])  # waits, so the room is free again

    try:
        with page_locked(file.device, buffer), ThreadPoolExecutor(_THREADS) as threads:
            yield lambda: list(threads.map(read, range(_THREADS)))
    finally:
        os.close(descriptor)


@contextmanager
def _by_kvikio(file: File) -> Iterator[Read]:
    """Yield kvikio's read of the whole file, on the route that it chose."""
    import kvikio  # noqa: PLC0415 - optional
    import kvikio.defaults  # noqa: PLC0415

    into = file.into if file.device == "cuda" else file.into.numpy()
    kvikio.defaults.set({"num_threads": _THREADS, "task_size": _PIECE_NBYTES})
    with kvikio.CuFile(str(file.path), "r") as opened:

        def read() -> None:
            nbytes = opened.pread(into, size=file.nbytes).get()
            if nbytes != file.nbytes:
                raise OSError(f"{nbytes} bytes of {file.nbytes}")

        yield read


@contextmanager
def _by_kvtier(file: File) -> Iterator[Read]:
    """Yield kvtier's load of the file as slots of a tier: read, verified, copied to blocks."""
    from kvtier.transfer.device import DeviceLoadRoute  # noqa: PLC0415 - needs pydantic
    from kvtier.transfer.gds_route import GdsLoadRoute  # noqa: PLC0415

    slot_nbytes = math.gcd(file.nbytes, _PIECE_NBYTES)
    slots = file.nbytes // slot_nbytes
    device = file.into.device
    driver = None if device.type == "cpu" else CudaDriver(device)
    kv = KVBlocks([file.into.view(torch.int8).view(slots, -1)], [[(0, slot_nbytes)]])
    geometry = RegionGeometry(slots, slot_nbytes, slot_nbytes, ranks=1)
    options: dict[str, Any] = {"share": RankShare(), "blocks_per_chunk": 1}
    ranges = HashPlanner(kv, geometry, **options).of_slots(
        file.expected.data_ptr(), [0] * slots
    )
    job = _job_of(file, open_hasher(driver).hash(ranges, slots))
    files = PosixFiles() if driver is None else open_direct_files(device)
    staging = GdsStaging(kv, geometry, files=files, driver=driver, **options)
    pools = [IoPool(1, name=name, prepare=use_one_torch_thread) for name in ("gds", "load")]
    control = ControlBlock(memoryview(bytearray(ControlBlock.nbytes(1, 1))), slots=1, ranks=1)
    ram = DeviceLoadRoute(cast("Copier", None), control, rank=0, pool=pools[1])
    route = GdsLoadRoute(staging, ram, control, rank=0, reader=pools[0], pool=pools[1])

    def read() -> None:
        ended = asyncio.run(route.run(job))
        if ended.error:
            raise OSError(ended.error)

    try:
        yield read
    finally:
        for pool in pools:
            pool.close(timeout_s=_PATIENCE_S)
        staging.close()


def _job_of(file: File, hashes: Hashes) -> Job:
    """Return the load of all slots of the file, slot i to block i."""
    from kvtier.transfer.device import LoadPayload  # noqa: PLC0415 - needs pydantic

    slots = list(range(len(hashes)))
    numbers = [-2 - slot for slot in slots]
    status = file.path.stat()
    identity = SlotFileId("nvme", str(file.path), status.st_dev, status.st_ino)
    plan = plan_copy(slots, [len(slots)], [0], numbers, blocks_per_chunk=1)
    reads = GdsReads(identity, slots, slots, hashes.tobytes())
    payload = LoadPayload(plan, None, [0] * len(slots), _PATIENCE_S, reads)
    return Job(0, Purpose.LOAD, "gds", "gpu", (), numbers, numbers, _PATIENCE_S, payload)


def run(bench: Bench) -> None:
    """Measure each way that is there."""
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-") as scratch:
        bench.fact("file system", file_system(Path(scratch)))
        file = File(bench, Path(scratch) / "file", bench.sized(_NBYTES, 1 << 20))
        _fit(file)
        bench.fact("read", format_size(file.nbytes))
        ways = {"preadv": _by_preadv, "kvikio": _by_kvikio, "kvtier": _by_kvtier}
        measures: dict[str, Callable[[], None]] = {
            name: partial(_measure, bench, file, name, way) for name, way in ways.items()
        }
        measures["fio"] = partial(_measure_fio, bench, file)
        for name in bench.while_time(measures):
            try:
                measures[name]()
            except (ImportError, RuntimeError, OSError) as error:
                bench.fact(name, f"not measured: {type(error).__name__}: {error}")


def _fit(file: File) -> None:
    """Shorten the reads if the disk is slow."""
    with _by_preadv(file) as read:
        file.forget()
        taken_s = seconds(file.device, read)
    if taken_s > _SHORT_S:
        pieces = int(file.nbytes * _SHORT_S / taken_s) // _PIECE_NBYTES
        file.shorten(max(pieces * _PIECE_NBYTES, min(_LEAST_NBYTES, file.nbytes)))


def _measure(bench: Bench, file: File, name: str, way: Callable[[File], Any]) -> None:
    rates = []
    with way(file) as read:
        read()
        for _ in bench.runs(share_s=8):
            file.into.zero_()
            file.forget()
            rates.append(file.nbytes / seconds(file.device, read) / 1e9)
            bench.require_right(torch.equal(file.into, file.expected), "load", method=name)
    bench.figure("load", rates, "GB/s", method=name)


def _measure_fio(bench: Bench, file: File) -> None:
    program = shutil.which("fio")
    if program is None:
        bench.fact("fio", "not installed")
        return
    share = file.nbytes // _THREADS
    command = [program, "--name=read", f"--filename={file.path}", "--rw=read", "--direct=1"]
    command += [f"--bs={_PIECE_NBYTES}", "--ioengine=psync", "--thread", "--output-format=json"]
    command += [f"--numjobs={_THREADS}", "--group_reporting"]
    command += [f"--size={share}", f"--offset_increment={share}"]
    rates = []
    for _ in bench.runs(share_s=8):
        file.forget()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-200:])
        report = json.loads(done.stdout[done.stdout.index("{") :])
        rates.append(report["jobs"][0]["read"]["bw_bytes"] / 1e9)
    bench.figure("load", rates, "GB/s", method="fio", note="into RAM")
