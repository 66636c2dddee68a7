"""Writes down what a live engine asks for, so that a simulator can ask for it again.

Two streams, because they serve two purposes. *Requests*, one line each in Mooncake's format,
are traffic: any simulator reads them, against any configuration. *Calls* are the inputs of one
manager in the order it got them, with its answers beside them: replayed against the same
configuration they give the same decisions, chunk by chunk.
"""

from __future__ import annotations

from kvtier.recording._calls import CALLS_MARK, LETTERS, CallEncoder, ManagerSetup
from kvtier.recording._manager import RecordingManager
from kvtier.recording._recorder import Recorder, RecorderStatistics
from kvtier.recording._requests import RequestLog, RequestRecord

__all__ = [
    "CALLS_MARK",
    "LETTERS",
    "CallEncoder",
    "ManagerSetup",
    "Recorder",
    "RecorderStatistics",
    "RecordingManager",
    "RequestLog",
    "RequestRecord",
]
