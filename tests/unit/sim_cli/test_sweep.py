"""``kvtier sim sweep``: the grid, its files, and what none of them may replace."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import _sim
from kvtier.sim.sweep import COLUMNS
from tests.docs.pages import ROOT
from tests.unit.sim_cli.commands import kvtier, refusal, sweep


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_writes_what_single_runs_say_and_how_to_repeat_them(
    trace: Path, jobs: int
) -> None:
    printed = sweep(trace, "--jobs", jobs)
    with trace.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", "5%"),
        ("lru", "20"),
        ("arc", "5%"),
        ("arc", "20"),
    ]
    for row in rows:
        cell = ("--policy", row["policy"], "--capacity", row["capacity"], "--json")
        single = json.loads(kvtier("sim", "run", trace, *cell))
        assert int(row["hits"]) == single["hits"]
        assert float(row["prefix_hit_ratio"]) == single["prefix_hit_ratio"]
        assert row["seed"] == "0"
        assert len(row["trace_sha256"]) == 64
    assert "prefix hit ratio" in printed
    assert printed.endswith(f"\nwrote {trace.with_suffix('.csv')}\n")


def test_a_sweep_and_a_run_take_the_groups_of_a_hybrid_model(trace: Path) -> None:
    groups = ("--groups", "prefix,window:1024,state")
    sweep(trace, *groups)
    with trace.with_suffix(".csv").open() as file:
        row = next(csv.DictReader(file))
    cell = ("--policy", row["policy"], "--capacity", row["capacity"], "--json")
    single = json.loads(kvtier("sim", "run", trace, *cell, *groups))
    assert single["groups"] == row["groups"] == groups[1]
    assert str(single["capacity_chunks"]) == row["capacity_chunks"]
    assert str(single["prefix_hit_ratio"]) == row["prefix_hit_ratio"]
    assert "--groups full: " in refusal("sim", "run", trace, *cell, "--groups", "full")


def test_two_traces_of_one_name_are_two(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    kvtier("trace", "generate", "chat", "-o", other, "--sessions", 40, "--seed", 8)
    printed = sweep(trace, other, "--plot", tmp_path / "two.svg")
    assert printed.count("chat: prefix hit ratio") == 2
    assert (tmp_path / "two.svg").read_text().count('id="axes_') == 2


@pytest.mark.parametrize(
    ("option", "file", "problem"),
    [
        ("--csv", "no/such/x.csv", "cannot be written: there is no directory"),
        ("--csv", "", "cannot be written: is a directory"),
        ("--plot", "no/such/x.png", "cannot be written: there is no directory"),
        ("--plot", "x.docx", "no such picture format"),
        ("--plot", "x", "no such picture format"),
        ("--plot", "x.gif", "no such picture format; name it .png, .svg or .pdf"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    file: str,
    problem: str,
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(_sim, "sweep", lambda *_, **__: ran.append(1))
    monkeypatch.setattr(_sim, "read", lambda *_: ran.append(0))
    csv_too = () if option == "--csv" else ("--csv", tmp_path / "x.csv")
    grid = ("--policies", "lru", "--capacities", "5%", *csv_too)
    assert problem in refusal("sim", "sweep", trace, *grid, option, tmp_path / file)
    assert ran == []
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (("--csv", "chat.jsonl"), "--csv {}/chat.jsonl: is the trace itself; name another"),
        (("--csv", "link"), "--csv {}/link: is the trace itself; name another file"),
        (("--csv", "hard"), "--csv {}/hard: is the trace itself; name another file"),
        (
            ("--csv", "x.svg", "--plot", "y/../x.svg"),
            "--plot {}/y/../x.svg: is the file of --csv as well; name another file",
        ),
    ],
)
def test_no_output_of_a_sweep_replaces_its_trace_or_another_output(
    trace: Path, tmp_path: Path, files: tuple[str, ...], problem: str
) -> None:
    before = trace.read_bytes()
    (tmp_path / "y").mkdir()
    (tmp_path / "link").symlink_to(trace)
    (tmp_path / "hard").hardlink_to(trace)
    named = [name if name.startswith("--") else f"{tmp_path}/{name}" for name in files]
    grid = ("--policies", "lru", "--capacities", "5%")
    assert refusal("sim", "sweep", trace, *grid, *named).startswith(problem.format(tmp_path))
    assert trace.read_bytes() == before


def test_outputs_that_keep_nothing_may_be_one(trace: Path) -> None:
    # The picture's format comes from its name, so a link leads to the device.
    nothing = trace.with_suffix(".svg")
    nothing.symlink_to("/dev/null")
    grid = ("--policies", "lru", "--capacities", "5%")
    kvtier("sim", "sweep", trace, *grid, "--csv", "/dev/null", "--plot", nothing)


STUCK = """
from kvtier.sim.sweep import sweep
from kvtier.sim.traces import generate

trace = generate("chat", sessions=2, per_s=1.0, chunk_tokens=16, seed=1)
sweep([trace], ["tests.unit.sim_cli.stuck:Stuck"], ["2", "3"], chunk_bytes=[1], jobs=2)
"""


def test_the_processes_of_a_sweep_that_is_killed_end_as_well() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "running\n"
        parent.kill()
        # The end of the output comes when nobody is left who could write any.
        written, _ = parent.communicate(timeout=15)
        assert written == ""
