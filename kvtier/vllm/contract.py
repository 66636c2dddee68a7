"""What kvtier takes from vLLM's offloading contract, imported in one place.

A vLLM that lacks one of the names is refused here with a sentence, instead of with whatever
import happens to fail first.
"""

from __future__ import annotations

from kvtier.vllm import compat

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        OffloadPolicy,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
    )
except ImportError as error:
    raise compat.refusal(error) from error

__all__ = [
    "CHUNK_LEVEL",
    "CHUNK_POSITIONS",
    "DISK_HIT",
    "EVENT_EXTRAS",
    "HOST_HIT",
    "NAMES_TIERS",
    "RAM_MEDIUM",
    "STORAGE_MEDIUM",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadKey",
    "OffloadingConnectorStats",
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
]

CHUNK_LEVEL = compat.chunk_level(OffloadPolicy)
"""Policy of a request whose chunks are offered one by one."""
RAM_MEDIUM, STORAGE_MEDIUM = compat.media()
HOST_HIT, DISK_HIT = compat.hit_sources()
CHUNK_POSITIONS = compat.chunk_positions(ReqContext)
"""Tells the chunks of a request from its context; None in a vLLM that does not keep them."""
NAMES_TIERS = compat.names_tiers(OffloadingEvent)
"""Whether events have room for a tier's name."""
EVENT_EXTRAS = compat.event_extras(OffloadingEvent)
"""What every event says besides."""
