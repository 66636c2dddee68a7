"""Registers the connector's name with vLLM, in every process of vLLM.

``--kv-transfer-config`` names the connector's module, which suffices for a single connector.
With ``MultiConnector``, vLLM's front end rebuilds the statistics of each connector. The front
end looks up the connector's class by its name, and an unregistered name ends the server at the
first request. vLLM calls every entry point of ``vllm.general_plugins`` when a process starts.
"""

from __future__ import annotations

import contextlib

__all__ = ["register"]


def register() -> None:
    """Register ``KVTierConnector`` with vLLM. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(
            "KVTierConnector", "kvtier.vllm", "KVTierConnector"
        )
