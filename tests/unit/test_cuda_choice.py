"""Which way of copying is chosen at start, on a fake GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtier.errors import CudaError
from kvtier.memory import cuda_choice
from kvtier.memory.cuda_api import Addresses, SourceOrder
from kvtier.memory.cuda_choice import choose_methods
from kvtier.memory.fragments import Fragments
from tests.support.fake_cuda import FakeCuda, FakeStream

KIB = 1024
SCRATCH_NBYTES = 4 << 20
NO_EDGES = np.empty(0, np.int64)


class Gpu(FakeCuda):
    """A GPU whose clock shows only what copies cost."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))

    def choose(self, nbytes: int, *, count: int = 256) -> tuple[str | None, str | None]:
        """Return the methods chosen for so many ranges of so many bytes."""
        zeros = np.zeros(count, np.int64)
        chosen = choose_methods(self, Fragments(zeros, zeros, zeros + nbytes), NO_EDGES)
        store, load = chosen
        return store.name if store else None, load.name if load else None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()

    class Time:
        perf_counter = staticmethod(made.now_s)

    monkeypatch.setattr(cuda_choice, "time", Time)
    monkeypatch.setattr(cuda_choice, "SCRATCH_NBYTES", SCRATCH_NBYTES)
    yield made
    made.finish()
    assert not made.locked
    assert not made.violations
    assert all(stream.awaited == stream.queued for stream in made.copy_streams)


@pytest.mark.parametrize(
    ("kernel_gb_per_s", "nbytes", "chosen"),
    [
        (2000.0, 16 * KIB, "buffered"),
        (30.0, 16 * KIB, "batch"),
        (None, 16 * KIB, "batch"),
        (2000.0, 256 * KIB, "batch"),
        (2000.0, 16 * KIB + 4, "batch"),
    ],
)
def test_copies_are_buffered_where_that_is_clearly_faster(
    gpu: Gpu, kernel_gb_per_s: float | None, nbytes: int, chosen: str
) -> None:
    gpu.kernel_bytes_per_s = None if kernel_gb_per_s is None else kernel_gb_per_s * 1e9
    assert gpu.choose(nbytes) == (chosen, chosen)


def test_a_few_fragments_are_not_buffered(gpu: Gpu) -> None:
    gpu.kernel_bytes_per_s = 1e15
    assert gpu.choose(KIB, count=31) == ("batch", "batch")


def test_staging_is_not_tried_for_long_fragments(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.kernel_bytes_per_s = 1e15
    assert gpu.choose(1 << 20) == ("batch", "batch")
    assert "buffered" not in caplog.text


def test_one_line_says_which_way_how_fast_and_how_long_a_copy_is(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.kernel_bytes_per_s = 2000e9
    gpu.choose(16 * KIB)
    (line,) = (each.getMessage() for each in caplog.records if each.levelname == "INFO")
    assert line == (
        "copies between GPU and RAM: stores by buffered at 48.5 GB/s (not by batch at "
        "19.8 GB/s), loads by buffered at 48.5 GB/s (not by batch at 19.8 GB/s); a typical "
        "copy has 16.0 KiB"
    )


def test_without_batches_torch_copies(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.lacks_batches = True
    assert gpu.choose(KIB) == (None, None)
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
    assert gpu.choose(KIB) == ("batch", "batch")
    assert "stores are not copied by buffered" in caplog.text
    assert "loads are not copied by buffered" in caplog.text


def test_a_batch_that_loses_bytes_in_one_direction_is_used_in_the_other(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_batch = FakeStream.copy_batch

    def lose_the_last(stream: FakeStream, *table: Addresses, order: SourceOrder) -> None:
        count = len(table[0]) - (order is SourceOrder.STREAM)
        copy_batch(stream, *(each[:count] for each in table), order=order)

    monkeypatch.setattr(FakeStream, "copy_batch", lose_the_last)
    assert gpu.choose(KIB) == (None, "batch")


@pytest.mark.parametrize("lacking", ["pinned_words", "device_memory", "register"])
def test_without_memory_for_the_trial_batches_copy(
    gpu: Gpu, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        if lacking == "register":
            raise CudaError("there is no memory")
        raise torch.OutOfMemoryError("there is no memory")

    gpu.kernel_bytes_per_s = 1e15
    monkeypatch.setattr(gpu, lacking, refuse)
    assert gpu.choose(KIB) == ("batch", "batch")
    assert "there is no memory" in caplog.text


def test_a_trial_takes_no_more_scratch_memory_than_its_limit(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    give = gpu.device_memory

    def record(amount: int) -> torch.Tensor:
        asked.append(amount)
        return give(amount)

    monkeypatch.setattr(gpu, "device_memory", record)
    for nbytes, count in [(1 << 20, 40), (SCRATCH_NBYTES + 1, 1), (KIB, 5000)]:
        asked.clear()
        assert gpu.choose(nbytes, count=count) == ("batch", "batch")
        assert asked[0] == SCRATCH_NBYTES
