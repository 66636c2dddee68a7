"""Copies by fragment size, direction and method; and both directions at once."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvtier.memory.cuda_api import CudaApi, SourceOrder
from kvtier.units import format_size, parse_size
from tests.gpu.bench import Bench
from tests.gpu.paged import Direction, PagedMemory, opened_memory
from tests.gpu.torch_device import on_new_stream, seconds, seconds_at_once

BOTH: Final = "both"
PARTS: Final = (
    *("64KiB", "16KiB", BOTH, "2MiB", "256KiB"),
    *("8KiB", "32KiB", "28KiB", "24KiB"),
)
"""Fragment sizes and both directions. Those behind are left out if time is short."""
_BOTH_NBYTES: Final = 64 << 10
_TOTAL_NBYTES: Final = 256 << 20
_AT_ONCE: Final = 8
_VERIFIED: Final = 1
"""Number of the run whose bytes are verified, beside those of a first run without a time."""
_VLLM_KERNEL_NBYTES: Final = 28 << 10
_VLLM_CHUNK_NBYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class CopyMethod:
    """One way to copy all fragments; a call returns when it submitted the copies, or later.

    Attributes:
        name: For the table.
        copies: What copies in each direction that the method has.
    """

    name: str
    copies: dict[Direction, Callable[[], object]]


def kvtier_methods(memory: PagedMemory) -> Iterator[CopyMethod]:
    """Yield what kvtier offers: first ``kvtier``, its own choice, to which the bars apply.

    The name of a method that it offers beside its own choice begins with ``kvtier``, too.
    """
    copier, plans = memory.copier, memory.plans
    yield CopyMethod(
        "kvtier",
        {
            "load": lambda: copier.load(plans["load"], after=copier.mark()),
            "store": lambda: copier.store(plans["store"], after=copier.mark()),
        },
    )


def loop_methods(memory: PagedMemory) -> Iterator[CopyMethod]:
    """Yield a loop with one copy call of torch for each fragment."""
    on_stream = on_new_stream(memory.device)
    loads, stores = memory.fragments("load"), memory.fragments("store")

    def load() -> None:
        with on_stream():
            for device, host in loads:
                device.copy_(host, non_blocking=True)

    def store() -> None:
        with on_stream():
            for device, host in stores:
                host.copy_(device, non_blocking=True)

    yield CopyMethod("loop", {"load": load, "store": store})


def vllm_methods(memory: PagedMemory) -> Iterator[CopyMethod]:
    """Yield what vLLM 0.32 does for a group of pages of this size.

    Loads of short pages take its Triton kernel, everything else one driver call for all pages.
    Without vLLM, kvtier makes that call, and loads of short pages are left out if the module
    with the kernel does not lie beside the wheels (.ci/gpu_wheels).
    """
    if memory.device == "cpu":
        return
    kernel = _vllm_kernel()
    copies: dict[Direction, Callable[[], object]] = {}
    if memory.page_nbytes >= _VLLM_KERNEL_NBYTES:
        copies["load"] = _driver_copy(memory, "load")
    elif kernel is not None:
        copies["load"] = _kernel_copy(memory, kernel.swap_blocks_batch)
    copies["store"] = _driver_copy(memory, "store")
    yield CopyMethod("vllm", copies)


def _kernel_copy(memory: PagedMemory, swap: Callable[..., object]) -> Callable[[], object]:
    on_stream = on_new_stream(memory.device)
    device, host, sizes = map(torch.tensor, _addresses(memory, "load"))
    chunk_nbytes = min(1 << (memory.page_nbytes - 1).bit_length(), _VLLM_CHUNK_NBYTES)

    def copy() -> None:
        with on_stream():
            swap(
                host, device, sizes, is_src_access_order_any=True, bytes_per_chunk=chunk_nbytes
            )

    return copy


def _driver_copy(memory: PagedMemory, direction: Direction) -> Callable[[], object]:
    api, on_stream = CudaApi(0), on_new_stream(memory.device)
    device, host, sizes = (np.array(each) for each in _addresses(memory, direction))
    loads = direction == "load"
    source, destination = (host, device) if loads else (device, host)
    order = SourceOrder.ANY if loads else SourceOrder.STREAM

    def copy() -> None:
        with on_stream():
            stream = torch.cuda.current_stream().cuda_stream
            api.copy_batch(destination, source, sizes, order=order, stream=stream)

    return copy


def _addresses(memory: PagedMemory, direction: Direction) -> tuple[list[int], ...]:
    """Return each page's address on the device, its address in the slots, and its bytes."""
    pairs = memory.fragments(direction)
    device = [each.data_ptr() for each, _ in pairs]
    host = [each.data_ptr() for _, each in pairs]
    return device, host, [memory.page_nbytes] * len(pairs)


