"""The examination as a whole: findings, the table, and the two commands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli._examine import show_examination
from kvtier.config import KvtierConfig, parse_config
from kvtier.doctor import Examination, Finding, Status, _examine, examine
from kvtier.doctor._machine import Machine
from kvtier.doctor.rates import MeasuredRates
from kvtier.errors import ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.os.limits import HugePagePool, MemoryLimit
from kvtier.units import approximate_rate

FILE = Path("kvtier.yaml")
RANK = "{data_parallel_rank}"
FINDINGS = [
    Finding("configuration", Status.OK, "ram of 4.00 GiB, nvme of 8.00 GiB"),
    Finding("nvme: device nvme0n1", Status.NOTE, "a virtual disk", "trust the rates"),
    Finding(
        "nvme: file system",
        Status.WARNING,
        "overlay on overlay, mounted at /: a container's own layer: slow, and gone with it",
        "mount a volume of a local disk into the container and name it as path",
    ),
    Finding(
        "nvme: free space",
        Status.PROBLEM,
        "too little",
        "free space",
        "tiers[1].capacity",
        "kvtier.yaml:6: tiers[1].capacity = 8GiB",
    ),
]
REPORT = """\
ok       configuration         ram of 4.00 GiB, nvme of 8.00 GiB
note     nvme: device nvme0n1  a virtual disk
                               remedy: trust the rates
warning  nvme: file system     overlay on overlay, mounted at /: a container's
                               own layer: slow, and gone with it
                               remedy: mount a volume of a local disk into the
                               container and name it as path
problem  nvme: free space      too little
                               at: kvtier.yaml:6: tiers[1].capacity = 8GiB
                               remedy: free space
kvtier.yaml: 1 problem, 1 warning, 1 note
"""


def config_of(
    path: Path | str, *, ram: str = "1MiB", nvme: str = "64MiB", more: str = ""
) -> KvtierConfig:
    """Return a configuration whose nvme tier starts on line 4."""
    text = f"""\
tiers:
  - kind: ram
    capacity: {ram}
  - kind: nvme
    path: '{path}'
    capacity: {nvme}
    {more}
transfer: {{piece: 64KiB, io_threads: 2}}
"""
    return parse_config(text, source="a.yaml")


def found(examination: Examination, check: str) -> list[Finding]:
    return [finding for finding in examination.findings if finding.check == check]


def problems(config: KvtierConfig, *, ranks: int = 1) -> list[str]:
    return examine(config, ranks=ranks).lines(Status.PROBLEM)


def warnings(config: KvtierConfig) -> list[str]:
    """Return the warnings that do not depend on the machine's disk."""
    return [
        finding.line()
        for finding in examine(config).findings
        if finding.status is Status.WARNING
        and finding.check in {"configuration", "nvme: options", "nvme: free space"}
    ]


def printed(examination: Examination, *, colour: bool = False) -> str:
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=colour, highlight=False)
    show_examination(terminal, FILE, examination)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def test_the_report_fits_80_columns_and_has_no_colour_in_a_pipe() -> None:
    assert printed(Examination(FINDINGS)) == REPORT


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in printed(Examination(FINDINGS), colour=True)


def test_markup_in_a_path_is_text() -> None:
    finding = Finding("a", Status.OK, "[bold]/data[/bold]")
    assert "[bold]/data[/bold]" in printed(Examination([finding]))


def test_the_summary_says_ok_unless_there_is_a_warning() -> None:
    assert printed(Examination(FINDINGS[:1])).endswith("kvtier.yaml: ok\n")
    assert printed(Examination(FINDINGS[:2])).endswith("kvtier.yaml: ok, 1 note\n")
    assert printed(Examination(FINDINGS[:3])).endswith("kvtier.yaml: 1 warning, 1 note\n")


def test_the_document_has_what_the_table_has() -> None:
    document = Examination(FINDINGS).as_dict()
    assert document["status"] == "problem"
    assert document["findings"][3] == {
        "check": "nvme: free space",
        "status": "problem",
        "reason": "too little",
        "remedy": "free space",
        "key": "tiers[1].capacity",
        "place": "kvtier.yaml:6: tiers[1].capacity = 8GiB",
    }
    assert document["measured"] == {}


