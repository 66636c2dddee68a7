"""Writes the requests of a live engine down, so that a simulator can replay them.

One line for each request, in Mooncake's format, which any simulator reads.
"""

from __future__ import annotations

from kvtier.recording._recorder import Recorder, RecorderStatistics
from kvtier.recording._requests import RequestLog, RequestRecord

__all__ = ["Recorder", "RecorderStatistics", "RequestLog", "RequestRecord"]
