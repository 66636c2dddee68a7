"""Direct files for tests: reads that fail, come short, hang or wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from kvtier.memory.direct_files import (
    DirectFile,
    DirectFiles,
    DirectRead,
    PosixFiles,
    aligned,
)
from kvtier.types import SlotFileId
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    import torch

__all__ = ["ScriptedFiles", "file_id"]

PATIENCE_S = 30.0


def file_id(path: Path) -> SlotFileId:
    """Return the identity of the file at ``path`` now."""
    status = path.stat()
    return SlotFileId("nvme", str(path), status.st_dev, status.st_ino)


class ScriptedFiles(DirectFiles):
    """Reads through the page cache, with faults.

    Args:
        cuda: Has the memory to read into; None for memory of this process.

    Attributes:
        calls: Offset and bytes of each read.
        bad: Offsets of bytes that cannot be read.
        open_error: What opening a file raises.
        gate: While it is closed, reads hang.
        before: Called before each call of :meth:`DirectFile.read`.
        opened: Files that are open.
        staged: Staging memories that were not released.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self._posix = PosixFiles()
        self._cuda = cuda
        self.calls: list[tuple[int, int]] = []
        self.bad: set[int] = set()
        self.open_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[], None] = lambda: None
        self.opened = 0
        self.staged: list[torch.Tensor] = []

    @override
    def open(self, path: str) -> DirectFile:
        if self.open_error is not None:
            raise self.open_error
        self.opened += 1
        return _ScriptedFile(self, self._posix.open(path))

    @override
    def staging_memory(self, nbytes: int) -> torch.Tensor:
        if self._cuda is None:
            memory = self._posix.staging_memory(nbytes)
        else:
            memory = aligned(self._cuda.device_memory(nbytes + 4096), nbytes)
        self.staged.append(memory)
        return memory

    @override
    def release(self, memory: torch.Tensor) -> None:
        self.staged = [each for each in self.staged if each is not memory]


class _ScriptedFile(DirectFile):
    def __init__(self, files: ScriptedFiles, file: DirectFile) -> None:
        self._files = files
        self._file = file

    @override
    def read(self, reads: Sequence[DirectRead]) -> list[str]:
        assert self._files.gate.wait(PATIENCE_S)
        self._files.before()
        return [self._read(each) for each in reads]

    def _read(self, read: DirectRead) -> str:
        nbytes = read.into.numel()
        self._files.calls.append((read.offset, nbytes))
        if any(read.offset <= bad < read.offset + nbytes for bad in self._files.bad):
            return "Input/output error"
        return self._file.read([read])[0]

    @override
    def close(self) -> None:
        self._files.opened -= 1
        self._file.close()
