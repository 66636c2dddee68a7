"""What a request may ask of kvtier: ``kv_transfer_params: {"kvtier": {...}}``.

Whoever sends a request may know what no cache can see: that a tool will answer in a minute, or
that a prompt is never used again. What cannot be read is ignored and said once: a request is
served without a cache rather than not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["HINTS_KEY", "HintReader", "RequestHints"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

HINTS_KEY = "kvtier"


class RequestHints(BaseModel):
    """One request's hints."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retain_s: float | None = Field(default=None, ge=0, le=7 * 86_400.0)
    """Seconds its chunks stay in RAM, as far as ``placement.retain_quota`` goes."""
    skip_store: bool = False
    """Whether its new chunks are not worth keeping at all."""


_NONE = RequestHints()


class HintReader:
    """Reads hints, and says once what was wrong with one."""

    def __init__(self) -> None:
        self._warned = False

    def read(self, params: Mapping[str, Any] | None) -> RequestHints:
        """Return the hints in a request's ``kv_transfer_params``; none where there are none."""
        raw = params.get(HINTS_KEY) if params else None
        if raw is None:
            return _NONE
        try:
            return RequestHints.model_validate(raw)
        except ValidationError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "a request's kv_transfer_params.%s is ignored: %s; later ones are ignored "
                    "silently",
                    HINTS_KEY,
                    _first_problem(error),
                )
            return _NONE


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return f"{place}: {first['msg']}"
