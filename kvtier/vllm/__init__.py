"""Entry points into vLLM. Only this package imports vLLM.

``KVTierConnector`` is the recommended entry point; ``--kv-transfer-config`` makes vLLM load it.
vLLM's ``OffloadingConnector`` loads the other entry point, ``KVTierOffloadingSpec``.
``kvtier vllm-args FILE`` prints the option for either entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.vllm.versions import refuse_missing_names

if TYPE_CHECKING:
    from kvtier.vllm.connector import KVTierConnector
    from kvtier.vllm.spec import KVTierOffloadingSpec

__all__ = ["KVTierConnector", "KVTierOffloadingSpec"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the signature PEP 562 asks for
    # vLLM takes ten seconds to import, and most tools of kvtier do not need it.
    if name == "KVTierOffloadingSpec":
        with refuse_missing_names():
            from kvtier.vllm.spec import KVTierOffloadingSpec  # noqa: PLC0415

        return KVTierOffloadingSpec
    if name == "KVTierConnector":
        with refuse_missing_names():
            from kvtier.vllm.connector import KVTierConnector  # noqa: PLC0415

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
