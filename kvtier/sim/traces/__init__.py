"""Reads, generates, describes and writes traces of requests."""

from __future__ import annotations

from kvtier.sim.traces._generate import GENERATORS, Workload, generate
from kvtier.sim.traces._read import read_trace
from kvtier.sim.traces._source import FORMAT_NAMES, TraceFormat
from kvtier.sim.traces._trace import Trace, TraceError, describe
from kvtier.sim.traces._write import write_trace

__all__ = [
    "FORMAT_NAMES",
    "GENERATORS",
    "Trace",
    "TraceError",
    "TraceFormat",
    "Workload",
    "describe",
    "generate",
    "read_trace",
    "write_trace",
]
