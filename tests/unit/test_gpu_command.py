"""``python -m tests.gpu``: its runner, its report, and its stages rehearsed on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.gpu.__main__ import main
from tests.gpu.bars import BARS
from tests.gpu.bench import Bench
from tests.gpu.paged import Direction, PagedMemory
from tests.gpu.report import make_report
from tests.gpu.rows import STAGE_ROW, Row, append_row, figure_row, read_rows
from tests.gpu.runner import Run, Stage
from tests.gpu.stages import STAGES, copies, device_engine, file_reads
from tests.gpu.wheels import unpack_missing

ROOT = Path(__file__).parents[2]
ABSENT = ("blockbuster", "nox", "pydantic", "pytest_asyncio", "vllm")
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {ABSENT!r}:
            return super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
echo 'Error: Device not supported' >"$2"
exit 1
"""
ALL_STAGES = """
import sys
from tests.gpu import child
rows, *names = sys.argv[1:]
for name in names:
    arguments = ["--rows", rows, "--seconds", "600", "--device", "cpu"]
    sys.argv = ["child", f"tests.gpu.stages.{name}", "--name", name, *arguments]
    sys.stdout.write(f"\\n{name} ended with {child.main()}\\n")
"""
INTERRUPTED = """
import os, pathlib, sys
from tests.gpu.runner import Run, Stage, stopped_by_signals
run = Run(
    pathlib.Path(sys.argv[1]),
    device=None,
    environment=os.environ,
    seconds=600,
    command="x",
    say=lambda line: None,
)
with stopped_by_signals():
    try:
        run.run([Stage("hang", 600, "", needs_gpu=False, module="hang")])
    except KeyboardInterrupt:
        sys.stdout.write(run.report())
"""

Write = Callable[[str, str], Stage]


def environment(*paths: Path, **variables: str) -> Mapping[str, str]:
    """Return this process's environment, with ``paths`` ahead on Python's path."""
    ahead = os.pathsep.join(map(str, (*paths, ROOT)))
    return {**os.environ, "PYTHONPATH": ahead, **variables}  # noqa: TID251 - handed on


@pytest.fixture
def write_stage(tmp_path: Path) -> Write:
    """Write a stage from the lines of its function."""

    def write(name: str, body: str) -> Stage:
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        source = f"import os, signal, subprocess, threading\n\ndef run(bench):\n{lines}\n"
        (tmp_path / f"{name}.py").write_text(source)
        return Stage(name, 60.0, "", needs_gpu=False, module=name)

    return write


def make_run(out: Path, *, seconds: float = 600.0, lines: list[str] | None = None) -> Run:
    said = [] if lines is None else lines
    return Run(
        out,
        device=None,
        environment=environment(out),
        seconds=seconds,
        command="python -m tests.gpu",
        say=said.append,
    )


def results(run: Run) -> dict[str, str]:
    return {row.stage: row.note for row in read_rows(run.rows_path) if row.what == STAGE_ROW}


def with_limit(stage: Stage, seconds: float) -> Stage:
    return Stage(stage.name, seconds, "", needs_gpu=False, decides=True, module=stage.module)


# -- the runner --------------------------------------------------------------------------------


def test_a_hanging_stage_is_killed_and_those_behind_it_run(
    tmp_path: Path, write_stage: Write
) -> None:
    hang = with_limit(write_stage("hang", "threading.Event().wait()"), 1.0)
    after = write_stage("after", "bench.fact('it', 'ran')")
    run = make_run(tmp_path)
    run.run([hang, after])
    assert results(run) == {"hang": "killed at its limit of 1 s", "after": "passed"}
    assert "| after | it | ran |" in run.report()
    assert run.failed


