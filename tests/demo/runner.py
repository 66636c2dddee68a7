"""Start the engine program and talk to it.

One process per engine: what kvtier promises across restarts and crashes can only be seen from
outside, and vLLM does not promise to start twice in one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kvtier.errors import KvtierError
from tests.demo.scenario import Report, Scenario

__all__ = ["EngineFailedError", "EngineProcess", "run_engine"]

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
TAIL_LINES = 40


class EngineFailedError(KvtierError):
    """The engine program ended without a report; the message ends with its log's tail."""


class EngineProcess:
    """One engine in a process, and a process group, of its own.

    Args:
        scenario: What it shall do.
        directory: Where its files go; exists.
        name: Prefix of the files' names.
        timeout_s: The engine is killed after this long.
    """

    def __init__(
        self, scenario: Scenario, directory: Path, name: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        source = directory / f"{name}.scenario.json"
        self.log = directory / f"{name}.log"
        self._report = directory / f"{name}.report.json"
        self._report.unlink(missing_ok=True)
        source.write_text(scenario.model_dump_json())
        with self.log.open("wb") as log:
            self._process = start([*command(scenario), str(source), str(self._report)], log)
        self._timeout_s = timeout_s
        self._is_late = False
        self._watchdog = threading.Timer(timeout_s, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def wait_for(self, event: str) -> None:
        """Wait until the engine says ``event``: ``ready``, ``wave`` after each, or ``done``.

        Raises:
            EngineFailedError: It ended first.
        """
        stdout = self._process.stdout
        for line in stdout or ():
            if line.strip() == event:
                return
        self._process.wait()
        raise EngineFailedError(self._failure(f"the engine ended before {event!r}"))

    def go(self) -> None:
        """Let an engine whose scenario is timed begin its next wave."""
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> Report:
        """Wait for the end and return the report.

        Raises:
            EngineFailedError: There is none.
        """
        for _ in self._process.stdout or ():
            pass
        if self._process.wait() != 0 or not self._report.exists():
            raise EngineFailedError(self._failure("the engine failed"))
        return Report.model_validate_json(self._report.read_text())

    def kill(self) -> None:
        """End the engine and its workers with SIGKILL; they get no chance to clean up."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._watchdog.cancel()
        self._watchdog.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _give_up(self) -> None:
        self._is_late = self._process.poll() is None
        self.kill()

    def _failure(self, what: str) -> str:
        if self._is_late:
            what = f"{what}: it was killed because it took more than {self._timeout_s:g} s"
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{what} (exit status {self._process.returncode}); its log:", *lines])


def start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[str]:
    """Start the engine program."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # its end tells the engine that this process is gone
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=ROOT,  # where ``tests.demo`` can be imported
        text=True,
        start_new_session=True,
    )


def command(scenario: Scenario) -> list[str]:
    """Return the command line that starts the engine program with its settings."""
    settings = dict(SETTINGS)
    if scenario.ranks > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if scenario.compute_threads:
        settings["OMP_NUM_THREADS"] = str(scenario.compute_threads)
    pairs = [f"{name}={value}" for name, value in settings.items()]
    return ["env", *pairs, sys.executable, "-m", "tests.demo.engine"]


def run_engine(
    scenario: Scenario, directory: Path, name: str, *, timeout_s: float = TIMEOUT_S
) -> Report:
    """Run one engine to its end.

    Raises:
        EngineFailedError: It did not get there, or not in time.
    """
    with EngineProcess(scenario, directory, name, timeout_s=timeout_s) as engine:
        return engine.result()
