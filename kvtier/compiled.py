"""Whether what decides runs compiled or interpreted.

The manager and the policies are plain Python that also compiles to C (docs/design/decisions,
"What decides can be compiled"); it decides the same either way, in less time.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES

__all__ = ["is_compiled"]


def is_compiled(kind: type) -> bool:
    """Return whether the class ``kind`` is of a compiled module.

    >>> is_compiled(EOFError)
    False
    """
    file = getattr(sys.modules[kind.__module__], "__file__", None) or ""
    return file.endswith(tuple(EXTENSION_SUFFIXES))