def test_a_stage_that_dies_is_reported_with_its_signal_and_the_rows_it_wrote(
    tmp_path: Path, write_stage: Write
) -> None:
    crash = write_stage(
        "crash",
        "bench.figure('load', [1.0, 3.0, 2.0], 'GB/s')\nos.kill(os.getpid(), signal.SIGSEGV)",
    )
    said: list[str] = []
    run = make_run(tmp_path, lines=said)
    run.run([crash])
    assert results(run) == {"crash": "died of SIGSEGV"}
    assert "| crash | load | 2 GB/s | 1 to 3, n=3 |  |" in run.report()
    assert run.report_path.read_text() == run.report()
    assert any("Segmentation fault" in line for line in said)
    assert not run.failed  # it measures, and decides nothing


def test_a_failing_stage_shows_the_end_of_its_output(
    tmp_path: Path, write_stage: Write
) -> None:
    said: list[str] = []
    run = make_run(tmp_path, lines=said)
    run.run([write_stage("bad", "raise LookupError('no such thing')")])
    assert results(run) == {"bad": "failed with 1"}
    assert any("LookupError: no such thing" in line for line in said)


def test_a_part_that_fails_stops_no_other_part_but_fails_its_stage(
    tmp_path: Path, write_stage: Write
) -> None:
    body = "with bench.going_on('a method'):\n    raise OSError('gone')\nbench.fact('b', 'c')"
    run = make_run(tmp_path)
    run.run([write_stage("parts", body)])
    assert results(run) == {"parts": "failed with 1"}
    assert "| parts | a method | failed: OSError: gone |" in run.report()
    assert "| parts | b | c |" in run.report()


def test_wrong_bytes_fail_the_command_whatever_stage_finds_them(
    tmp_path: Path, write_stage: Write
) -> None:
    run = make_run(tmp_path)
    run.run([write_stage("copying", "bench.require_right(False, 'load', method='m')")])
    assert run.failed
    assert "| copying | load, m, WRONG BYTES | after a copy |" in run.report()


def test_a_stage_that_the_machine_cannot_run_is_skipped_with_its_reason(
    tmp_path: Path, write_stage: Write
) -> None:
    body = "from tests.gpu.bench import SkippedStageError\nraise SkippedStageError('no tool')"
    run = make_run(tmp_path)
    stage = with_limit(write_stage("picky", body), 60.0)
    run.run([stage, Stage("on_gpu", 60.0, "", decides=True)])
    assert results(run) == {"picky": "skipped", "on_gpu": "skipped: no CUDA device"}
    assert "| picky | skipped | no tool |" in run.report()
    assert not run.failed


def test_stages_share_the_time_there_is(tmp_path: Path, write_stage: Write) -> None:
    said: list[str] = []
    run = make_run(tmp_path, seconds=80.0, lines=said)
    first, second = (with_limit(write_stage(name, "pass"), 60.0) for name in ("a", "b"))
    run.run([first, second])
    # 80 s for 120: a third less for the first, and what it leaves is the second's.
    limits = [int(found) for line in said for found in re.findall(r"at most (\d+) s", line)]
    assert 30 <= limits[0] <= 40
    assert limits[0] < limits[1] <= 60


def test_without_time_left_no_stage_starts(tmp_path: Path, write_stage: Write) -> None:
    run = make_run(tmp_path, seconds=0.0)
    run.run([with_limit(write_stage("late", "pass"), 60.0)])
    assert results(run) == {"late": "not run: no time was left"}
    assert run.failed


def test_a_signal_ends_the_stage_with_all_its_processes_and_prints_the_report(
    tmp_path: Path, write_stage: Write
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write_stage(
        "hang",
        f"file = open({str(pipe)!r}, 'w')\n"
        "subprocess.Popen(['sleep', '600'], stdout=file)\n"
        "bench.fact('before', 'the signal')\n"
        "threading.Event().wait()",
    )
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    ) as command:
        with pipe.open() as until_all_writers_died:
            rows = tmp_path / "out" / "rows.jsonl"
            while not any(row.what == "before" for row in read_rows(rows)):
                assert command.poll() is None
            command.send_signal(signal.SIGTERM)
            assert until_all_writers_died.read() == ""
        assert command.stdout is not None
        report = command.stdout.read()
    assert "| hang | before | the signal |" in report
    assert "| hang | interrupted |" in report