def test_a_warning_needs_a_remedy() -> None:
    Finding("a", Status.NOTE, "b")
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("a", Status.WARNING, "b")


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], Status.OK),
        (FINDINGS[:2], Status.NOTE),
        (FINDINGS[2::-1], Status.WARNING),
        (FINDINGS, Status.PROBLEM),
    ],
    ids=["none", "note", "warning", "problem"],
)
def test_the_worst_finding_is_the_status(findings: list[Finding], status: Status) -> None:
    assert Examination(findings).status is status


def test_an_examination_finds_something_for_every_check_and_writes_nothing(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    store.mkdir(0o700)
    before = store.stat()
    examination = examine(config_of(store))
    checks = [finding.check for finding in examination.findings]
    device = next(check for check in checks if check.startswith("nvme: device"))
    assert list(dict.fromkeys(checks)) == [
        "configuration",
        "nvme: directory",
        "nvme: free space",
        "nvme: file system",
        device,
        "huge pages",
        "memory",
    ]
    assert not [f for f in examination.findings if "could not be examined" in f.reason]
    assert examination.rates == {}
    after = store.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert list(tmp_path.iterdir()) == [store]


def test_reserved_huge_pages_hold_the_ram_tier_whatever_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HugePagePool(2 << 20, total=100, free=100)
    monkeypatch.setattr(_examine, "huge_page_pool", lambda proc: pool)
    monkeypatch.setattr(_examine, "memory_limits", lambda proc, sys: [MemoryLimit("host", 0)])
    (finding,) = found(examine(config_of(tmp_path)), "memory")
    assert finding == Finding("memory", Status.OK, "the reserved huge pages hold the RAM tier")


def test_a_directory_that_does_not_exist_yet_is_fine_and_not_created(tmp_path: Path) -> None:
    (directory,) = found(examine(config_of(tmp_path / "store")), "nvme: directory")
    assert directory.status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_is_in_the_findings_and_in_the_rates(tmp_path: Path) -> None:
    examination = examine(config_of(tmp_path), measure_s=0.05)
    (read,) = found(examination, "nvme: read rate")
    rates = examination.rates["nvme"]
    assert isinstance(rates, MeasuredRates)
    assert approximate_rate(rates.read_bytes_per_s) in read.reason
    assert (rates.piece_bytes, rates.threads) == (64 << 10, 2)
    assert found(examination, "nvme: O_DIRECT")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/proc/version", "not a directory; name a directory"),
        ("/proc/no/such/store", "its parent /proc/no/such does not exist; mount"),
        ("/proc/version/store", "its parent /proc/version is not a directory; name a dir"),
        ("/proc/version/deep/store", "its parent /proc/version is not a directory; name"),
    ],
)
def test_a_path_without_room_for_a_store_is_a_problem(path: str, problem: str) -> None:
    (line,) = problems(config_of(path))
    assert line.startswith(f"a.yaml:5: tiers[1].path = {path}: {problem}")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("", "; give it to the user that runs the engine"),
        ("store", "; make the directory as root and give it to the user"),
    ],
)
def test_a_directory_that_is_not_writable_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (line,) = problems(config_of(tmp_path / name))
    assert f"{tmp_path} is not writable for user {os.geteuid()}{remedy}" in line


def test_a_link_to_a_disk_that_is_not_mounted_is_a_problem(tmp_path: Path) -> None:
    link = tmp_path / "store"
    link.symlink_to(tmp_path / "mounted" / "kvtier")
    (line,) = problems(config_of(link))
    assert f": links to {tmp_path}/mounted/kvtier, which does not exist; create it" in line


def test_a_link_to_the_root_of_the_file_system_is_a_problem(tmp_path: Path) -> None:
    link = tmp_path / "store"
    link.symlink_to("/")
    (line,) = problems(config_of(link))
    assert f": {link} leads to the root of the file system; use a directory" in line


def test_a_path_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (line,) = problems(config_of(tmp_path / ("x" * 300)))
    assert "cannot be read: File name too long; run this as the user" in line


def test_a_directory_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    (directory,) = found(examine(config_of(tmp_path)), "nvme: directory")
    assert (directory.status, directory.remedy) == (
        Status.WARNING,
        f"run: chmod 700 {tmp_path}",
    )


