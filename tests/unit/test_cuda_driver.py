"""The real driver, with stand-ins for torch's CUDA and for the driver's library."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.cuda_api import CudaApi, SourceOrder
from kvtier.memory.cuda_driver import CudaDriver

if TYPE_CHECKING:
    from kvtier.memory.cuda_api import Addresses

NUMBERS = np.arange(3)


@dataclass
class FakeTorchCuda:
    """Streams and events that write down what happens to them; torch's rules for devices."""

    calls: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    here: threading.local = field(default_factory=threading.local)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, made in {
            "set_device": self.set_device,
            "stream": self.stream,
            "current_stream": lambda device: f"compute of {device}",
            "Stream": self.make_stream,
            "Event": self.make_event,
        }.items():
            patch.setattr(torch.cuda, name, made)

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        if index != getattr(self.here, "index", 0):
            self.here.index = index
            self.used.add(index)

    @contextlib.contextmanager
    def stream(self, stream: FakeTorchStream) -> Iterator[None]:
        before = getattr(self.here, "index", 0)
        self.set_device(stream.device)
        self.calls.append("begin")
        try:
            yield
        finally:
            self.calls.append("end")
            self.set_device(before)

    def make_stream(self, device: torch.device, *, priority: int) -> FakeTorchStream:
        self.calls.append(f"stream of priority {priority}")
        return FakeTorchStream(self, device)

    def make_event(self, *, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, "blocking event" if blocking else "event")


@dataclass
class FakeTorchStream:
    cuda: FakeTorchCuda
    device: torch.device
    cuda_stream: int = 0xABC

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(f"follow an {event.name}")

    def __str__(self) -> str:
        return "copies"


@dataclass
class FakeEvent:
    cuda: FakeTorchCuda
    name: str

    def record(self, stream: object) -> None:
        self.cuda.calls.append(f"record a {self.name} on {stream}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for a {self.name}")


@dataclass
class FakeApi:
    """The driver's functions; writes down their calls."""

    calls: list[str]
    uses_host_addresses: bool = True

    def bind(self) -> None:
        self.calls.append("bind")

    def register(self, address: int, nbytes: int) -> None:
        self.calls.append(f"register {address} {nbytes}")

    def unregister(self, address: int) -> None:
        self.calls.append(f"unregister {address}")

    def copy_batch(self, *table: Addresses, order: SourceOrder, stream: int) -> None:
        self.calls.append(f"copy {[len(each) for each in table]} {order.name} on {stream:x}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeTorchCuda:
    fake = FakeTorchCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def api(cuda: FakeTorchCuda) -> FakeApi:
    return FakeApi(cuda.calls)


@pytest.fixture
def driver(api: FakeApi) -> CudaDriver:
    return CudaDriver(torch.device("cuda", 3), cast("CudaApi", api))


def test_copies_use_no_device_but_their_own(cuda: FakeTorchCuda, driver: CudaDriver) -> None:
    stream = driver.open_stream()

    def copy() -> None:
        for _ in range(2):
            with stream.active():
                pass

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert cuda.used == {3}
    assert cuda.calls.count("bind") == 2  # the thread had no context


def test_copies_follow_the_compute_stream_and_the_thread_sleeps_until_they_end(
    cuda: FakeTorchCuda, driver: CudaDriver
) -> None:
    stream = driver.open_stream()
    fence = driver.mark()
    with stream.active():
        stream.follow(fence)
        stream.copy_batch(NUMBERS, NUMBERS, NUMBERS, order=SourceOrder.STREAM)
        stream.record().wait()
    assert cuda.calls == [
        "stream of priority 0",
        "record a event on compute of cuda:3",
        "bind",
        "begin",
        "follow an event",
        "copy [3, 3, 3] STREAM on abc",
        "record a blocking event on copies",
        "wait for a blocking event",
        "end",
    ]


def test_memory_is_registered_in_the_context_of_the_device(
    cuda: FakeTorchCuda, driver: CudaDriver
) -> None:
    driver.register(4096, 8192)
    driver.unregister(4096)
    assert cuda.calls == ["bind", "register 4096 8192", "bind", "unregister 4096"]


def test_a_kernel_needs_triton_and_the_hosts_addresses(
    driver: CudaDriver, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = driver.open_stream()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvtier.memory.cuda_kernel", raising=False)
    with pytest.raises(UnsupportedError, match="Triton cannot be used"):
        stream.copy_by_kernel(NUMBERS, 1)
    launched: list[Any] = []
    module = ModuleType("kvtier.memory.cuda_kernel")
    module.launch = lambda *arguments: launched.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    stream.copy_by_kernel(NUMBERS, 1)
    assert launched == [(NUMBERS, 1)]
    api.uses_host_addresses = False
    with pytest.raises(UnsupportedError, match="addresses"):
        stream.copy_by_kernel(NUMBERS, 1)
