"""Memory files without a name, on any Python.

Python has ``memfd_create`` only if the C library that it was compiled with had it. Those that
uv and conda install are compiled with an old one, to run everywhere. The C library that they
run with has it all the same.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

__all__ = ["open_anonymous"]

_CLOEXEC: Final = 1  # linux/memfd.h, as the other one
_HUGETLB: Final = 4


def open_anonymous(name: str, *, huge_pages: bool = False) -> int:
    """Create an empty memory file and return its descriptor, which no child inherits.

    Args:
        name: Shown in ``/proc/PID/maps``.
        huge_pages: Whether it is to have huge pages.

    Raises:
        OSError: The kernel refuses.
    """
    flags = _CLOEXEC | (_HUGETLB if huge_pages else 0)
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    create = ctypes.CDLL(None, use_errno=True).memfd_create
    create.argtypes = (ctypes.c_char_p, ctypes.c_uint)
    descriptor = int(create(name.encode(), flags))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
