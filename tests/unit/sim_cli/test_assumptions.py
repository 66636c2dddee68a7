"""Every command that reads a trace says how it read it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli._app import app
from tests.unit.sim_cli.commands import kvtier

ASSUMED = [
    "format: lmbench (detected)",
    "timestamps in nanoseconds",
    "tokens per id: 32 (derived from input_length and hash_ids)",
]
LINE = f"assumed for odd: {'; '.join(ASSUMED)}\n"
WARNINGS = [
    "1 of 12 requests have an earlier timestamp than the line before: all lines were sorted",
    "1 of 12 requests contradict 32 tokens per id, the first with input_length = 7 and 9",
]
SIZE = ("--chunk-bytes", "1MiB")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A trace of 32 tokens per id, one line too early and one without sense."""
    shape = [(32 * ids, ids) for ids in range(1, 12)] + [(7, 9)]
    records = [
        {
            "timestamp": str(1_753_780_607_000_000_000 + (at % 11) * 10**9),
            "input_length": tokens,
            "hash_ids": [*range(ids)],
        }
        for at, (tokens, ids) in enumerate(shape)
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ("trace", "info"),
        ("sim", "run", *SIZE, "--config"),
    ],
)
def test_a_result_says_what_was_assumed_as_text_and_as_json(
    odd: Path, config: Path, command: tuple[str, ...]
) -> None:
    words = [*command, config] if command[-1] == "--config" else [*command]
    printed = json.loads(kvtier(*words, odd, "--json"))
    assert printed["assumed"] == ASSUMED
    assert len(printed["warnings"]) == len(WARNINGS)
    for warning, begin in zip(printed["warnings"], WARNINGS, strict=True):
        assert warning.startswith(begin)
    assert kvtier(*words, odd, width=1000).endswith(LINE)


def test_warnings_of_a_trace_are_on_stderr_with_its_file(odd: Path) -> None:
    answer = CliRunner().invoke(app, ["trace", "info", str(odd), "--json"])
    lines = answer.stderr.splitlines()
    assert len(lines) == len(WARNINGS)
    for line, begin in zip(lines, WARNINGS, strict=True):
        assert line.startswith(f"warning: {odd}: {begin}")


def test_a_sweep_says_what_was_assumed(odd: Path, tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    grid = ("--policies", "lru", "--capacities", "5", "--csv", table)
    assert LINE in kvtier("sim", "sweep", odd, *grid, width=1000)
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert row["assumed"] == "; ".join(ASSUMED)
    assert WARNINGS[0] in row["warnings"]
    assert WARNINGS[1] in row["warnings"]


def test_a_recommendation_says_what_was_assumed(odd: Path) -> None:
    text = kvtier("sim", "recommend", odd, "--ram", "4MiB", "--nvme", "64MiB", *SIZE)
    for assumption in ASSUMED:
        assert f"#   {assumption}\n" in text
    for warning in WARNINGS:
        assert f"# Warning: {warning}" in text


def test_tokens_per_id_are_those_of_the_option(odd: Path) -> None:
    told = ("--tokens-per-id", 7)
    facts = json.loads(kvtier("trace", "info", odd, *told, "--json"))
    assert facts["chunk_tokens"] == 7
    grid = ("--policies", "lru", "--capacities", "5", *told)
    assert "tokens per id: 7 (given)" in kvtier("sim", "sweep", odd, *grid, width=1000)
