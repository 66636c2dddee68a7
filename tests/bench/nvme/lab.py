"""The bench all benches share: sizes, a directory, and a process for each peer."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tests.bench.nvme.isolation import IsolatedProcess
from tests.bench.nvme.measures import Passes
from tests.bench.nvme.passes import Peer, TransferSpec, transfer
from tests.bench.nvme.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MANAGED", "Lab", "Plan"]

MANAGED: tuple[Peer, ...] = ("native_fs", "kvtier")
"""The peers that are driven through vLLM's offloading interface."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        rounds: Rounds per figure.
        working_set_nbytes: Bytes of all requests.
        ram_nbytes: Bytes of the RAM tier.
        only: Names of the benches wanted.
    """

    rounds: int
    working_set_nbytes: int
    ram_nbytes: int
    only: frozenset[str]

    @property
    def disk_nbytes(self) -> int:
        """Bytes needed at most at any moment: fio's file, two stores, and some slack."""
        return 4 * self.working_set_nbytes + (6 << 30)

    def workload(self, chunk_nbytes: int) -> Workload:
        """Return the sizes for one chunk size."""
        return Workload(chunk_nbytes, self.working_set_nbytes, self.ram_nbytes)


class Lab:
    """Where benches run. A context manager: its processes end with it.

    Args:
        plan: What to run.
        directory: On the disk that is measured.
        console: Where progress is shown.

    Attributes:
        plan: What to run.
    """

    def __init__(self, plan: Plan, directory: Path, console: Console) -> None:
        self.plan = plan
        self._directory = directory
        self._console = console
        self._stack = contextlib.ExitStack()
        self._processes: dict[Peer, IsolatedProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def process(self, peer: Peer) -> IsolatedProcess:
        """Return the process that runs ``peer``; started when first needed."""
        if peer not in self._processes:
            self._processes[peer] = self._stack.enter_context(IsolatedProcess())
        return self._processes[peer]

    def transfer(self, spec: TransferSpec) -> Passes:
        """Run a store pass and a promote pass in the peer's process."""
        passes = self.process(spec.peer).run(transfer, spec)
        self.say(
            f"    store {passes.store.mb_per_s:.0f} MB/s, promote "
            f"{passes.promote.mb_per_s:.0f} MB/s, {passes.cpu_s_per_gib:.2f} core-s/GiB, "
            f"p99 {passes.p99_delay_ms:.2f} ms{_missed(passes)}"
        )
        return passes

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a new directory that is gone afterwards."""
        path = self._directory / name
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def say(self, words: str) -> None:
        """Show progress."""
        self._console.print(words, highlight=False)


def _missed(passes: Passes) -> str:
    missed = passes.missed_chunks
    return f", {missed} chunks missed" if missed else ""
