"""Remove an engine's connector and put it back, to measure its cost.

Two engines that are started alike differ in speed by a per cent or two, for their memory lies
otherwise (Mytkowicz et al., "Producing Wrong Data Without Doing Anything Obviously Wrong!",
ASPLOS 2009). One engine with its connector and without has the same memory both times.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state

__all__ = ["Connection"]

_OF_SCHEDULER = {"connector": None, "defer_block_free": False, "requires_kv_delivery": False}
"""What vLLM's scheduler is without a connector; not every release knows all of it."""


class Connection:
    """The connector of an engine whose core and only worker are in this process.

    Args:
        scheduler: vLLM's scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._worker_side = kv_transfer_state._KV_CONNECTOR_AGENT
        self._is_detached = False
        self._kept = {
            name: getattr(scheduler, name) for name in _OF_SCHEDULER if hasattr(scheduler, name)
        }

    def use(self, *, detached: bool) -> None:
        """Run from now on as if there were no connector, or with it again.

        No request may be unfinished: the connector does not see steps without it.

        Raises:
            RuntimeError: One is, or there is no connector in this process to take out.
        """
        if detached == self._is_detached:
            return
        if self._scheduler.has_requests():
            raise RuntimeError("a connector comes and goes between requests only")
        if detached and self._worker_side is None:
            raise RuntimeError("the engine has no connector in this process")
        self._is_detached = detached
        for name, kept in self._kept.items():
            setattr(self._scheduler, name, _OF_SCHEDULER[name] if detached else kept)
        kv_transfer_state._KV_CONNECTOR_AGENT = None if detached else self._worker_side
