"""What kvtier needs to know of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["RequestContext"]


class RequestContext(Protocol):
    """One request, for as long as its engine knows it; vLLM's ReqContext is one."""

    @property
    def req_id(self) -> str:
        """The engine's name for it."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What whoever sent the request asks of the KV cache."""
