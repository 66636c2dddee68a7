"""Refusing a vLLM that cannot be recognised, with what is missing and which versions work."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from kvtier.errors import UnsupportedError

__all__ = [
    "BASE_MODULE",
    "CONNECTOR_NAMES",
    "OFFLOADING_NAMES",
    "SUPPORTED",
    "Load",
    "Names",
    "missing_members",
    "refusal",
    "require_members",
    "require_supported_vllm",
]

SUPPORTED: Final = "kvtier works with vLLM 0.25 to 0.33"

Load = Callable[[str], Any]
"""Imports a module by name; tests pass modules of their own making."""

Names = Mapping[str, Sequence[str]]
"""What is imported of vLLM, by module."""

BASE_MODULE: Final = "vllm.v1.kv_offload.base"
_CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING_NAMES: Final[Names] = {
    BASE_MODULE: (
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "LookupResult",
        "OffloadKey",
        "OffloadPolicy",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingManager",
        "OffloadingMetricMetadata",
        "OffloadingSpec",
        "OffloadingWorker",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "TransferResult",
    ),
    f"{_CONNECTORS}.offloading.metrics": ("OffloadingConnectorStats",),
}
"""What both doors need; :mod:`kvtier.vllm.contract` imports it."""

CONNECTOR_NAMES: Final[Names] = {
    _CONNECTORS: ("KVConnectorRole",),
    f"{_CONNECTORS}.base": ("KVConnectorBase_V1",),
    f"{_CONNECTORS}.offloading.common": ("OffloadingConnectorMetadata", "TransferJob"),
    f"{_CONNECTORS}.offloading_connector": ("OffloadingConnector",),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks",),
    "vllm.v1.core.sched.output": ("SchedulerOutput",),
    "vllm.v1.kv_cache_interface": ("FullAttentionSpec",),
}
"""What the connector needs beside; :mod:`kvtier.vllm.connector_contract` imports it."""


def require_supported_vllm(*doors: type[Any], load: Load = importlib.import_module) -> None:
    """Check the installed vLLM against what ``doors`` implement.

    Args:
        doors: kvtier's implementations of vLLM's abstract classes.
        load: Imports a module.

    Raises:
        UnsupportedError: The contract differs; says where, and which versions work.
    """
    unmet = (problem for door in doors for problem in _unmet(door))
    problems = [*_missing(OFFLOADING_NAMES, load), *unmet]
    if problems:
        raise UnsupportedError(f"this vLLM {'; it '.join(problems)}: {SUPPORTED}")


def refusal(
    error: ImportError,
    names: Names = OFFLOADING_NAMES,
    *,
    load: Load = importlib.import_module,
) -> UnsupportedError:
    """Return what to raise when a contract could not be imported.

    Args:
        error: Why not.
        names: What was to be imported.
        load: Imports a module.
    """
    problems = list(_missing(names, load)) or [f"cannot be imported ({error})"]
    return UnsupportedError(f"this vLLM {'; it '.join(problems)}: {SUPPORTED}")


def _missing(needed: Names, load: Load) -> Iterator[str]:
    for module_name, names in needed.items():
        try:
            module = load(module_name)
        except ImportError as error:
            yield f"has no usable {module_name} ({error})"
            continue
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            yield f"has no {', '.join(missing)} in {module_name}"


def _unmet(door: type[Any]) -> Iterator[str]:
    """Say what the base classes of ``door`` ask for and it does not do."""
    unknown = sorted(getattr(door, "__abstractmethods__", ()))
    if unknown:
        yield f"asks {door.__name__} for {', '.join(unknown)}, which kvtier does not know"
    for base in door.__mro__[1:]:
        for name, theirs in vars(base).items():
            ours = vars(door).get(name)
            if name.startswith("__") or not (
                inspect.isfunction(theirs) and inspect.isfunction(ours)
            ):
                continue
            if not _takes(ours, theirs):
                yield (
                    f"calls {door.__name__}.{name}{_untyped(theirs)}, and kvtier's takes "
                    f"{_untyped(ours)}"
                )


def _untyped(method: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(method)
    return inspect.Signature(
        [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    )


def _takes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Return whether any call that fits ``theirs``, by place or by name, fits ``ours``."""
    pairs = zip_longest(
        inspect.signature(ours).parameters.values(),
        inspect.signature(theirs).parameters.values(),
    )
    return all(
        mine is not None
        and (
            (yours is None and mine.default is not mine.empty)
            or (yours is not None and yours.name == mine.name and _as_optional(mine, yours))
        )
        for mine, yours in pairs
    )


def _as_optional(mine: inspect.Parameter, yours: inspect.Parameter) -> bool:
    return yours.default is yours.empty or mine.default is not mine.empty


def require_members(thing: object, *names: str) -> None:
    """Check that what kvtier reads of vLLM's own state, which is nobody's interface, is there.

    Args:
        thing: An object of vLLM's, or a dataclass or named tuple of it.
        names: Its attributes, or fields.

    Raises:
        UnsupportedError: One is not; says which.
    """
    missing = missing_members(thing, *names)
    if missing:
        kind = thing if isinstance(thing, type) else type(thing)
        raise UnsupportedError(
            f"this vLLM's {kind.__name__} has no {', '.join(missing)}: {SUPPORTED}"
        )


def missing_members(thing: object, *names: str) -> list[str]:
    """Return which of ``names`` are no attribute of ``thing``, or no field if it is a type."""
    if isinstance(thing, type):
        fields = {*getattr(thing, "__dataclass_fields__", ()), *getattr(thing, "_fields", ())}
        return [name for name in names if name not in fields]
    return [name for name in names if not hasattr(thing, name)]
