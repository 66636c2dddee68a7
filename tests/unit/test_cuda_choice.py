"""Which way of copying is chosen at start, on a fake GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtier.memory import cuda_choice
from kvtier.memory.cuda_api import Addresses, SourceOrder
from kvtier.memory.cuda_choice import Choice, choose_methods
from kvtier.memory.fragments import Fragments
from tests.support.fake_cuda import FakeCuda, FakeStream

KIB = 1024
SLOTS_NBYTES = 4 << 20


class Gpu(FakeCuda):
    """A GPU with slots, whose clock shows only what copies cost."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.slots = np.zeros(SLOTS_NBYTES, np.int8)
        self.register(self.slots.ctypes.data, SLOTS_NBYTES)

    def places(self, nbytes: int, *, count: int = 40, gap_nbytes: int = 0) -> Fragments:
        """Return so many ranges of slots of so many bytes."""
        host = self.slots.ctypes.data + np.arange(count) * (nbytes + gap_nbytes)
        return Fragments(np.zeros(count, np.int64), host, np.full(count, nbytes))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()

    class Time:
        perf_counter = staticmethod(made.now_s)

    monkeypatch.setattr(cuda_choice, "time", Time)
    yield made
    made.finish()
    assert not made.violations
    assert all(stream.awaited == stream.queued for stream in made.copy_streams)


def names(chosen: Choice) -> tuple[str | None, str | None]:
    store, load = chosen
    return store.name if store else None, load.name if load else None


@pytest.mark.parametrize(
    ("kernel_gb_per_s", "nbytes", "chosen"),
    [
        (40.0, 16 * KIB, "kernel"),
        (10.0, 16 * KIB, "batch"),
        (None, 16 * KIB, "batch"),
        (1000.0, 64 * KIB, "batch"),
        (1000.0, 16 * KIB + 4, "batch"),
    ],
)
def test_loads_are_copied_by_what_is_faster_and_stores_in_batches(
    gpu: Gpu, kernel_gb_per_s: float | None, nbytes: int, chosen: str
) -> None:
    gpu.kernel_bytes_per_s = None if kernel_gb_per_s is None else kernel_gb_per_s * 1e9
    assert names(choose_methods(gpu, gpu.places(nbytes))) == ("batch", chosen)


def test_a_few_fragments_are_no_work_for_a_kernel(gpu: Gpu) -> None:
    gpu.kernel_bytes_per_s = 1e15
    assert names(choose_methods(gpu, gpu.places(KIB, count=31))) == ("batch", "batch")


def test_one_line_says_which_way_how_fast_and_how_long_a_copy_is(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.kernel_bytes_per_s = 40e9
    choose_methods(gpu, gpu.places(16 * KIB))
    (line,) = (each.getMessage() for each in caplog.records if each.levelname == "INFO")
    assert line == (
        "copies between GPU and RAM: stores by batch at 19.8 GB/s, loads by kernel at "
        "40.0 GB/s (not by batch at 19.8 GB/s); a typical copy has 16.0 KiB"
    )


def test_without_batches_torch_copies(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.lacks_batches = True
    assert names(choose_methods(gpu, gpu.places(KIB))) == (None, None)
    assert "stores by torch, loads by torch" in caplog.text
    assert "loads are not copied by batch: UnsupportedError" in caplog.text


def wrong_bytes(stream: FakeStream) -> None:
    stream.cuda.spend(1e-9)


def an_error_of_the_compiler(stream: FakeStream) -> None:
    raise KeyError("sm_90")


@pytest.mark.parametrize("fault", [wrong_bytes, an_error_of_the_compiler])
def test_a_kernel_that_does_not_work_is_not_used(
    gpu: Gpu,
    fault: Callable[[FakeStream], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(FakeStream, "copy_by_kernel", lambda stream, *_: fault(stream))
    assert names(choose_methods(gpu, gpu.places(KIB))) == ("batch", "batch")
    assert "loads are not copied by kernel" in caplog.text


def test_a_batch_that_loses_bytes_in_one_direction_is_used_in_the_other(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_batch = FakeStream.copy_batch

    def lose_the_last(stream: FakeStream, *table: Addresses, order: SourceOrder) -> None:
        count = len(table[0]) - (order is SourceOrder.STREAM)
        copy_batch(stream, *(each[:count] for each in table), order=order)

    monkeypatch.setattr(FakeStream, "copy_batch", lose_the_last)
    assert names(choose_methods(gpu, gpu.places(KIB))) == (None, "batch")


def test_without_table_or_scratch_memory_batches_copy(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("there is no memory")

    gpu.kernel_bytes_per_s = 1e15
    monkeypatch.setattr(gpu, "pinned_words", refuse)
    assert names(choose_methods(gpu, gpu.places(KIB))) == ("batch", "batch")
    monkeypatch.setattr(gpu, "device_memory", refuse)
    assert names(choose_methods(gpu, gpu.places(KIB))) == ("batch", "batch")
    assert "not tried before: there is no memory" in caplog.text


@pytest.mark.parametrize(
    ("nbytes", "count", "used"),
    [(1 << 20, 4, 4 << 20), (3 << 20, 1, 1 << 20), (KIB, 1030, 1 << 20)],
)
def test_a_trial_takes_no_more_scratch_memory_than_its_limit(
    gpu: Gpu, nbytes: int, count: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_choice, "SCRATCH_NBYTES", 1 << 20)
    asked: list[int] = []
    give = gpu.device_memory

    def record(amount: int) -> torch.Tensor:
        asked.append(amount)
        return give(amount)

    monkeypatch.setattr(gpu, "device_memory", record)
    assert names(choose_methods(gpu, gpu.places(nbytes, count=count))) == ("batch", "batch")
    assert asked == [1 << 20]


def test_bytes_between_the_places_stay_as_they_are(gpu: Gpu) -> None:
    places = gpu.places(KIB, gap_nbytes=8)
    gpu.slots[:] = 7
    choose_methods(gpu, places)
    for host in (places.host - gpu.slots.ctypes.data).tolist():
        assert (gpu.slots[host + KIB : host + KIB + 8] == 7).all()
