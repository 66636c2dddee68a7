"""Read files into GPU memory with the library kvikio.

kvikio decides for each file how to read it. It uses GPUDirect Storage if the driver and the
file system support that. Otherwise kvikio reads through its own page-locked buffers. Both ways
bypass the page cache.

Two properties of kvikio matter here. A read in progress keeps neither the buffer nor the file
alive, so :meth:`_KvikioFile.read` waits for every read that it began, even after an error. A
read first waits for the default CUDA stream, in the calling thread. This wait cannot be
disabled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from typing_extensions import override

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.memory.direct_files import DirectFile, DirectFiles, DirectRead, aligned
from kvtier.os.packages import KVIKIO_PACKAGES, installed_kvikio

__all__ = ["KvikioFiles", "open_direct_files"]

_THREADS: Final = 8
_TASK_NBYTES: Final = 4 << 20
_PAGE_NBYTES: Final = 4096


def open_direct_files(device: torch.device) -> DirectFiles:
    """Return an object that opens files for reading into the memory of ``device``.

    Raises:
        ConfigError: kvikio is installed for another major version of CUDA than torch.
        UnsupportedError: The machine has no GPU, or kvikio cannot be used.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"the KV cache is on the {device.type}, and not on a GPU")
    major = (torch.version.cuda or "").partition(".")[0]
    check_packages(major)
    try:
        import kvikio  # noqa: PLC0415 - optional, and takes long
        import kvikio.defaults  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"kvikio cannot be used ({error}); pip install 'kvtier[gds-cu{major}]'"
        ) from error
    return KvikioFiles(kvikio, device)


def check_packages(major: str) -> None:
    """Check that kvikio is installed for version ``major`` of CUDA, and for no other version.

    A kvikio for another version would load a second CUDA runtime, and could fail late or
    silently.

    Raises:
        ConfigError: kvikio is installed for another version.
        UnsupportedError: kvikio is not installed.
    """
    wanted = KVIKIO_PACKAGES.get(major)
    installed = installed_kvikio()
    others = [name for name in installed if name != wanted]
    if others:
        remedy = f"pip uninstall {others[0]}"
        if wanted:
            remedy += f" && pip install 'kvtier[gds-cu{major}]'"
        raise ConfigError(
            f"{others[0]} is installed, and torch is built for CUDA {major or 'none'}: {remedy}"
        )
    if wanted not in installed:
        raise UnsupportedError(
            f"{wanted or 'kvikio'} is not installed; pip install 'kvtier[gds-cu{major}]'"
        )


class KvikioFiles(DirectFiles):
    """Opens files with kvikio.

    Args:
        kvikio: The package.
        device: The GPU.
    """

    def __init__(self, kvikio: Any, device: torch.device) -> None:  # noqa: ANN401 - untyped
        self._kvikio = kvikio
        self._device = device
        settings = {"num_threads": _THREADS, "task_size": _TASK_NBYTES}
        kvikio.defaults.set({**settings, "auto_direct_io_read": True})

    @override
    def open(self, path: str) -> DirectFile:
        return _KvikioFile(self._kvikio.CuFile(path, "r"), self._device)

    @override
    def staging_memory(self, nbytes: int) -> torch.Tensor:
        whole = torch.empty(nbytes + _PAGE_NBYTES, dtype=torch.int8, device=self._device)
        memory = aligned(whole, nbytes)
        # Without the GDS driver this call fails, and kvikio reads through its own buffers.
        with contextlib.suppress(RuntimeError):
            self._kvikio.memory_register(memory)
        return memory

    @override
    def release(self, memory: torch.Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # the memory was not registered
            self._kvikio.memory_deregister(memory)


class _KvikioFile(DirectFile):
    def __init__(self, file: Any, device: torch.device) -> None:  # noqa: ANN401 - untyped
        self._file = file
        self._device = device

    @override
    def read(self, reads: Sequence[DirectRead]) -> list[str]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        begun: list[Any] = []
        for each in reads:
            try:
                nbytes = each.into.numel()
                begun.append(self._file.pread(each.into, nbytes, each.offset))
            except (OSError, RuntimeError, ValueError) as error:
                begun.append(error)
        return [_end(future, each) for future, each in zip(begun, reads, strict=True)]

    @override
    def close(self) -> None:
        self._file.close()


def _end(future: Any, read: DirectRead) -> str:  # noqa: ANN401 - untyped
    """Wait until ``read`` has ended; return an error message, or an empty string."""
    if isinstance(future, Exception):
        return str(future)
    try:
        nbytes = future.get()
    except (OSError, RuntimeError) as error:
        return str(error)
    wanted = read.into.numel()
    return "" if nbytes == wanted else f"the file ends after {nbytes} of {wanted} bytes"
