"""Records the requests of a live engine for replay in a simulator.

A recording has one line per request, in Mooncake's format, which other simulators read too.
"""

from __future__ import annotations

from kvtier.recording._recorder import Recorder, RecorderStatistics
from kvtier.recording._requests import RequestLog, RequestRecord

__all__ = ["Recorder", "RecorderStatistics", "RequestLog", "RequestRecord"]
