"""Tells vLLM the connector's name, in every process of its own.

``--kv-transfer-config`` says in which module the connector is, and that is enough as long as it
is alone. Below ``MultiConnector`` vLLM rebuilds the statistics of each connector in its front
end, and looks their classes up by name only: a name it was not told ends the server at its
first request. vLLM calls every entry point of ``vllm.general_plugins`` when a process starts.
"""

from __future__ import annotations

import contextlib

__all__ = ["register"]


def register() -> None:
    """Make ``KVTierConnector`` a name that vLLM knows; idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(
            "KVTierConnector", "kvtier.vllm", "KVTierConnector"
        )
