"""Traces of requests: read, generated, described and written."""

from __future__ import annotations

from kvtier.sim.traces._generate import GENERATORS, Workload, generate
from kvtier.sim.traces._read import FORMATS, TraceFormat, read_trace
from kvtier.sim.traces._trace import Trace, TraceError
from kvtier.sim.traces._write import WRITERS, write_trace

__all__ = [
    "FORMATS",
    "GENERATORS",
    "WRITERS",
    "Trace",
    "TraceError",
    "TraceFormat",
    "Workload",
    "generate",
    "read_trace",
    "write_trace",
]
