"""A GPU that runs queued work late, in any order that CUDA allows, and checks its callers.

Streams are queues. Queued work runs when somebody waits for it, or earlier at random. The
stream that runs next is random, and so is the order of the copies in a batch or a kernel.
Operations of torch within a stream's ``active`` block are queued as well. A source
that may be read at any time may be read at once.

"Device" memory is memory of this process, so a copy moves real bytes. One end of a batch's copy
must be in device memory and the other in one page-locked range. A kernel copies within device
memory. Anything else is a violation, which raises and is kept in :attr:`FakeCuda.violations`,
because the code under test may catch what is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

from kvtier.errors import CudaError, UnsupportedError
from kvtier.memory.cuda_api import Addresses, SourceOrder
from kvtier.memory.part_hashes import hash_on_host
from kvtier.memory.streams import CopyStream, Driver, Fence

__all__ = ["FakeCuda", "FakeFence", "FakeStream"]

_PATIENCE_S: Final = 30.0
_aten = torch.ops.aten
_DEFERRED: Final = (
    _aten.copy_.default,
    _aten.index_select.out,
    _aten.index_copy_.default,
)


class FakeFence(Fence):
    """A point in a stream.

    Attributes:
        copies: How many copies of each stream have ended at this point.
    """

    def __init__(self, cuda: FakeCuda, stream: FakeStream | None = None) -> None:
        self._cuda = cuda
        self.copies = {**stream.followed, stream: stream.queued} if stream else {}
        self.is_reached = False

    @override
    def wait(self) -> None:
        self._cuda.run_until(self)
        for stream, copies in self.copies.items():
            stream.awaited = max(stream.awaited, copies)


@dataclass
class _Work:
    """Queued work: steps in any order, after ``fence``."""

    steps: list[Callable[[], None]]
    fence: FakeFence | None = None
    expand: Callable[[], list[Callable[[], None]]] | None = None
    """Finds the steps when the work's turn comes."""


@dataclass(eq=False)
class FakeStream(CopyStream):
    """A queue of work.

    Attributes:
        queued: How many copies were queued so far.
        awaited: How many of them somebody waited for.
        followed: How many copies of other streams end before what is queued now.
    """

    cuda: FakeCuda
    name: str
    work: deque[_Work] = field(default_factory=deque)
    queued: int = 0
    awaited: int = 0
    followed: dict[FakeStream, int] = field(default_factory=dict)

    @override
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        before = self.cuda.active_stream
        self.cuda.active_stream = self
        try:
            with _Deferring(self):
                yield
        finally:
            self.cuda.active_stream = before

    @override
    def follow(self, fence: Fence) -> None:
        assert isinstance(fence, FakeFence)
        self._require_active()
        for stream, copies in fence.copies.items():
            self.followed[stream] = max(copies, self.followed.get(stream, 0))
        self.put(_Work([], fence))

    @override
    def record(self) -> FakeFence:
        fence = FakeFence(self.cuda, self)
        self.put(_Work([lambda: setattr(fence, "is_reached", True)]))
        return fence

    @override
    def copy_batch(
        self,
        destinations: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        *,
        order: SourceOrder,
    ) -> None:
        self._require_active()
        cuda = self.cuda
        if cuda.lacks_batches:
            raise UnsupportedError("the driver has no cuMemcpyBatchAsync")
        lengths = {len(destinations), len(sources), len(nbytes)}
        if len(lengths) != 1 or lengths == {0}:
            cuda.violated(f"a batch of {lengths} copies")
        cuda.spend(0.5e-6 * len(nbytes) + int(nbytes.sum()) / 50e9)
        copies = zip(destinations.tolist(), sources.tolist(), nbytes.tolist(), strict=True)
        steps = [cuda.copy(*copy, order=order) for copy in copies]
        self.queued += 1
        self.put(_Work(steps))

    @override
    def copy_by_kernel(self, table: Addresses, copies: int) -> None:
        self._require_active()
        cuda = self.cuda
        if cuda.kernel_bytes_per_s is None:
            raise UnsupportedError("Triton cannot be used")
        cuda.spend(int(table[:copies, 2].sum()) / cuda.kernel_bytes_per_s)
        self.queued += 1

        def expand() -> list[Callable[[], None]]:
            if (table[:copies] % 8).any():
                cuda.violated("a kernel copies whole words only")
            rows = table[:copies].tolist()
            return [cuda.copy_on_device(*row) for row in rows]

        self.put(_Work([], expand=expand))

    @override
    def hash_by_kernel(self, table: Addresses, sums: Addresses, ranges: int) -> None:
        self._require_active()
        cuda = self.cuda
        self.queued += 1

        def expand() -> list[Callable[[], None]]:
            return [cuda.hash_range(row, sums[at]) for at, row in enumerate(table[:ranges])]

        self.put(_Work([], expand=expand))

    def put(self, work: _Work) -> None:
        """Queue work; chance may run some."""
        with self.cuda.lock:
            self.work.append(work)
            self.cuda.lock.notify_all()
        self.cuda.drift()

    def can_run(self) -> bool:
        """Return whether the first work in the queue may run now."""
        if not self.work:
            return False
        fence = self.work[0].fence
        return fence is None or fence.is_reached

    def run_a_step(self) -> None:
        """Run one step of the first work in the queue."""
        work = self.work[0]
        if work.expand is not None:
            work.steps, work.expand = work.expand(), None
        if work.steps:
            work.steps.pop(self.cuda.chance.randrange(len(work.steps)))()
        if not work.steps:
            self.work.popleft()

    def _require_active(self) -> None:
        if self.cuda.active_stream is None:
            self.cuda.violated(f"stream {self.name} is used outside any block")


