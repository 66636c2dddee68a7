"""The differences between supported vLLM releases, and the names that kvtier requires.

A release is recognised by its features, never by its version string, because forks and
nightlies may have any version. A vLLM that lacks a required name is refused at the start; the
error lists the missing names.

=======  ================================================================================
release  what it added, and what kvtier does without it
=======  ================================================================================
0.30     ``bind_kv_cache_manager``, ``KVConnectorTransferResults``: required
0.31     circular buffers leave the prefix cache: before, models with them are refused
0.32     ``CacheHitSource``: before, vLLM's own metrics do not tell where hits came from
=======  ================================================================================

Every new release changes two files: ``pyproject.toml`` (the bounds of the extra ``vllm``, and
``[tool.kvtier.vllm]``, the releases that nox runs) and ``docs/reference/versions.md``. Which
other files change depends on what vLLM changed:

==========================  ============================================================
vLLM changed                file
==========================  ============================================================
connector calls             ``connector.py``
KV events                   ``events.py``
connector statistics        ``metrics.py``
``SchedulerOutput``         ``steps.py``
kinds of KV cache           ``kinds.py``
layout of the KV memory     ``pages.py``
``VllmConfig``: sizes       ``engine.py``
settings, variables for KV  ``content.py``
features to refuse          ``refusals.py``
``LoRARequest``             ``adapters.py``
``OffloadingSpec``          ``spec.py``
engine, tokenizer           ``offline.py``
hashes of blocks            ``kvtier/coverage/_hashing.py``
HTTP routes of a server     ``kvtier/warmup/_server.py``
plugins                     ``plugin.py``
==========================  ============================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

from kvtier.errors import UnsupportedError

__all__ = [
    "hit_sources",
    "refuse_missing_names",
    "require_supported_vllm",
    "supported",
]

_CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_NEEDED: Final[Mapping[str, Sequence[str]]] = {
    f"{_CONNECTORS}.base": (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    f"{_CONNECTORS}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager",),
    "vllm.v1.core.kv_cache_utils": ("resolve_kv_cache_block_sizes",),
    "vllm.v1.core.sched.output": ("KVConnectorBlockState", "SchedulerOutput"),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "KVCacheTensor"),
}


def supported() -> str:
    """Return the range of supported releases as text, from the extra ``vllm`` of kvtier."""
    (vllm,) = (each for each in metadata.requires("kvtier") or () if each.startswith("vllm"))
    bounds = vllm.removeprefix("vllm").partition(";")[0].split(",")
    return f"kvtier works with vLLM {','.join(sorted(bounds, reverse=True))}"


def require_supported_vllm(connector: type[Any]) -> None:
    """Check that kvtier's connector supports the installed vLLM.

    Args:
        connector: kvtier's connector class.

    Raises:
        UnsupportedError: A name is missing, or vLLM added an abstract method.
    """
    problems = list(_missing())
    abstract = sorted(getattr(connector, "__abstractmethods__", ()))
    if abstract:
        problems.append(f"asks connectors for {', '.join(abstract)}")
    if not hasattr(connector, "bind_kv_cache_manager"):
        problems.append("has no bind_kv_cache_manager")
    if problems:
        raise _unsupported(problems)


@contextmanager
def refuse_missing_names() -> Iterator[None]:
    """Raise UnsupportedError if the ``with`` body cannot import a name from vLLM.

    Raises:
        UnsupportedError: A module or a name of an installed vLLM is missing.
    """
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise  # vLLM itself is missing, or something else
        raise _unsupported(_missing() or [_unusable(error.name, error)]) from error


def _unsupported(problems: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(f"this vLLM {'; it '.join(problems)}: {supported()}")


def _unusable(module: str | None, error: ImportError) -> str:
    return f"has no usable {module} ({error})"


def _missing() -> Sequence[str]:
    problems = []
    for module_name, names in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            problems.append(_unusable(module_name, error))
            continue
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            problems.append(f"has no {', '.join(missing)} in {module_name}")
    return problems


def hit_sources() -> tuple[Any, Any]:
    """Return vLLM's ``CacheHitSource`` for host memory and for disk; Nones before vLLM 0.32."""
    try:
        sources = importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource
    except ImportError:
        return None, None
    return sources.HOST, sources.DISK