def test_the_modes_of_a_directory_with_other_files_are_left_as_they_are(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "requests-000001.jsonl").touch()
    (directory,) = found(examine(config_of(tmp_path)), "nvme: directory")
    assert directory.remedy == f"run: chmod 700 {tmp_path}"
    (tmp_path / "passwd").touch()
    (directory,) = found(examine(config_of(tmp_path)), "nvme: directory")
    own = f"{tmp_path}/kvtier"
    assert directory.remedy == f"use a directory that only kvtier fills, such as {own}"
    tmp_path.chmod(0o777)
    (line,) = problems(config_of(tmp_path))
    assert line.endswith(f"; use a directory that only kvtier fills, outside of {tmp_path}")


def test_a_recording_without_a_place_is_a_problem(tmp_path: Path) -> None:
    place = tmp_path / "missing" / "trace"
    text = f"tiers: [{{kind: ram, capacity: 1MiB}}]\ntrace: {{record: {place}}}\n"
    (line,) = problems(parse_config(text, source="f"))
    assert line.startswith("f:2: trace.record = ")
    assert f"its parent {place.parent} does not exist; mount the disk" in line


def test_more_memory_than_there_is_is_a_problem(tmp_path: Path) -> None:
    (line,) = problems(config_of(tmp_path / "no/store", ram="1PiB", nvme="2PiB"))[1:]
    assert line.startswith("a.yaml:3: tiers[0].capacity = 1PiB: the RAM tier needs 1.00 PiB, ")


def test_memory_for_one_rank_may_be_too_little_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit("available memory", 3 << 29)
    monkeypatch.setattr(_examine, "memory_limits", lambda proc, sys: [limit])
    config = config_of(tmp_path / RANK, ram="1GiB", nvme="2GiB")
    assert problems(config) == []
    (line,) = problems(config, ranks=2)
    assert "the RAM tier needs 2.00 GiB, available memory leaves 1.50 GiB" in line


def test_a_directory_that_is_missing_for_all_ranks_is_one_problem(tmp_path: Path) -> None:
    (line,) = problems(config_of(tmp_path / "no" / RANK), ranks=4)
    missing = tmp_path / "no"
    assert line.endswith(
        f"its parent {missing} does not exist; mount the disk or run: mkdir -p {missing}"
    )


def test_each_missing_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    lines = problems(config_of(tmp_path / RANK / "kv"), ranks=3)
    for rank, line in zip("02", lines, strict=True):
        assert f"its parent {tmp_path}/{rank} does" in line


def test_ranks_that_would_share_a_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a directory of its own; write"):
        examine(config_of(tmp_path / "store"), ranks=2)


def test_ranks_are_named_in_a_note(tmp_path: Path) -> None:
    assert not found(examine(config_of(tmp_path / "kv")), "data parallelism")
    config = config_of(tmp_path / RANK)
    (one,) = found(examine(config), "data parallelism")
    assert one.remedy == "add --data-parallel-size N to examine N ranks"
    (three,) = found(examine(config, ranks=3), "data parallelism")
    assert three.reason == "3 ranks need 3.00 MiB of memory and 192 MiB of slower tiers"


def test_disks_of_other_ranks_are_named_as_not_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir(0o700)
    config = config_of(tmp_path / RANK)
    assert not found(examine(config, ranks=2), "nvme: other ranks")
    stat = Path.stat

    def on_its_own_disk(path: Path, **options: bool) -> os.stat_result:
        status = stat(path, **options)
        return os.stat_result((*status[:2], 77, *status[3:])) if path.name == "1" else status

    monkeypatch.setattr(Path, "stat", on_its_own_disk)
    (note,) = found(examine(config, ranks=2), "nvme: other ranks")
    assert note.status is Status.NOTE
    assert "are not examined or measured" in note.reason


def test_a_slower_tier_that_is_no_larger_is_a_warning(tmp_path: Path) -> None:
    (line,) = warnings(config_of(tmp_path, ram="64MiB"))
    assert line.startswith("a.yaml:6: tiers[1].capacity = 64MiB: no larger than the faster")