# -- the command -------------------------------------------------------------------------------


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["python -m tests.gpu", *arguments])
    return main()


def test_the_command_lists_a_stage_for_each_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--list") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    modules = {path.stem for path in (ROOT / "tests/gpu/stages").glob("[!_]*.py")}
    assert listed == [stage.name for stage in STAGES]
    assert set(listed) == modules


def test_an_unknown_stage_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--only", "facts,copy")
    assert "no stage copy; see --list" in capsys.readouterr().err


@pytest.fixture
def hiding(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH that hides packages which a bare machine lacks."""
    place = tmp_path / "hiding"
    place.mkdir()
    (place / "sitecustomize.py").write_text(HIDE)
    return place


def test_a_machine_without_a_gpu_gets_its_facts_and_a_reason(
    tmp_path: Path, hiding: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path / "out")],
        env=environment(hiding, CUDA_VISIBLE_DEVICES="-1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(?m)^no CUDA device \(.+\): only stages that do without", done.stdout)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    results = {row.stage: row.note for row in rows if row.what == STAGE_ROW}
    skipped = {stage.name: "skipped: no CUDA device" for stage in STAGES}
    assert results == skipped | {"facts": "passed"}
    facts = {row.what: row.note for row in rows if row.stage == "facts"}
    assert {"code", "machine", "versions", "kvikio"} <= set(facts)
    assert done.stdout.endswith(f"{make_report(rows)}\n")


@pytest.mark.timeout(1800)  # its half a minute is long on a busy machine
def test_stages_rehearse_without_the_packages_that_a_bare_machine_lacks(
    tmp_path: Path, hiding: Path
) -> None:
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    names = [stage.name for stage in STAGES if stage.name != "facts"]
    path = f"{sanitizer.parent}{os.pathsep}{os.defpath}"
    done = subprocess.run(
        [sys.executable, "-c", ALL_STAGES, str(tmp_path / "rows"), *names],
        env=environment(hiding, OMP_NUM_THREADS="1", PATH=path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ended = dict(re.findall(r"(?m)^(\w+) ended with (\d+)$", done.stdout))
    assert ended == dict.fromkeys(names, "0") | {"device_engine": "77", "sanitizer": "77"}
    rows = read_rows(tmp_path / "rows")
    notes = {row.stage: row.note for row in rows if row.what == "skipped"}
    assert notes["device_engine"].endswith("see .ci/gpu_wheels")
    assert "Device not supported" in notes["sanitizer"]
    measured = {row.stage for row in rows if row.median is not None}
    assert measured == {"ceilings", "copies", "slowdown", "file_reads"}
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert files == {row.what for row in rows if row.stage == "correctness"}


def test_the_device_engine_stage_rehearses_where_pydantic_is(tmp_path: Path) -> None:
    bench = Bench("device_engine", tmp_path / "rows", "cpu", 600.0)
    device_engine.run(bench)
    measured = {row.what for row in read_rows(tmp_path / "rows")}
    assert measured == {"load", "store", "both", "submit load", "submit store"}


def test_kvtiers_own_reads_of_a_file_rehearse_where_pydantic_is(tmp_path: Path) -> None:
    bench = Bench("file_reads", tmp_path / "rows", "cpu", 600.0)
    file_reads.run(bench)
    rows = [row for row in read_rows(tmp_path / "rows") if row.method == "kvtier"]
    assert [(row.what, row.median is not None) for row in rows] == [("load", True)]


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_method_that_leaves_bytes_out_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    def hasty(memory: PagedMemory) -> Iterator[copies.CopyMethod]:
        (loop,) = copies.loop_methods(memory)
        _, *others = memory.fragments(direction)
        memory.fragments = lambda _: others  # type: ignore[method-assign, assignment]
        (short,) = copies.loop_methods(memory)
        yield copies.CopyMethod("whole", loop.copies)
        yield copies.CopyMethod("hasty", {direction: short.copies[direction]})

    monkeypatch.setattr(copies, "METHODS", (hasty,))
    bench = Bench("copies", tmp_path / "rows", "cpu", 600.0)
    copies.measure_size(bench, 4096, 1 << 18)
    rows = read_rows(tmp_path / "rows")
    assert [(row.method, row.what) for row in rows if row.is_wrong] == [("hasty", direction)]
    assert {row.method for row in rows if row.median is not None} == {"whole"}
    assert bench.failed


# -- bars and the report -----------------------------------------------------------------------


def ceiling(what: str, rate: float) -> Row:
    return figure_row("ceilings", what, [rate], "GB/s", method="cudaHostAlloc", size="1GiB")


def copy(what: str, size: str, rate: float, method: str = "kvtier") -> Row:
    return figure_row("copies", what, [rate], "GB/s", method=method, size=size)


def bar_cell(row: Row, *others: Row) -> str:
    """Return what the report says of ``row`` in the column of bars."""
    report = make_report([row, *others])
    (line,) = (line for line in report.splitlines() if line.startswith(f"| {row.stage} |"))
    return line.split("|")[-2].strip()


@pytest.mark.parametrize(
    ("row", "others", "expected"),
    [
        (copy("load", "64KiB", 45), [ceiling("load", 50)], "0.9 of one large copy >= 0.9: yes"),
        (
            copy("store", "2MiB", 44),
            [ceiling("store", 50)],
            "0.88 of one large copy >= 0.9: NO",
        ),
        (
            copy("load", "16KiB", 40),
            [ceiling("load", 50)],
            "0.8 of one large copy >= 0.75: yes",
        ),
        (copy("store", "16KiB", 40), [ceiling("store", 50)], ""),
        (copy("load", "8KiB", 40), [ceiling("load", 50)], ""),
        (copy("load", "64KiB", 45, "loop"), [ceiling("load", 50)], ""),
        (copy("load", "64KiB", 45), [ceiling("store", 50)], ""),
        (
            copy("both", "64KiB", 68),
            [ceiling("both", 80)],
            "0.85 of two large copies >= 0.85: yes",
        ),
        (figure_row("slowdown", "HBM loop", [8.1], "%", method="kvtier"), [], "8.1 <= 8: NO"),
        (
            figure_row("device_engine", "submit load", [99], "us", method="kvtier", size="1"),
            [],
            "99 <= 100: yes",
        ),
        (
            figure_row("file_reads", "load", [5.7], "GB/s", method="kvtier"),
            [Row("x", "load")],
            "",
        ),
    ],
)
def test_a_figure_is_held_to_its_bars(row: Row, others: Sequence[Row], expected: str) -> None:
    assert bar_cell(row, *others) == expected


def test_the_best_of_several_references_counts_and_only_of_the_same_size() -> None:
    own = figure_row("file_reads", "load", [5.7], "GB/s", method="kvtier")
    kvikio = figure_row("file_reads", "load", [5.0], "GB/s", method="kvikio")
    fio = figure_row("file_reads", "load", [6.0], "GB/s", method="fio")
    report = make_report([own, kvikio, fio])
    assert "0.95 of the better of kvikio and fio >= 0.95: yes" in report
    small, large = copy("load", "8KiB", 20, "vllm"), copy("load", "32KiB", 50, "vllm")
    assert "1.05 of vLLM's >= 1: yes" in make_report([copy("load", "8KiB", 21), small, large])


def test_every_bar_that_nothing_was_held_to_is_listed_as_unmeasured() -> None:
    report = make_report([copy("load", "64KiB", 45), ceiling("load", 50)])
    unmeasured = re.findall(r"(?m)^\| (.+) \| unmeasured \|$", report)
    assert len(unmeasured) == len(BARS) - 1
    assert "copies of fragments of 64 KiB and more" not in unmeasured


SAMPLE = [
    Row("run", "command", note="python -m tests.gpu"),
    Row("facts", "GPU", note="H100 | 80 GB\nPCIe 5"),
    ceiling("load", 50.0),
    figure_row("copies", "load", [50.0, 45.0, 52.25], "GB/s", method="kvtier", size="64KiB"),
    figure_row("slowdown", "matmul loop", [-0.5, 1234.5, 3.0], "% slower", method="loop"),
    Row("copies", "load", "kvtier", "8KiB", note="after a copy", is_wrong=True),
    Row("facts", STAGE_ROW, unit="s", median=3.21, runs=1, note="passed"),
    Row("copies", STAGE_ROW, unit="s", median=0.04, runs=1, note="failed with 1"),
]
TABLE = """\
| stage | fact |  |
| --- | --- | --- |
| run | command | python -m tests.gpu |
| facts | GPU | H100 / 80 GB PCIe 5 |
| copies | load, 8KiB, kvtier, WRONG BYTES | after a copy |

| stage | figure | median | least to most | bar |
| --- | --- | --- | --- | --- |
| ceilings | load, 1GiB, cudaHostAlloc | 50 GB/s | 50 to 50, n=1 |  |
| copies | load, 64KiB, kvtier | 50 GB/s | 45 to 52.2, n=3 | 1 of one large copy >= 0.9: yes |
| slowdown | matmul loop, loop | 3 % slower | -0.5 to 1234, n=3 |  |
"""
STAGES_TABLE = """\
| stage | result | seconds |
| --- | --- | --- |
| facts | passed | 3.2 |
| copies | failed with 1 | 0.0 |
"""


def test_a_report_has_facts_figures_and_stages(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    for row in SAMPLE:
        append_row(rows, row)
    with rows.open("a") as file:
        file.write('{"stage": "cut o')
    report = make_report(read_rows(rows))
    assert report.startswith(f"{TABLE}\n| bar |  |\n| --- | --- |\n")
    assert report.endswith(f"| unmeasured |\n\n{STAGES_TABLE}")


def test_a_rehearsal_is_held_to_no_bar() -> None:
    report = make_report(SAMPLE, judges=False)
    assert "large copy" not in report
    assert "unmeasured" not in report


# -- what a bare machine lacks -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wheel", "is_unpacked"),
    [
        ("kvtier_nowhere-1.0-py3-none-any.whl", True),
        ("kvtier_nowhere-1.0-1-py2.py3-none-any.whl", True),
        ("kvtier_nowhere-1.0-cp311-abi3-manylinux_2_28_x86_64.whl", True),
        ("kvtier_nowhere-1.0-cp399-abi3-manylinux_2_28_x86_64.whl", False),
        ("kvtier_nowhere-1.0-cp27-cp27m-manylinux_2_28_x86_64.whl", False),
        ("pytest-0.1-py3-none-any.whl", False),
        ("pytest-99.0-py3-none-any.whl", True),
    ],
)
def test_wheels_are_unpacked_that_this_python_needs_and_lacks(
    tmp_path: Path, wheel: str, is_unpacked: bool
) -> None:
    with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
        archive.writestr("kvtier_nowhere/__init__.py", "")
    site = tmp_path / "site"
    assert unpack_missing(tmp_path, site) == [wheel.partition("-")[0]][:is_unpacked]
    assert (site / "kvtier_nowhere/__init__.py").exists() is is_unpacked


def test_without_wheels_nothing_is_unpacked(tmp_path: Path) -> None:
    assert unpack_missing(tmp_path / "absent", tmp_path / "site") == []
    assert not (tmp_path / "site").exists()


def test_the_wheels_are_of_the_releases_that_the_other_tests_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    script = (ROOT / ".ci/gpu_wheels").read_text()
    fetched = dict(re.findall(r"([\w-]+)==([\w.]+)", script))
    group = project["dependency-groups"]["test"]
    wanted = dict(line.split("==") for line in group if "pytest" in line and "==" in line)
    del wanted["pytest-timeout"]  # without plugins there
    assert {name: fetched[name] for name in wanted} == wanted
