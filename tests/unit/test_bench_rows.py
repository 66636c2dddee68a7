"""The benchmark's verdicts: how rounds become a row, and rows are held to their bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.nvme.report import write_json, write_markdown
from tests.bench.nvme.rows import Row, Spread

FIRST_KEYS = ["bench", "chunk_bytes", "peer", "kvtier", "peer_value", "ratio", "unit"]


def row(bench: str, peer: str, *pairs: tuple[float, float], chunk: int = 2 << 20) -> Row:
    ours, theirs = zip(*pairs, strict=True)
    return Row.over_rounds(bench, chunk, peer, (ours, theirs), "MB/s")


def test_a_ratio_is_taken_within_each_round_before_its_median() -> None:
    noisy = row("promote", "fio", (100.0, 100.0), (10.0, 20.0), (400.0, 200.0))
    assert noisy.ratio == Spread(1.0, 0.5, 2.0)
    assert noisy.kvtier == Spread(100.0, 10.0, 400.0)
    assert noisy.peer_value == Spread(100.0, 20.0, 200.0)


@pytest.mark.parametrize(
    ("bench", "peer", "pair", "met"),
    [
        ("promote", "fio", (95.0, 100.0), True),
        ("promote", "fio", (94.0, 100.0), False),
        ("store", "native_fs", (1.0, 100.0), None),
        ("cpu", "native_fs", (0.36, 1.0), False),
        ("jitter", "native_fs", (1.9, 1.8), False),
        ("jitter", "native_fs", (2.1, 4.0), False),
        ("jitter", "native_fs", (1.9, 4.0), True),
        ("jitter", "native_fs", (1.0, 1.0), False),
    ],
)
def test_a_row_is_met_when_it_clears_every_bar_it_has(
    bench: str, peer: str, pair: tuple[float, float], met: bool | None
) -> None:
    assert row(bench, peer, pair).met is met


@pytest.mark.parametrize(
    ("chunk", "met"), [(128 << 10, False), (512 << 10, True), (2 << 20, True)]
)
def test_a_bar_may_be_for_one_chunk_size(chunk: int, met: bool) -> None:
    assert row("promote", "native_fs", (2.0, 1.0), chunk=chunk).met is met


def test_a_written_row_begins_with_the_documented_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "rows", [row("promote", "fio", (95.0, 100.0))] * 2)
    first, _ = json.loads((tmp_path / "rows").read_text())
    assert list(first)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert (first["kvtier"], first["peer_value"], first["ratio"]) == (95.0, 100.0, 0.95)


def test_the_markdown_has_a_line_per_row_and_says_where_it_was_measured(tmp_path: Path) -> None:
    rows = [row("promote", "fio", (95.0, 100.0)), row("store", "fio", (1.0, 2.0))]
    write_markdown(tmp_path / "table", rows, {"kernel": "6"}, "nox -s bench")
    lines = (tmp_path / "table").read_text().splitlines()
    assert {"* command: `nox -s bench`", "* kernel: 6"} <= set(lines)
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(rows)
    assert lines[-2:] == [line for line in lines if "2.00 MiB" in line]
