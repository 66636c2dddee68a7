"""Every policy has exactly the hits of other implementations of it.

The large traces and their figures (libCacheSim, Caffeine's simulator and a third
implementation, which agree) are not part of the repository: see :mod:`tests.unit.sim_traces`.
The larger one is slow. A small trace is always there, with a second implementation of each
policy in :mod:`tests.unit.textbook`.
"""

from __future__ import annotations

import csv
import functools
from typing import NamedTuple

import pytest

from kvtier.policies.registry import EVICTIONS
from kvtier.sim.single import BELADY, SingleResult, TouchOrder, simulate_single
from kvtier.sim.traces import Trace, read_trace
from tests.unit.exact_counters import ExactWTinyLfu
from tests.unit.sim_traces import ROOT, TRACES, needs_traces
from tests.unit.textbook import TEXTBOOK, count_hits

SMALL = ROOT / "tests/data/small_chat.jsonl"
REFERENCE = TRACES / "reference_hit_ratios.csv"
NAMES = {
    "2Q": "2q",
    "ARC": "arc",
    "Belady": "belady",
    "FIFO": "fifo",
    "LIRS": "lirs",
    "LRU": "lru",
    "S3-FIFO": "s3-fifo",
    "SLRU-20/80": "slru",
    "W-TinyLFU": "w-tinylfu",
}
EXACT = {"w-tinylfu": f"{ExactWTinyLfu.__module__}:{ExactWTinyLfu.__name__}"}
"""Policies to compare in place of those that count in a sketch."""
REFS = {"mooncake_conversation": 288_500, "mooncake_synthetic": 121_877}
ROUNDED = 1e-6
LIRS_TOLERANCE = 0.0005  # the implementations differ among themselves by up to 0.00009


class Replay(NamedTuple):
    trace: str
    policy: str
    touch_order: TouchOrder
    capacity: int


class Row(NamedTuple):
    tool: str
    hits: int
    leads: int | None
    prefix_hit_ratio: float | None


def test_every_policy_is_compared_with_something() -> None:
    others = {"lhd"}  # tested in test_lhd
    assert set(TEXTBOOK) == set(NAMES.values()) == {*EVICTIONS.built_in, BELADY} - others


@pytest.fixture(scope="module")
def small() -> Trace:
    return read_trace(SMALL)


@pytest.mark.untraced
@pytest.mark.parametrize("capacity", [2, 3, 10, 39, 100, 301])
@pytest.mark.parametrize("policy", sorted(TEXTBOOK))
def test_on_the_small_trace_hits_are_those_of_the_textbook(
    policy: str, capacity: int, small: Trace
) -> None:
    result = simulate_single(
        small, policy=EXACT.get(policy, policy), capacity=capacity, touch_order="forward"
    )
    assert result.hits == count_hits(policy, small.ids.tolist(), capacity)


@pytest.mark.parametrize("capacity", [39, 100, 301])
def test_the_sketch_is_near_the_exact_counters(capacity: int, small: Trace) -> None:
    exact, sketch = (
        simulate_single(small, policy=policy, capacity=capacity, touch_order="forward")
        for policy in (EXACT["w-tinylfu"], "w-tinylfu")
    )
    assert sketch.block_hit_ratio == pytest.approx(exact.block_hit_ratio, abs=0.02)


def reference() -> dict[Replay, list[Row]]:
    """Return the figures we can be compared with, those of several tools for one run."""
    rows: dict[Replay, list[Row]] = {}
    if not REFERENCE.exists():
        return rows
    with REFERENCE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["policy"] not in NAMES or not (TRACES / f"{row['trace']}.jsonl").exists():
                continue
            order: TouchOrder = "reverse" if row["touch_order"] == "reverse" else "forward"
            run = Replay(row["trace"], NAMES[row["policy"]], order, int(row["cache_blocks"]))
            leads = int(row["lead_blocks"]) if row["lead_blocks"] else None
            prefix = float(row["prefix_hit_ratio"]) if row["prefix_hit_ratio"] else None
            rows.setdefault(run, []).append(Row(row["tool"], int(row["hits"]), leads, prefix))
    return rows


ROWS = reference()
GROUPS = sorted({run[:3] for run in ROWS})
SLOW = "mooncake_conversation"


@functools.cache
def trace_called(name: str) -> Trace:
    return read_trace(TRACES / f"{name}.jsonl")


def replay(run: Replay) -> SingleResult:
    return simulate_single(
        trace_called(run.trace),
        policy=EXACT.get(run.policy, run.policy),
        capacity=run.capacity,
        touch_order=run.touch_order,
    )


@needs_traces
def test_the_figures_are_all_there() -> None:
    assert len(ROWS) == 2 * 2 * 6 * len(NAMES)


@needs_traces
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(
            group,
            id="-".join(group),
            marks=[pytest.mark.slow] if group[0] == SLOW else [],
        )
        for group in GROUPS
    ],
)
def test_hits_are_those_of_the_reference(group: tuple[str, str, TouchOrder]) -> None:
    runs = [run for run in ROWS if run[:3] == group]
    assert len(runs) == 6
    for run in runs:
        result = replay(run)
        near = LIRS_TOLERANCE if run.policy == "lirs" else ROUNDED
        for row in ROWS[run]:
            if run.policy == "lirs":
                tolerance = LIRS_TOLERANCE * REFS[run.trace]
                assert result.hits == pytest.approx(row.hits, abs=tolerance)
            else:
                assert result.hits == row.hits, (run, row.tool)
                assert row.leads in {None, result.lead_chunks}, (run, row.tool)
            if row.prefix_hit_ratio is not None:
                expected = pytest.approx(row.prefix_hit_ratio, abs=near)
                assert result.prefix_hit_ratio == expected, (run, row.tool)
