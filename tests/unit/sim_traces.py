"""Traces of a few chunks, and where the large ones are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvtier.sim.traces import Trace
from kvtier.sim.traces._source import TraceBuilder

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(
    os.environ.get("KVTIER_TRACES", ROOT.parent / "shared/traces")  # noqa: TID251 - not kvtier's
)

_skipped_without_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="no reference traces; name their directory in KVTIER_TRACES"
)

Test = TypeVar("Test", bound=Callable[..., None])


def needs_traces(test: Test) -> Test:
    """Skip ``test`` where there are no real traces, and leave it untraced: they are long."""
    marked: Test = _skipped_without_traces(pytest.mark.untraced(test))
    return marked


def trace_of(
    chains: Sequence[Sequence[int]],
    *,
    chunk_tokens: int = 16,
    tokens: Sequence[int] = (),
    every_s: float = 1.0,
    sessions: Sequence[str] = (),
) -> Trace:
    """Return a trace of ``chains``, one request every ``every_s`` seconds."""
    builder = TraceBuilder(chunk_tokens=chunk_tokens)
    for number, chain in enumerate(chains):
        length = tokens[number] if tokens else max(len(chain) * chunk_tokens, 1)
        builder.add(
            chain,
            timestamp_s=number * every_s,
            input_tokens=length,
            session=sessions[number] if sessions else "",
        )
    return builder.finish(name="small", format_name="made", sha256="0" * 64)
