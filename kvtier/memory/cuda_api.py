"""The functions of the CUDA driver that kvtier calls directly, through ctypes.

torch has no function that queues many copies in one call. torch can page-lock memory, but only
through the CUDA runtime. If such a call fails, the runtime keeps the error, and the next torch
call raises it. The driver's functions keep no errors.

The functions are those of CUDA 12.8, which later drivers keep. Since CUDA 13.0,
``cuMemcpyBatchAsync`` has another signature, without ``failIdx``. So this module asks the
driver for the version of CUDA 12.8.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import CudaError, UnsupportedError

__all__ = ["Addresses", "CudaApi", "SourceOrder"]

Addresses = npt.NDArray[np.int64]
"""Addresses or sizes in bytes, contiguous: the driver reads them as 64-bit words."""

_BATCH_SINCE: Final = 12080
"""First CUDA version with batches of copies: 12.8, in the driver's encoding."""
_CAN_USE_HOST_POINTER: Final = 91

_Call = Callable[..., int]

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
}
_BATCH_SIGNATURE: Final = ctypes.CFUNCTYPE(
    c_int,
    c_void_p,  # destinations
    c_void_p,  # sources
    c_void_p,  # bytes of each copy
    c_size_t,  # copies
    c_void_p,  # attributes
    c_void_p,  # the first copy of each attribute
    c_size_t,  # attributes
    c_void_p,  # failIdx
    c_void_p,  # stream, not the legacy one
)


class SourceOrder(enum.IntEnum):
    """When the driver may read the source of a copy (``CUmemcpySrcAccessOrder``)."""

    STREAM = 1
    """The source is read after the earlier work on the copy's stream has ended."""
    ANY = 3
    """The source may be read at any time between the call and the end of the copy."""


class _Location(ctypes.Structure):
    """CUDA's ``CUmemLocation``. If both fields are 0, the location is unknown."""

    _fields_ = (("type", c_int), ("id", c_int))  # type: ignore[mutable-override]


class _Attributes(ctypes.Structure):
    """CUDA's ``CUmemcpyAttributes``: options of a batch of copies."""

    _fields_ = (  # type: ignore[mutable-override]
        ("source_order", c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", c_uint),
    )


class CudaApi:
    """The CUDA driver, for one device. Thread-safe.

    Args:
        device: Number of the device among those visible to the process.
        library: The driver's shared library.

    Raises:
        UnsupportedError: The library or one of its functions is missing.
        CudaError: The driver has no such device.
    """

    def __init__(self, device: int, *, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
            self._calls = {name: self._function(name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"the CUDA driver cannot be used: {error}") from error
        self._call("cuInit", 0)
        number = c_int()
        self._call("cuDeviceGet", byref(number), device)
        self._device = number.value
        # torch keeps the context until the process ends, so it is never released here.
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._batch = self._find_batch()

    def bind(self) -> None:
        """Make the device's context current in the thread. Each thread calls this first."""
        self._call("cuCtxSetCurrent", self._context)

    @property
    def uses_host_addresses(self) -> bool:
        """Whether kernels can access page-locked memory at its host address."""
        answer = c_int()
        self._call("cuDeviceGetAttribute", byref(answer), _CAN_USE_HOST_POINTER, self._device)
        return bool(answer.value)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory.

        Raises:
            CudaError: The driver refuses.
        """
        self._call("cuMemHostRegister_v2", address, nbytes, 0)

    def unregister(self, address: int) -> None:
        """Undo :meth:`register` for the memory that begins at ``address``.

        Raises:
            CudaError: No such memory is registered.
        """
        self._call("cuMemHostUnregister", address)

    def copy_batch(
        self,
        destinations: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        *,
        order: SourceOrder,
        stream: int,
    ) -> None:
        """Queue copies on a stream; the copy engines run them in any order.

        Args:
            destinations: Address to which each copy writes.
            sources: Address from which each copy reads.
            nbytes: Bytes of each copy.
            order: When the sources may be read.
            stream: The stream's handle.

        Raises:
            UnsupportedError: The driver is older than CUDA 12.8.
            CudaError: The driver refuses. Some of the copies may have been queued.
        """
        if self._batch is None:
            raise UnsupportedError("the driver has no cuMemcpyBatchAsync: it needs CUDA 12.8")
        copies = len(nbytes)
        if not copies:
            return
        attributes = _Attributes(source_order=order)
        first, failed = c_size_t(0), c_size_t(0)
        result = self._batch(
            destinations.ctypes.data,
            sources.ctypes.data,
            nbytes.ctypes.data,
            copies,
            byref(attributes),
            byref(first),
            1,
            byref(failed),
            stream,
        )
        self._check(f"cuMemcpyBatchAsync of {copies} copies", result)

    def _find_batch(self) -> _Call | None:
        """Return the driver's function ``cuMemcpyBatchAsync``; None if the driver lacks it."""
        address, status = c_void_p(), c_int()
        result = self._calls["cuGetProcAddress_v2"](
            b"cuMemcpyBatchAsync", byref(address), _BATCH_SINCE, 0, byref(status)
        )
        if result or not address.value:
            return None
        return _BATCH_SIGNATURE(address.value)

    def _function(self, name: str) -> _Call:
        function = getattr(self._library, name)
        function.argtypes, function.restype = _SIGNATURES[name], c_int
        return function  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._calls[name](*arguments))

    def _check(self, call: str, result: int) -> None:
        if not result:
            return
        name = c_char_p()
        self._calls["cuGetErrorName"](result, byref(name))
        text = (name.value or b"unknown error").decode()
        raise CudaError(f"{call}: {text} ({result})")
