"""The doctor as a whole: the report, its two forms, and the command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli._doctor import examination_document, show_examination
from kvtier.config import KvtierConfig, parse_config
from kvtier.doctor import (
    Examination,
    Finding,
    Verdict,
    _examine,
    _store,
    examine,
    examine_pages,
)
from kvtier.doctor._machine import Machine
from kvtier.doctor._store import Room
from kvtier.os.limits import HugePagePool
from kvtier.units import approximate_rate

FINDINGS = [
    Finding("configuration", Verdict.OK, "ram of 4.00 GiB, nvme of 8.00 GiB"),
    Finding("nvme: device nvme0n1", Verdict.NOTE, "says that it spins", "trust the rates"),
    Finding(
        "nvme: file system",
        Verdict.WARNING,
        "overlay on overlay, mounted at /: a container's own layer: slow, and gone with it",
        "mount a volume of a local disk into the container and name it as path",
    ),
    Finding(
        "nvme: free space", Verdict.PROBLEM, "too little", "free space", "tiers[1].capacity"
    ),
]
REPORT = """\
ok       configuration         ram of 4.00 GiB, nvme of 8.00 GiB
note     nvme: device nvme0n1  says that it spins
                               remedy: trust the rates
warning  nvme: file system     overlay on overlay, mounted at /: a container's
                               own layer: slow, and gone with it
                               remedy: mount a volume of a local disk into the
                               container and name it as path
problem  nvme: free space      too little
                               remedy: free space
1 problem, 1 warning, 1 note
"""


def config_of(path: Path, *, ram: str = "1MiB", nvme: str = "64MiB") -> KvtierConfig:
    text = f"""\
tiers:
  - {{kind: ram, capacity: {ram}}}
  - {{kind: nvme, path: {path}, capacity: {nvme}}}
