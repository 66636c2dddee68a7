"""Copies on a CUDA stream, with a stand-in for CUDA that knows which devices were used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvtier.memory.streams import CudaStream

if TYPE_CHECKING:
    import pytest


@dataclass
class FakeStream:
    """A stream; nothing runs on it."""

    device: torch.device

    def synchronize(self) -> None:
        return


@dataclass
class FakeCuda:
    """Which device each thread is on, and which it was ever put on, as torch does it."""

    here: threading.local = field(default_factory=threading.local)
    used: set[int] = field(default_factory=set)

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        if index != getattr(self.here, "index", 0):
            self.here.index = index
            self.used.add(index)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self.here, "index", 0)
        self.set_device(stream.device)
        try:
            yield
        finally:
            self.set_device(before)


def test_copies_use_no_device_but_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    for name, made in {
        "set_device": cuda.set_device,
        "stream": cuda.stream,
        "Stream": FakeStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    stream = CudaStream(torch.device("cuda", 3), None)

    def copy() -> None:
        for _ in range(2):
            with stream.after(None):
                pass

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert cuda.used == {3}