def _vllm_kernel() -> Any:
    """Return vLLM's module with the copy kernel; None if it is not here.

    If it lies alone beside the wheels, it gets stand-ins for what it imports.
    """
    try:
        return importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
    except ImportError:
        pass
    names, package = types.ModuleType("vllm.triton_utils"), types.ModuleType("vllm")
    package.__dict__["_custom_ops"] = None
    try:
        names.__dict__["triton"] = importlib.import_module("triton")
        names.__dict__["tl"] = importlib.import_module("triton.language")
        sys.modules |= {"vllm": package, "vllm.triton_utils": names}
        return importlib.import_module("swap_blocks_triton")
    except ImportError:
        return None


METHODS: Final = (kvtier_methods, loop_methods, vllm_methods)


def run(bench: Bench) -> None:
    """Measure all parts."""
    total_nbytes = bench.sized(_TOTAL_NBYTES, 1 << 20)
    for part in bench.while_time(bench.sized(PARTS, PARTS[:3])):
        if part == BOTH:
            measure_both(bench, total_nbytes)
        else:
            measure_size(bench, parse_size(part), total_nbytes)


def measure_size(bench: Bench, page_nbytes: int, total_nbytes: int) -> None:
    """Measure all methods with fragments of ``page_nbytes``; one that fails stops no other."""
    with opened_memory(bench, page_nbytes, total_nbytes) as memory:
        for methods in METHODS:
            with bench.going_on(f"{methods.__name__} of {format_size(page_nbytes)}"):
                for method in methods(memory):
                    for direction in method.copies:
                        _measure(bench, memory, method, direction)


def _measure(
    bench: Bench, memory: PagedMemory, method: CopyMethod, direction: Direction
) -> None:
    size = format_size(memory.page_nbytes)
    copy = method.copies[direction]

    def verified() -> float:
        memory.prepare(direction)
        taken_s = seconds(bench.device, copy)
        bench.require_right(
            memory.is_right(direction), direction, method=method.name, size=size
        )
        return taken_s

    verified()
    rates = []
    for number in bench.runs(share_s=1.0):
        taken_s = verified() if number == _VERIFIED else seconds(bench.device, copy)
        rates.append(memory.nbytes / taken_s / 1e9)
    bench.figure(direction, rates, "GB/s", method=method.name, size=size)


def measure_both(bench: Bench, total_nbytes: int) -> None:
    """Measure loads beside stores of kvtier, each with memory of its own."""
    size = format_size(_BOTH_NBYTES)
    with (
        opened_memory(bench, _BOTH_NBYTES, total_nbytes, "loads") as loads,
        opened_memory(bench, _BOTH_NBYTES, total_nbytes, "stores") as stores,
    ):
        memories: dict[Direction, PagedMemory] = {"load": loads, "store": stores}
        copies = {
            direction: next(kvtier_methods(memory)).copies[direction]
            for direction, memory in memories.items()
        }

        def repeated(direction: Direction) -> None:
            for _ in range(_AT_ONCE):
                copies[direction]()

        calls = [lambda: repeated("load"), lambda: repeated("store")]
        for direction, memory in memories.items():
            memory.prepare(direction)
        nbytes = 2 * _AT_ONCE * loads.nbytes
        rates = [
            nbytes / seconds_at_once(bench.device, calls) / 1e9 for _ in bench.runs(share_s=10)
        ]
        for direction, memory in memories.items():
            bench.require_right(memory.is_right(direction), BOTH, method="kvtier", size=size)
        bench.figure(BOTH, rates, "GB/s", method="kvtier", size=size)
