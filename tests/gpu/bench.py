"""What stages measure with.

A stage is a module with a function ``run`` that gets a :class:`Bench`. It also runs on a CPU
with small sizes, as a rehearsal, because its first run on a GPU may be its only one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar

from tests.gpu.rows import Row, append_row, figure_row

__all__ = ["SKIPPED", "Bench", "Device", "SkippedStageError", "WrongBytesError"]

T = TypeVar("T")
Device = Literal["cuda", "cpu"]
SKIPPED: Final = 77
RUNS: Final = 7
_FEWEST_RUNS: Final = 5
_MARGIN: Final = 0.85
"""Part of its time limit after which a stage begins nothing new."""


class SkippedStageError(Exception):
    """The machine lacks what a stage needs."""


class WrongBytesError(Exception):
    """A copy left wrong bytes."""


class Bench:
    """What one stage knows, and where it records what it finds.

    Args:
        stage: The stage.
        rows: File of the rows.
        device: The device to copy to and from.
        seconds: The stage's time limit.

    Attributes:
        stage: The stage.
        device: The device to copy to and from.
        rehearses: Whether the sizes are small, because there is no GPU.
        failed: Whether a part of the stage failed.
    """

    def __init__(self, stage: str, rows: Path, device: Device, seconds: float) -> None:
        self.stage = stage
        self.device: Device = device
        self.rehearses = device == "cpu"
        self.failed = False
        self._rows = rows
        self._seconds = seconds
        self._begun = time.monotonic()

    def sized(self, real: T, rehearsed: T) -> T:
        """Return ``real``, or ``rehearsed`` in a rehearsal."""
        return rehearsed if self.rehearses else real

    def fact(self, what: str, note: object) -> None:
        """Record a fact."""
        append_row(self._rows, Row(self.stage, what, note=str(note)))

    def figure(
        self,
        what: str,
        values: Sequence[float],
        unit: str,
        *,
        method: str = "",
        size: str = "",
        note: str = "",
    ) -> None:
        """Record a figure, given its value in each run."""
        row = figure_row(self.stage, what, values, unit, method=method, size=size, note=note)
        append_row(self._rows, row)

    def require_right(
        self, is_right: bool, what: str, *, method: str = "", size: str = ""
    ) -> None:
        """Check that a copy left the right bytes.

        Raises:
            WrongBytesError: It did not. A row says so.
        """
        if not is_right:
            row = Row(self.stage, what, method, size, is_wrong=True, note="after a copy")
            append_row(self._rows, row)
            raise WrongBytesError(f"{what} {size} {method}: wrong bytes after a copy")

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Let the stage go on if the body fails, and fail only in the end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - what fails is what is measured
            self.failed = True
            self.fact(what, f"failed: {type(error).__name__}: {error}")
            traceback.print_exc()

    def while_time(self, work: Iterable[T]) -> Iterator[T]:
        """Yield ``work`` until most of the stage's time is up; a row says what is left out."""
        items = list(work)
        for number, item in enumerate(items):
            if self.elapsed_s > self._seconds * _MARGIN:
                names = ", ".join(str(each) for each in items[number:])
                self.fact("left out for lack of time", names)
                return
            yield item

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds until the stage should begin nothing new."""
        return self._seconds * _MARGIN - self.elapsed_s

    def runs(self, share_s: float = 5.0) -> Iterator[int]:
        """Yield run numbers: seven, or at least five once ``share_s`` seconds have passed."""
        begun = time.monotonic()
        for number in range(self.sized(RUNS, 2)):
            if number >= _FEWEST_RUNS and time.monotonic() - begun > share_s:
                return
            yield number
