"""``kvtier sim sweep``: the grid, its files, and what none of them may replace."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import _sim
from kvtier.sim.single import simulate_single
from kvtier.sim.sweep import COLUMNS
from kvtier.sim.traces import read_trace
from tests.docs.pages import ROOT
from tests.unit.sim_cli.commands import kvtier, refusal, sweep
from tests.unit.sim_traces import TRACES, needs_traces

GRID = ("--policies", "lru", "--capacities", "5%")


def rows_of(trace: Path, *more: object) -> list[dict[str, str]]:
    """Sweep ``trace``; return the rows of the table."""
    sweep(trace, *more)
    with trace.with_suffix(".csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_writes_what_it_simulated_and_how_to_repeat_it(trace: Path, jobs: int) -> None:
    rows = rows_of(trace, "--jobs", jobs)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", "5%"),
        ("lru", "20"),
        ("arc", "5%"),
        ("arc", "20"),
    ]
    loaded = read_trace(trace)
    for row in rows:
        capacity = int(row["capacity_chunks"])
        single = simulate_single(loaded, policy=row["policy"], capacity=capacity)
        assert int(row["hits"]) == single.hits
        assert float(row["prefix_hit_ratio"]) == single.prefix_hit_ratio
        assert row["touch_order"] == "reverse"
        assert row["seed"] == "0"
        assert row["trace_sha256"] == loaded.sha256


def test_one_policy_at_one_size_needs_no_file(trace: Path) -> None:
    grid = ("--policies", "fifo", "--capacities", "99", "--touch-order", "forward")
    one = simulate_single(read_trace(trace), policy="fifo", capacity=99, touch_order="forward")
    assert one.stranded_hits > 0
    lines = [line.split() for line in kvtier("sim", "sweep", trace, *grid).splitlines()]
    for title, share in (
        ("prefix hit ratio, %", one.prefix_hit_ratio),
        ("stranded hits, % of the references", one.stranded_hits / one.refs),
    ):
        at = lines.index(["chat:", *title.split()])
        assert lines[at + 1 : at + 3] == [["policy", "99"], ["fifo", f"{share * 100:.2f}"]]


def test_a_sweep_takes_the_groups_of_a_hybrid_model(trace: Path) -> None:
    groups = "prefix,window:1024,state"
    row = rows_of(trace, "--groups", groups)[0]
    capacity = int(row["capacity_chunks"])
    single = simulate_single(read_trace(trace), policy="lru", capacity=capacity, groups=groups)
    assert row["groups"] == groups
    assert float(row["prefix_hit_ratio"]) == single.prefix_hit_ratio


def test_two_traces_of_one_name_are_two(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    kvtier("trace", "generate", "chat", "-o", other, "--sessions", 40, "--seed", 8)
    printed = sweep(trace, other, "--plot", tmp_path / "two.svg")
    assert printed.count("chat: prefix hit ratio") == 2
    assert (tmp_path / "two.svg").read_text().count('id="axes_') == 2


@needs_traces
@pytest.mark.parametrize(
    ("policy", "order", "capacity", "hits"),
    [
        ("lru", "forward", "5%", "56382"),
        ("lru", "reverse", "9140", "56447"),
        ("fifo", "forward", "10%", "73806"),
    ],
)
def test_hits_on_the_conversation_trace_are_the_references(
    tmp_path: Path, policy: str, order: str, capacity: str, hits: str
) -> None:
    path, table = TRACES / "mooncake_conversation.jsonl", tmp_path / "x.csv"
    grid = ("--policies", policy, "--capacities", capacity, "--touch-order", order)
    kvtier("sim", "sweep", path, *grid, "--csv", table)
    with table.open() as file:
        assert [row["hits"] for row in csv.DictReader(file)] == [hits]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--capacities", "0%", "capacity 0%: holds no chunk"),
        ("--capacities", "5 GB/s", "capacity 5 GB/s"),
        ("--policies", "best", "best"),
        ("--policies", "lruu", "did you mean lru?"),
        ("--policies", "lru,,arc", "an empty name"),
        ("--touch-order", "up", "--touch-order up"),
        ("--format", "csv", "--format csv"),
        ("--chunk-bytes", "0", "--chunk-bytes 0"),
        ("--groups", "full", "--groups full: "),
    ],
)
def test_a_wrong_option_is_one_clear_line(
    trace: Path, option: str, value: str, problem: str
) -> None:
    text = refusal("sim", "sweep", trace, *GRID, option, value)
    assert problem in text
    assert "\n" not in text


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
    assert problem in refusal("sim", "sweep", trace, *GRID, *csv_too, option, tmp_path / file)
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
    assert refusal("sim", "sweep", trace, *GRID, *named).startswith(problem.format(tmp_path))
    assert trace.read_bytes() == before


def test_outputs_that_keep_nothing_may_be_one(trace: Path) -> None:
    # The picture's format comes from its name, so a link leads to the device.
    nothing = trace.with_suffix(".svg")
    nothing.symlink_to("/dev/null")
    kvtier("sim", "sweep", trace, *GRID, "--csv", "/dev/null", "--plot", nothing)


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