class FakeCuda(Driver):
    """The GPU.

    Args:
        chance: Decides what runs when.

    Attributes:
        violations: What callers did wrong.
        locked: Page-locked ranges: bytes by address.
        refuses_from: How many calls of :meth:`register` work before all others fail.
        lacks_batches: Whether the driver is too old for batches.
        kernel_bytes_per_s: Rate of the kernel within the device; None where there is no Triton.
            Batches have a rate of 50 GB/s, less half a microsecond for each copy.
        meanwhile: What other threads do while one waits; each is called once, in order.
        compute: The stream of the engine's computations.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.violations: list[str] = []
        self.locked: dict[int, int] = {}
        self.refuses_from: int | None = None
        self.lacks_batches = False
        self.kernel_bytes_per_s: float | None = None
        self.meanwhile: deque[Callable[[], None]] = deque()
        self.lock = threading.Condition(threading.RLock())
        self._device: list[tuple[int, int]] = []
        self._kept: list[object] = []
        self._streams: list[FakeStream] = []
        self._registered = 0
        self._seconds = 0.0
        self._here = threading.local()
        self._pending_gate: FakeFence | None = None
        self.compute = self._open("compute")

    # -- the driver ----------------------------------------------------------------------------

    @override
    def mark(self) -> FakeFence:
        return self.compute.record()

    @override
    def open_stream(self, *, is_urgent: bool = False) -> FakeStream:
        return self._open(f"copy {len(self._streams)}")

    @override
    def register(self, address: int, nbytes: int) -> None:
        self._registered += 1
        if self.refuses_from is not None and self._registered > self.refuses_from:
            raise CudaError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)")
        for start, length in self.locked.items():
            if address < start + length and start < address + nbytes:
                raise CudaError("cuMemHostRegister: ALREADY_REGISTERED (712)")
        self.locked[address] = nbytes

    @override
    def unregister(self, address: int) -> None:
        if address not in self.locked:
            raise CudaError("cuMemHostUnregister: NOT_REGISTERED (713)")
        if any(stream.work for stream in self.copy_streams):
            self.violated("memory is released while copies run")
        del self.locked[address]

    @override
    def pinned_words(self, rows: int, columns: int) -> Addresses:
        return np.zeros((rows, columns), np.int64)

    @override
    def device_memory(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.int8)
        self.own(memory)
        return memory

    # -- for tests -----------------------------------------------------------------------------

    @property
    def copy_streams(self) -> Sequence[FakeStream]:
        """All streams but the one of the engine's computations."""
        return self._streams[1:]

    @property
    def active_stream(self) -> FakeStream | None:
        """The stream that the calling thread has made active."""
        return getattr(self._here, "stream", None)

    @active_stream.setter
    def active_stream(self, stream: FakeStream | None) -> None:
        self._here.stream = stream

    def own(self, *memories: torch.Tensor) -> None:
        """Treat memory as device memory."""
        for memory in memories:
            storage = memory.untyped_storage()
            self._device.append((storage.data_ptr(), storage.nbytes()))
            self._kept.append(memory)

    def run_on_device(self, compute: Callable[[], None]) -> None:
        """Queue a computation of the engine."""
        self.compute.put(_Work([_without_modes(compute)]))

    def hold(self) -> Callable[[], None]:
        """Let the engine's computations get no further; return what lets them go on."""
        gate = FakeFence(self)
        self.compute.put(_Work([], gate))

        def release() -> None:
            with self.lock:
                gate.is_reached = True
                self.lock.notify_all()

        return release

    def run_until(self, fence: FakeFence) -> None:
        """Run work until a fence is reached."""
        with self.lock:
            while not fence.is_reached:
                if self.meanwhile and self.chance.random() < 0.3:
                    self._let_others_go_on()
                elif not self._run_something():
                    if self.meanwhile:
                        self._let_others_go_on()
                    elif not self.lock.wait(self.patience_s):
                        self.violated("nothing can run, so this wait never ends")

    def finish(self) -> None:
        """Run everything that is queued."""
        with self.lock:
            while self._run_something():
                pass
        left = [stream.name for stream in self._streams if stream.work]
        assert not left, f"streams {left} cannot get on"

    def abandon(self) -> None:
        """Forget everything that is queued."""
        self.meanwhile.clear()
        for stream in self._streams:
            stream.work.clear()

    def require_awaited(self) -> None:
        """Check that somebody has waited for every copy so far."""
        for stream in self.copy_streams:
            if stream.awaited < stream.queued:
                self.violated(f"nobody waited for a copy on stream {stream.name}")

    def now_s(self) -> float:
        """Return a time that only the caller's copies take."""
        return self._seconds

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self._seconds += seconds

    patience_s = 0.0
    """How long a wait may last while nothing can run; for tests with several threads."""

    # -- inside --------------------------------------------------------------------------------

    def copy_on_device(self, destination: int, source: int, nbytes: int) -> Callable[[], None]:
        """Return what copies some bytes within the device when its turn comes."""
        for address in (destination, source):
            if nbytes <= 0 or not self._is_device(address, nbytes):
                self.violated(f"{nbytes} bytes at {address:#x} are not on the device")

        def run() -> None:
            ctypes.memmove(destination, source, nbytes)

        return run

    def copy(
        self, destination: int, source: int, nbytes: int, *, order: SourceOrder
    ) -> Callable[[], None]:
        """Return what copies some bytes over the bus when its turn comes."""
        stores = self._is_device(source, nbytes)
        host, device = (destination, source) if stores else (source, destination)
        if nbytes <= 0 or not self._is_device(device, nbytes):
            self.violated(f"{nbytes} bytes at {device:#x} are not on the device")
        if not any(
            start <= host and host + nbytes <= start + length
            for start, length in self.locked.items()
        ):
            self.violated(f"{nbytes} bytes at {host:#x} are not in one page-locked range")
        if (order is SourceOrder.STREAM) is not stores:
            self.violated(f"{'a store' if stores else 'a load'} in order {order.name}")
        is_early = order is SourceOrder.ANY and self.chance.random() < 0.5
        early = ctypes.string_at(source, nbytes) if is_early else None

        def run() -> None:
            content = ctypes.string_at(source, nbytes) if early is None else early
            ctypes.memmove(destination, content, nbytes)

        return run

    def hash_range(self, row: Addresses, result: Addresses) -> Callable[[], None]:
        """Return what hashes a range when its turn comes."""
        address, _, words, _ = row.tolist()
        if words <= 0 or not self._is_device(address, 8 * words):
            self.violated(f"{words} words at {address:#x} are not on the device")

        def run() -> None:
            result[:] = hash_on_host(row[np.newaxis].copy()).view(np.int64)

        return run

    def drift(self) -> None:
        """Run some work, perhaps."""
        with self.lock:
            while self.chance.random() < 0.3 and self._run_something():
                pass

    def violated(self, what: str) -> NoReturn:
        """Report what a caller did wrong."""
        self.violations.append(what)
        raise AssertionError(what)

    def _open(self, name: str) -> FakeStream:
        stream = FakeStream(self, name)
        self._streams.append(stream)
        return stream

    def _is_device(self, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in self._device
        )

    def _run_something(self) -> bool:
        ready = [stream for stream in self._streams if stream.can_run()]
        if not ready:
            return False
        self.chance.choice(ready).run_a_step()
        self.lock.notify_all()
        return True

    def _let_others_go_on(self) -> None:
        stream, self.active_stream = self.active_stream, None
        with _disable_current_modes():
            self.meanwhile.popleft()()
        self.active_stream = stream


def _without_modes(call: Callable[[], object]) -> Callable[[], None]:
    """Return a call that torch runs at once, whoever runs it."""

    def run() -> None:
        with _disable_current_modes():
            call()

    return run


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues what torch writes, on a stream; views are made at once."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _DEFERRED:
            assert not func._schema.is_mutable, f"{func} is not queued"
            return func(*args, **named)
        self._stream.queued += 1
        self._stream.put(_Work([_without_modes(lambda: func(*args, **named))]))
        return named.get("out", args[0])
