"""The calls of the CUDA driver as C code receives them, in a library built for the test."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CudaError, UnsupportedError
from kvtier.memory.cuda_api import Addresses, CudaApi, SourceOrder

SHIM = Path(__file__).parents[1] / "support/cuda_shim.c"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
HEADERS = [
    folder
    for folder in {each.resolve() for each in Path("/usr/local").glob("cuda*/include")}
    if (folder / "cuda.h").is_file()
]
CONTEXT = "7000000000000028"
STREAM = 0x5555_6666_7777_8888

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def build(target: Path, *options: str) -> Path:
    assert COMPILER
    arguments = ["-shared", "-fPIC", "-Wall", "-Werror", *options, "-o", str(target), str(SHIM)]
    subprocess.run([COMPILER, *arguments], check=True)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim") / "libcuda.so")


class Shim:
    """A library of its own, with the calls it received."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._log = (ctypes.c_char * (1 << 16)).in_dll(self._library, "shim_log")

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def fail(self, call: str, error: int) -> None:
        (ctypes.c_char * 64).in_dll(self._library, "shim_failing").value = call.encode()
        self.set("shim_error", error)

    def take(self) -> list[str]:
        calls = self._log.value.decode().splitlines()
        self._log.value = b""
        return calls

    def open(self, device: int = 0) -> CudaApi:
        return CudaApi(device, library=str(self.path))


@pytest.fixture
def shim(built: Path, tmp_path: Path) -> Shim:
    path = tmp_path / "libcuda.so"
    shutil.copy(built, path)  # another file is another library, with its own variables
    return Shim(path)


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_the_library_of_the_tests_has_the_types_of_cudas_own_header(
    header: Path, tmp_path: Path
) -> None:
    build(tmp_path / "checked.so", "-DHAVE_CUDA_H", f"-I{header}")


def test_the_context_of_the_device_becomes_that_of_the_calling_thread(shim: Shim) -> None:
    api = shim.open()
    assert shim.take() == [
        "cuInit 0",
        "cuDeviceGet 0",
        "cuDevicePrimaryCtxRetain 40",
        "cuGetProcAddress_v2 cuMemcpyBatchAsync 12080 0",
    ]
    api.bind()
    assert shim.take() == [f"cuCtxSetCurrent {CONTEXT}"]
    shim.open(3).bind()
    assert shim.take()[-1] == "cuCtxSetCurrent 700000000000002b"


def test_memory_is_registered_by_address_and_bytes(shim: Shim) -> None:
    api = shim.open()
    shim.take()
    api.register(0x7FFF_0000_1000, 64 << 30)
    api.unregister(0x7FFF_0000_1000)
    assert shim.take() == [
        "cuMemHostRegister_v2 0x7fff00001000 68719476736 0",
        "cuMemHostUnregister 0x7fff00001000",
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [(2, r"CUDA_ERROR_OUT_OF_MEMORY \(2\)"), (9999, r"unknown error \(9999\)")],
)
def test_an_error_names_the_call_and_what_cuda_calls_it(
    shim: Shim, error: int, text: str
) -> None:
    api = shim.open()
    shim.fail("cuMemHostRegister_v2", error)
    with pytest.raises(CudaError, match=f"cuMemHostRegister_v2: {text}"):
        api.register(4096, 4096)
    shim.fail("cuMemcpyBatchAsync", error)
    with pytest.raises(CudaError, match=f"cuMemcpyBatchAsync of 1 copies: {text}"):
        api.copy_batch(*Copies(b"a").table, order=SourceOrder.ANY, stream=1)


@pytest.mark.parametrize("answer", [0, 1])
def test_the_device_says_whether_kernels_may_use_the_hosts_addresses(
    shim: Shim, answer: int
) -> None:
    api = shim.open(2)
    shim.take()
    shim.set("shim_uses_host_addresses", answer)
    assert api.uses_host_addresses is bool(answer)
    assert shim.take() == ["cuDeviceGetAttribute 91 42"]


class Copies:
    """Copies of some contents, each from a buffer of its own to another."""

    def __init__(self, *contents: bytes) -> None:
        self._sources = [ctypes.create_string_buffer(each, len(each)) for each in contents]
        self._destinations = [ctypes.create_string_buffer(len(each)) for each in contents]
        self.table: tuple[Addresses, Addresses, Addresses] = (
            np.array([ctypes.addressof(each) for each in self._destinations], np.int64),
            np.array([ctypes.addressof(each) for each in self._sources], np.int64),
            np.array([len(each) for each in contents], np.int64),
        )

    @property
    def copied(self) -> list[bytes]:
        return [bytes(each) for each in self._destinations]


@pytest.mark.parametrize("order", SourceOrder)
def test_a_batch_arrives_with_all_its_copies_and_the_order_of_its_sources(
    shim: Shim, order: SourceOrder
) -> None:
    api = shim.open()
    shim.take()
    contents = [b"one", b"twenty", b"3" * 5000]
    copies = Copies(*contents)
    api.copy_batch(*copies.table, order=order, stream=STREAM)
    assert copies.copied == contents
    (call,) = shim.take()
    assert call == (
        f"cuMemcpyBatchAsync 3 order {order.value} hints 0 0 0 0 flags 0 first 0 of 1 "
        f"stream {STREAM:x}"
    )


def test_a_part_of_a_table_is_copied_and_no_more(shim: Shim) -> None:
    api = shim.open()
    copies = Copies(b"a", b"b", b"c", b"d")
    destinations, sources, nbytes = (each[1:3] for each in copies.table)
    api.copy_batch(destinations, sources, nbytes, order=SourceOrder.STREAM, stream=STREAM)
    assert copies.copied == [b"\0", b"b", b"c", b"\0"]


def test_no_copies_are_no_call(shim: Shim) -> None:
    api = shim.open()
    shim.take()
    api.copy_batch(*Copies().table, order=SourceOrder.ANY, stream=STREAM)
    assert shim.take() == []


def test_a_driver_that_is_too_old_for_batches_still_locks_memory(shim: Shim) -> None:
    shim.set("shim_has_batches", 0)
    api = shim.open()
    api.register(4096, 4096)
    with pytest.raises(UnsupportedError, match=r"CUDA 12\.8"):
        api.copy_batch(*Copies(b"a").table, order=SourceOrder.ANY, stream=STREAM)


def test_a_machine_without_a_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be used"):
        CudaApi(0, library=str(tmp_path / "libcuda.so.1"))


def test_a_library_that_lacks_a_function_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cuInit"):
        CudaApi(0, library="libc.so.6")


def test_a_device_that_does_not_exist_is_an_error(shim: Shim) -> None:
    shim.fail("cuDeviceGet", 101)
    with pytest.raises(CudaError, match="cuDeviceGet"):
        shim.open(7)