def test_little_room_and_no_larger_capacity_are_two_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockIo, "free_nbytes", lambda *_: 90 << 20)
    first, second = warnings(config_of(tmp_path, ram="64MiB"))
    assert "no larger" in first
    assert "little is left; lower the capacity" in second


def test_placement_without_a_slower_tier_is_a_warning_per_key(tmp_path: Path) -> None:
    placement = "placement: {write_after: 2, admit: second-touch, write_budget_per_day: 1GiB}\n"
    alone = parse_config(
        f"tiers: [{{kind: ram, capacity: 1MiB}}]\n{placement}", source="a.yaml"
    )
    assert [line.partition(": no effect")[0] for line in warnings(alone)] == [
        "a.yaml:2: placement.write_after = 2",
        "a.yaml:2: placement.admit = second-touch",
        "a.yaml:2: placement.write_budget_per_day = 1GiB",
    ]
    assert warnings(config_of(tmp_path, more=f"\n{placement}")) == []


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    nowhere = Machine(tmp_path / "proc", tmp_path / "sys", tmp_path / "dev")
    examination = examine(config_of(tmp_path), machine=nowhere)
    (mount,) = found(examination, "nvme: file system")
    assert mount.status is Status.WARNING
    assert mount.reason.startswith("could not be examined: ")
    assert found(examination, "memory")


def test_an_error_without_words_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(proc: Path) -> HugePagePool:
        raise RuntimeError

    monkeypatch.setattr(_examine, "huge_page_pool", stumble)
    (finding,) = found(examine(config_of(tmp_path)), "memory")
    assert finding.reason == "could not be examined: RuntimeError"


@pytest.mark.parametrize(("write", "pages"), [("through", 2), ("evict", 10)])
def test_the_bounce_buffer_between_two_disks_needs_pages_as_well(
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
    (finding,) = found(examine(config), "huge pages")
    assert finding.reason == f"the RAM tier needs {pages}; 100 are reserved and free"


def test_a_directory_that_vanishes_while_it_is_examined_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanishing = tmp_path / "namespace"
    vanishing.mkdir()
    tmp_path.chmod(0o700)
    scan = os.scandir

    def scan_too_late(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == vanishing and vanishing.exists():
            vanishing.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_too_late)
    kind = "kvtier.testing.file_tier:FileTier"
    text = f"tiers: [{{kind: ram, capacity: 1MiB}}, {{kind: '{kind}', path: {tmp_path}"
    config = parse_config(f"{text}, capacity: 2MiB}}]", source="a.yaml")
    assert problems(config) == []
    assert not vanishing.exists()


def run(command: str, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # Where pytest runs, readline has set COLUMNS, which says how long lines are to be.
        ["env", "-u", "COLUMNS", sys.executable, "-m", "kvtier", command, file, *arguments],
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
        "transfer: {piece: 4MiB}\n"
    )
    return file


def test_the_doctor_finds_what_the_check_finds_and_measures(tmp_path: Path) -> None:
    file = write_config(tmp_path, "64MiB")
    check, doctor = run("check", file, "--json"), run("doctor", file, "--json", "--seconds=0.1")
    assert (check.returncode, check.stderr, doctor.returncode, doctor.stderr) == (0, "", 0, "")
    shallow, deep = json.loads(check.stdout), json.loads(doctor.stdout)
    assert shallow["config"] == deep["config"]
    assert shallow["measured"] == {}
    assert deep["measured"]["nvme"]["read_bytes_per_s"] > 0
    checks = [finding["check"] for finding in deep["findings"]]
    assert [f["check"] for f in shallow["findings"]] == [
        each for each in checks if "rate" not in each and "O_DIRECT" not in each
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.yaml"]


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_a_command_fails_on_a_problem_and_prints_place_and_remedy(
    tmp_path: Path, command: str
) -> None:
    file = write_config(tmp_path, "4PiB")
    ran = run(command, file)
    assert (ran.returncode, ran.stderr) == (1, "")
    lines = [line.strip() for line in ran.stdout.splitlines()]
    assert f"at: {file}:3: tiers[1].capacity = 4PiB" in lines
    assert "remedy: lower the capacity or free space: all of it is reserved at start" in lines
    assert lines[-1].startswith(f"{file}: 1 problem")
    assert "\x1b" not in ran.stdout
