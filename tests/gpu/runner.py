"""Runs stages, each in a process group of its own with a time limit.

An error of CUDA stays in a process until it ends, and a hanging driver call cannot be
interrupted. So each stage is a process, and its whole group is killed when its time is up.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.gpu.bench import SKIPPED, Device
from tests.gpu.report import make_report
from tests.gpu.rows import STAGE_ROW, Row, append_row, read_rows

__all__ = ["PASSED", "Run", "Stage", "stopped_by_signals"]

ROOT: Final = Path(__file__).parents[2]
PASSED: Final = "passed"
_LEAST_S: Final = 2.0
"""Time limit below which a stage is not started."""
_REAP_S: Final = 10.0
_TAIL_NBYTES: Final = 2000


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run.

    Attributes:
        name: Its name, and that of its module in ``tests.gpu.stages``.
        seconds: Its time limit, less if the whole run has less time.
        about: What it does.
        needs_gpu: Whether it is left out where there is no CUDA device.
        decides: Whether the command fails if this stage does.
        module: Its module, if that has another name.
    """

    name: str
    seconds: float
    about: str
    needs_gpu: bool = True
    decides: bool = False
    module: str = ""


class Run:
    """One run of some stages, whose rows and output go to a directory.

    Args:
        out: The directory; it is created, and files of an earlier run are replaced.
        device: Where the stages copy; None if there is no CUDA device.
        environment: Environment of the stages.
        seconds: Time for all stages.
        command: What started it, for the report.
        say: Called with lines about progress.

    Attributes:
        rows_path: The rows, as JSON Lines.
        log_path: What the stages wrote.
        report_path: The report, written after each stage.
    """

    def __init__(
        self,
        out: Path,
        *,
        device: Device | None,
        environment: Mapping[str, str],
        seconds: float,
        command: str,
        say: Callable[[str], None],
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.rows_path = out / "rows.jsonl"
        self.log_path = out / "log.txt"
        self.report_path = out / "report.md"
        for path in (self.rows_path, self.log_path):
            path.write_bytes(b"")
        begun = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes")
        append_row(self.rows_path, Row("run", "begun", note=begun))
        append_row(self.rows_path, Row("run", "command", note=command))
        self._device = device
        self._environment = environment
        self._ends_at = time.monotonic() + seconds
        self._say = say
        self._results: dict[Stage, str] = {}

    def run(self, stages: Sequence[Stage]) -> None:
        """Run ``stages`` one after another.

        Raises:
            KeyboardInterrupt: A signal arrived. Rows and the report are written.
        """
        for number, stage in enumerate(stages):
            limit_s = self._limit_s(stages[number:])
            if stage.needs_gpu and self._device is None:
                self._end(stage, "skipped: no CUDA device", 0.0)
            elif limit_s < min(_LEAST_S, stage.seconds):
                self._end(stage, "not run: no time was left", 0.0)
            else:
                self._run_stage(stage, limit_s)

    @property
    def failed(self) -> bool:
        """Whether a stage that decides did not pass, or any copy had wrong bytes."""
        bad = any(
            stage.decides and not result.startswith((PASSED, "skipped"))
            for stage, result in self._results.items()
        )
        return bad or any(row.is_wrong for row in read_rows(self.rows_path))

    def report(self) -> str:
        """Return the report on all rows so far."""
        return make_report(read_rows(self.rows_path), judges=self._device != "cpu")

    def _limit_s(self, stages: Sequence[Stage]) -> float:
        """Return the time limit of the first of the ``stages`` that are left.

        It is the stage's own, less if all stages together do not have the time they ask for.
        """
        left_s = self._ends_at - time.monotonic()
        asked_s = sum(stage.seconds for stage in stages if self._device or not stage.needs_gpu)
        return stages[0].seconds * min(left_s / max(asked_s, 1e-9), 1.0)

    def _run_stage(self, stage: Stage, limit_s: float) -> None:
        self._say(f"{stage.name}: {stage.about} (at most {limit_s:.0f} s)")
        logged = self.log_path.stat().st_size
        begun = time.monotonic()
        try:
            with self.log_path.open("ab") as log, self._started(stage, limit_s, log) as process:
                result = _wait(process, limit_s)
        except KeyboardInterrupt:
            self._end(stage, "interrupted", time.monotonic() - begun)
            raise
        if result != PASSED:
            self._say(_tail(self.log_path, logged))
        self._end(stage, result, time.monotonic() - begun)

    @contextmanager
    def _started(
        self, stage: Stage, limit_s: float, log: IO[bytes]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a stage's process, and kill its group in the end."""
        command = [sys.executable, "-m", "tests.gpu.child"]
        command += [stage.module or f"tests.gpu.stages.{stage.name}", "--name", stage.name]
        command += ["--rows", str(self.rows_path), "--seconds", f"{limit_s:.1f}"]
        command += ["--device", self._device or "cpu"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=dict(self._environment),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            # Also what the stage started and left behind: the group is the stage's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                process.wait(_REAP_S)

    def _end(self, stage: Stage, result: str, seconds: float) -> None:
        self._results[stage] = result
        append_row(
            self.rows_path,
            Row(stage.name, STAGE_ROW, unit="s", median=seconds, runs=1, note=result),
        )
        self.report_path.write_text(self.report(), encoding="utf-8")
        self._say(f"{stage.name}: {result} after {seconds:.1f} s")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a stage's process and return the stage's result."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"killed at its limit of {limit_s:.0f} s"
    if code == SKIPPED:
        return "skipped"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"failed with {code}" if code else PASSED


def _tail(path: Path, start: int) -> str:
    """Return the end of what a file has after byte ``start``."""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_NBYTES))
        return file.read().decode("utf-8", "replace").rstrip()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM as well, which is how a time limit ends a command."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