transfer: {{piece: 64KiB, io_threads: 2}}
"""
    return parse_config(text, source="a.yaml")


def found(examination: Examination, check: str) -> list[Finding]:
    return [finding for finding in examination.findings if finding.check == check]


def printed(examination: Examination, *, colour: bool = False) -> str:
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=colour, highlight=False)
    show_examination(terminal, examination)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def test_the_report_fits_80_columns_and_has_no_colour_in_a_pipe() -> None:
    assert printed(Examination(FINDINGS)) == REPORT


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in printed(Examination(FINDINGS), colour=True)


def test_markup_in_a_path_is_text() -> None:
    finding = Finding("a", Verdict.OK, "[bold]/data[/bold]")
    assert "[bold]/data[/bold]" in printed(Examination([finding]))


def test_a_healthy_machine_needs_no_remedy() -> None:
    assert printed(Examination(FINDINGS[:1])).endswith("nothing to remedy\n")


def test_the_document_has_what_the_table_has() -> None:
    document = examination_document(Path("a.yaml"), Examination(FINDINGS))
    assert document["verdict"] == "problem"
    assert document["findings"][3] == {
        "check": "nvme: free space",
        "verdict": "problem",
        "found": "too little",
        "remedy": "free space",
        "key": "tiers[1].capacity",
    }
    assert document["measured"] == {}


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], Verdict.OK),
        (FINDINGS[:2], Verdict.NOTE),
        (FINDINGS[2::-1], Verdict.WARNING),
        (FINDINGS, Verdict.PROBLEM),
    ],
    ids=["none", "note", "warning", "problem"],
)
def test_the_worst_finding_is_the_verdict(findings: list[Finding], verdict: Verdict) -> None:
    assert Examination(findings).verdict is verdict


def test_every_check_says_something_about_this_machine(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path / "store"), seconds=None)
    checks = {finding.check.removeprefix("nvme: ") for finding in examination.findings}
    checks = {check.partition(" nvme")[0].split(" vd")[0] for check in checks}
    assert checks >= {
        "configuration",
        "file system",
        "directory",
        "free space",
        "O_DIRECT",
        "memory",
        "memlock",
        "huge pages",
        "open files",
        "/dev/shm",
        "GPUDirect",
    }
    assert examination.findings[0].check == "configuration"
    assert any(check.startswith("device") for check in checks)
    assert not [f for f in examination.findings if "could not be looked at" in f.found]
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_is_in_the_findings_and_in_the_figures(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path), seconds=0.05)
    (read,) = found(examination, "nvme: read rate")
    rates = examination.rates["nvme"]
    assert approximate_rate(rates.read_bytes_per_s) in read.found
    assert (rates.piece_bytes, rates.threads) == (64 << 10, 2)
    assert list(tmp_path.iterdir()) == []


def test_no_measurement_is_made_when_none_is_wanted(tmp_path: Path) -> None:
    assert examine(config_of(tmp_path), seconds=None).rates == {}


def test_what_check_refuses_is_a_problem_said_once(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path, nvme="4PiB"), seconds=None)
    problems = [f for f in examination.findings if f.verdict is Verdict.PROBLEM]
    assert [(f.check, f.key) for f in problems] == [("nvme: free space", "tiers[1].capacity")]


def test_a_store_that_can_be_nowhere_is_what_check_says(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path / "no/store"), seconds=0.05)
    (problem,) = (f for f in examination.findings if f.verdict is Verdict.PROBLEM)
    assert (problem.check, problem.key) == ("configuration", "tiers[1].path")
    assert problem.found.startswith("a.yaml:3: tiers[1].path = ")
    assert problem.remedy.startswith("mount the disk or run: mkdir -p")
    assert examination.rates == {}


def test_a_warning_of_check_is_a_warning(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path, ram="64MiB"), seconds=None)
    _, warning = found(examination, "configuration")
    assert warning.verdict is Verdict.WARNING
    assert warning.remedy == "capacities should grow downward"


def test_of_data_parallel_ranks_the_first_is_examined(tmp_path: Path) -> None:
    assert not found(examine(config_of(tmp_path / "kv"), seconds=None), "data parallelism")
    examination = examine(config_of(Path(f"'{tmp_path}/{{data_parallel_rank}}'")), seconds=None)
    assert [each.verdict for each in found(examination, "data parallelism")] == [Verdict.NOTE]
    (directory,) = found(examination, "nvme: directory")
    assert directory.found.startswith(f"{tmp_path}/0 is not there yet")


def test_two_warnings_about_one_key_are_both_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        _store, "find_room", lambda found, place: Room(64 << 20, 0, 64 << 20, None)
    )
    examination = examine(config_of(tmp_path, ram="64MiB"), seconds=None)
    warnings = [f.check for f in examination.findings if f.key == "tiers[1].capacity"]
    assert warnings == ["configuration", "nvme: free space"]


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    nowhere = Machine(tmp_path / "proc", tmp_path / "sys", tmp_path / "dev")
    examination = examine(config_of(tmp_path), seconds=None, machine=nowhere)
    (mount,) = found(examination, "nvme: file system")
    (shared,) = found(examination, "/dev/shm")
    for finding in (mount, shared):
        assert finding.verdict is Verdict.WARNING
        assert finding.found.startswith("could not be looked at: ")
    assert found(examination, "GPUDirect")


def test_an_error_without_words_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(proc: Path) -> HugePagePool:
        raise RuntimeError

    monkeypatch.setattr(_examine, "huge_page_pool", stumble)
    (finding,) = found(examine(config_of(tmp_path), seconds=None), "huge pages")
    assert finding.found == "could not be looked at: RuntimeError"


@pytest.mark.parametrize(("write", "pages"), [("through", 2), ("evict", 10)])
def test_the_relay_between_two_disks_needs_pages_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, pages: int
) -> None:
    pool = HugePagePool(2 << 20, total=100, free=100)
    monkeypatch.setattr(_examine, "huge_page_pool", lambda proc: pool)
    disks = "".join(
        f"- {{kind: nvme, name: {name}, path: {tmp_path / name}, capacity: 64MiB}}\n"
        for name in ("fast", "large")
    )
    config = parse_config(
        f"tiers:\n- {{kind: ram, capacity: 1MiB}}\n{disks}"
        f"placement: {{write: {write}}}\ntransfer: {{piece: 8MiB}}\n",
        source="test",
    )
    taken = f"the RAM tier takes {pages}"
    assert examine_pages(config).found == f"100 huge pages reserved and free; {taken}"


def run_doctor(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "kvtier")
    return subprocess.run(
        # Where pytest runs, readline has set COLUMNS, which says how long lines are to be.
        ["env", "-u", "COLUMNS", sys.executable, *command, "doctor", str(file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=Path(__file__).parents[2],
    )


def write_config(directory: Path, capacity: str) -> Path:
    file = directory / "kvtier.yaml"
    file.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 1MiB}\n"
        f"  - {{kind: nvme, path: '{directory}/store', capacity: {capacity}}}\n"
        "transfer: {piece: 64KiB}\n"
    )
    return file


def test_the_command_reports_to_a_program(tmp_path: Path) -> None:
    ran = run_doctor(write_config(tmp_path, "64MiB"), "--json", "--seconds", "0.1")
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert report["measured"]["nvme"]["read_bytes_per_s"] > 0
    assert {finding["verdict"] for finding in report["findings"]} <= {"ok", "note", "warning"}
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.yaml"]


def test_the_command_fails_on_a_problem_and_prints_the_remedy(tmp_path: Path) -> None:
    ran = run_doctor(write_config(tmp_path, "4PiB"), "--no-measure")
    assert (ran.returncode, ran.stderr) == (1, "")
    remedy = "remedy: lower the capacity or free space: all of it is reserved at start"
    assert remedy in [line.strip() for line in ran.stdout.splitlines()]
    assert "\x1b" not in ran.stdout
