"""An engine without a model some of whose requests end before their time."""

from __future__ import annotations

from typing_extensions import override

from kvtier.connector.scheduler import ConnectorScheduler
from kvtier.replay._batching import Batcher, BatchLimits
from kvtier.replay._requests import Phase, ReplayRequest


class AbortingEngine(Batcher):
    """Gives requests blocks and turns, and takes them away.

    Attributes:
        aborted: Requests that ended while they were loaded; as in vLLM, their blocks are free
            when the load is over.
    """

    def __init__(self, connector: ConnectorScheduler, limits: BatchLimits) -> None:
        super().__init__(connector, limits)
        self.aborted: dict[str, ReplayRequest] = {}

    @property
    def loading(self) -> list[ReplayRequest]:
        """Requests whose blocks are being loaded."""
        return [request for request in self._holding if request.phase is Phase.LOADING]

    @property
    @override
    def is_idle(self) -> bool:
        return super().is_idle and not self.aborted

    def abort(self, request: ReplayRequest) -> None:
        """End a request, whatever it is doing."""
        phase, request.phase = request.phase, Phase.OVER
        if phase is Phase.WAITING:
            self._waiting.remove(request)
        elif phase is Phase.RUNNING:
            self._running.remove(request)
        else:
            del self._holding[request]
        self._connector.request_finished(request, request.blocks)
        if phase is Phase.LOADING:
            self.aborted[request.request_id] = request
        else:
            self._free.extend(request.blocks)
        self._ended[request.request_id] = None
        del self.requests[request.request_id]

    def ended(self, request: ReplayRequest, *, failed: bool) -> bool:
        """Note that a load is over; returns whether its request has what it brought."""
        if self.aborted.pop(request.request_id, None) is not None:
            self._free.extend(request.blocks)
            return False
        self.loaded([request.request_id], [request.request_id] if failed else [])
        return not failed
