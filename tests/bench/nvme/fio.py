"""fio, the ceiling: what the disk gives a program that only moves bytes.

Its I/Os are of one chunk each. Reads follow the pattern of the tiers' requests: a random
place, a request's worth of chunks in sequence, the next random place. Writes are sequential,
the friendliest order there is. Engines: ``psync`` at queue depth 1; at 8 ``io_uring``, or
``libaio`` where that is not allowed. Its buffers lie where fio puts them by itself, and where
some huge pages are free in those as well: kvtier's RAM tier uses them, and small pages cost
direct I/O up to half of its speed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kvtier.doctor._machine import Machine
from kvtier.os.limits import huge_page_pool
from tests.bench.nvme.errors import BenchError
from tests.bench.nvme.machine import drop_page_cache
from tests.bench.nvme.workload import Workload

__all__ = ["QUEUE_DEPTHS", "Direction", "Fio", "Memory"]

Direction = Literal["read", "write"]
Memory = Literal["malloc", "shmhuge"]

QUEUE_DEPTHS = (1, 8)
_PROBE_NBYTES = 1 << 20
_HUGE_PAGES = 16
"""Eight buffers of 2 MiB, and what fio has besides."""


class Fio:
    """fio on one file, which is filled once.

    Args:
        path: The file.
        nbytes: Its size.

    Raises:
        BenchError: There is no fio, or it fails.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._program = _program()
        self._path = path
        self._nbytes = nbytes
        self.deep_engine = self._find_deep_engine()
        self.memories = self._find_memories()

    @staticmethod
    def version() -> str:
        """Return what ``fio --version`` says.

        Raises:
            BenchError: There is no fio.
        """
        command = [_program(), "--version"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    def fill(self) -> None:
        """Allocate the file and write all of it."""
        self._run(["--rw=write", "--bs=4m", "--ioengine=psync", *self._whole(self._nbytes)])

    def measure(
        self, direction: Direction, depth: int, memory: Memory, workload: Workload
    ) -> float:
        """Move the working set's bytes at a queue depth; return MB/s."""
        drop_page_cache()
        order = f"randread:{workload.chunks_per_request}" if direction == "read" else "write"
        report = self._run(
            [
                f"--rw={order}",
                "--norandommap",
                f"--bs={workload.chunk_nbytes}",
                f"--iodepth={depth}",
                f"--ioengine={'psync' if depth == 1 else self.deep_engine}",
                f"--mem={memory}",
                *self._whole(workload.nbytes),
            ]
        )
        return float(report["jobs"][0][direction]["bw_bytes"]) / 1e6

    def _whole(self, io_nbytes: int) -> list[str]:
        return [f"--size={self._nbytes}", f"--io_size={io_nbytes}"]

    def _find_deep_engine(self) -> str:
        for engine in ("io_uring", "libaio"):
            try:
                self._run(
                    [
                        "--rw=write",
                        "--bs=4k",
                        f"--ioengine={engine}",
                        "--iodepth=8",
                        f"--size={_PROBE_NBYTES}",
                    ]
                )
            except BenchError:
                continue
            return engine
        raise BenchError("fio can use neither io_uring nor libaio here: see `fio --enghelp`")

    def _find_memories(self) -> Sequence[Memory]:
        """Return where buffers may lie: fio's default, and huge pages if there are any."""
        if huge_page_pool(Machine().proc).free < _HUGE_PAGES:
            return ("malloc",)
        probe = ["--rw=write", "--bs=2m", "--ioengine=psync", f"--size={2 * _PROBE_NBYTES}"]
        try:
            self._run([*probe, "--mem=shmhuge"])
        except BenchError:
            return ("malloc",)
        return ("malloc", "shmhuge")

    def _run(self, options: Sequence[str]) -> dict[str, Any]:
        command = [
            self._program,
            "--name=bench",
            f"--filename={self._path}",
            "--direct=1",
            "--thread",
            "--randseed=20",
            "--output-format=json",
            *options,
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            said = (run.stderr or run.stdout).strip()[-300:]
            raise BenchError(f"fio failed with {run.returncode}: {said}")
        report: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])
        return report


def _program() -> str:
    found = shutil.which("fio")
    if found is None:
        raise BenchError("fio is not installed: install the Debian package fio")
    return found
