"""Refuses a vLLM whose offloading contract is not the one this door speaks.

Chosen by features, not by version string: forks and nightlies carry any version. What is
checked are the shapes the door relies on; a method that a newer vLLM made abstract and kvtier
does not have would fail here, at start, instead of in the middle of a request.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier.errors import UnsupportedError

__all__ = ["require_supported_vllm"]

_NEEDED = {
    "vllm.v1.kv_offload.config": ("OffloadingConfig",),
    "vllm.v1.kv_offload.base": (
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "LookupResult",
        "OffloadingManager",
        "OffloadingSpec",
        "OffloadingWorker",
        "PrepareStoreOutput",
        "RequestOffloadingContext",
        "TransferResult",
    ),
}


def require_supported_vllm(*doors: type[Any]) -> None:
    """Check the installed vLLM against what ``doors`` implement.

    Args:
        doors: kvtier's implementations of vLLM's abstract classes.

    Raises:
        UnsupportedError: The contract differs; says where.
    """
    for module_name, names in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UnsupportedError(
                f"this vLLM has no {module_name}: kvtier needs what vLLM 0.32 has"
            ) from error
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(
                f"this vLLM's {module_name} has no {', '.join(missing)}: "
                "kvtier needs what vLLM 0.32 has"
            )
    for door in doors:
        unknown = sorted(getattr(door, "__abstractmethods__", ()))
        if unknown:
            raise UnsupportedError(
                f"this vLLM asks {door.__name__} for {', '.join(unknown)}, which kvtier does "
                "not know: use vLLM 0.32, or a newer kvtier"
            )
