"""A connector that does nothing: what any connector costs, because vLLM asks it."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

__all__ = ["IdleConnector"]


class IdleConnector(KVConnectorBase_V1):
    """Finds nothing, loads nothing, stores nothing."""

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    @override
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @override
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    @override
    def wait_for_save(self) -> None: ...

    @override
    def has_connector_metadata(self) -> bool:
        return False  # or vLLM would ask it before and after each layer
