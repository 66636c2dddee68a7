"""What the connector's door takes from vLLM beside the offloading contract.

A vLLM that lacks one of the names is refused here with a sentence; the other door does without
them.
"""

from __future__ import annotations

from typing import Any

from kvtier.vllm import compat

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        TransferJob,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import FullAttentionSpec
except ImportError as error:
    raise compat.refusal(error, compat.CONNECTOR_NAMES) from error

__all__ = [
    "LOADS_BEFORE_THE_PASS",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVConnectorRole",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "SchedulerOutput",
    "TransferJob",
    "TransferResults",
]

TransferResults: Any = compat.transfer_results()
"""Names requests whose load failed; None in a vLLM that takes only blocks."""
LOADS_BEFORE_THE_PASS = compat.loads_before_the_pass(KVConnectorBase_V1, SchedulerOutput)
"""Whether a step's loads start before its forward pass."""
