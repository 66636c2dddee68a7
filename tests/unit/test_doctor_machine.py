"""Checks of the machine: what is read from the kernel's files, and every status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.doctor import Finding, Status
from kvtier.doctor._machine import (
    BlockQueue,
    Machine,
    Mount,
    check_huge_pages,
    check_memory,
    check_mount,
    check_queues,
    find_mount,
    find_queues,
    is_exempt_from_cow,
    parse_mounts,
)
from kvtier.os.limits import HugePagePool, MemoryLimit, huge_page_pool, memory_limits

GIB = 1 << 30
NVME = BlockQueue(
    name="nvme0n1",
    logical_block_nbytes=512,
    max_request_kb=1280,
    max_hardware_request_kb=2048,
    scheduler="none",
    rotational=False,
)

QUEUE = {
    "logical_block_size": "512",
    "max_sectors_kb": "1280",
    "max_hw_sectors_kb": "2048",
    "scheduler": "[none] mq-deadline",
    "rotational": "0",
}


class Tree:
    """A machine in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine = Machine(root / "proc", root / "sys", root / "dev")

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def disk(self, name: str, number: str, *, members: tuple[str, ...] = ()) -> Path:
        """Make a whole device, such as the kernel shows it."""
        directory = self.root / "sys/devices" / name
        for file, text in QUEUE.items():
            self.write(f"sys/devices/{name}/queue/{file}", f"{text}\n")
        for member in members:
            (directory / "slaves").mkdir(exist_ok=True)
            (directory / "slaves" / member.rpartition("/")[2]).symlink_to(
                self.root / "sys/devices" / member
            )
        self.number(number, directory)
        return directory

    def partition(self, disk: str, name: str, number: str) -> None:
        self.write(f"sys/devices/{disk}/{name}/partition", "1\n")
        self.number(number, self.root / "sys/devices" / disk / name)

    def number(self, number: str, directory: Path) -> None:
        link = self.root / "sys/dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def mount_at(major: int, minor: int, source: str = "/dev/x") -> Mount:
    return Mount(major, minor, Path("/"), "ext4", source, frozenset())


def test_the_innermost_and_latest_mount_counts(tree: Tree) -> None:
    place = tree.root / "my data/store"
    place.mkdir(parents=True)
    escaped = str(place.parent).replace(" ", "\\040")
    tree.write(
        "proc/self/mountinfo",
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 8:2 / {escaped} rw - ext4 /dev/sda2 rw\n"
        f"3 2 259:1 /sub {escaped} rw,noatime shared:7 - xfs /dev/nvme0n1 rw,prjquota\n"
        f"4 1 8:3 / {escaped}2 rw - ext4 /dev/sda3 rw\n"
        "not a mount\n",
    )
    mount = find_mount(tree.machine, place)
    assert (mount.major, mount.minor, mount.kind) == (259, 1, "xfs")
    assert mount.point == place.parent
    assert mount.options == {"rw", "noatime", "prjquota"}


def test_a_place_on_no_mount_is_an_error(tree: Tree) -> None:
    tree.write("proc/self/mountinfo", "")
    with pytest.raises(LookupError, match="no mount contains"):
        find_mount(tree.machine, tree.root)


def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert find_mount(Machine(), tmp_path).kind
    assert list(parse_mounts(Path("/proc/self/mountinfo").read_text()))
    assert is_exempt_from_cow(tmp_path) in {True, False}


def test_a_partition_leads_to_its_disk(tree: Tree) -> None:
    tree.disk("nvme0n1", "259:0")
    tree.partition("nvme0n1", "nvme0n1p2", "259:2")
    expected = BlockQueue("nvme0n1", 512, 1280, 2048, "none", False)
    assert find_queues(tree.machine, mount_at(259, 2)) == [expected]
    assert find_queues(tree.machine, mount_at(259, 0)) == [expected]


def test_a_mapped_raid_leads_to_its_members_each_once(tree: Tree) -> None:
    tree.disk("nvme0n1", "259:0")
    tree.disk("nvme1n1", "259:1")
    tree.partition("nvme1n1", "nvme1n1p1", "259:3")
    tree.disk("md0", "9:0", members=("nvme1n1/nvme1n1p1", "nvme0n1", "nvme1n1"))
    tree.disk("dm-0", "253:0", members=("md0",))
    names = [queue.name for queue in find_queues(tree.machine, mount_at(253, 0))]
    assert names == ["nvme0n1", "nvme1n1"]


def test_a_file_system_without_a_block_device_has_no_queue(tree: Tree) -> None:
    assert find_queues(tree.machine, mount_at(0, 23, "tmpfs")) == []
    assert find_queues(tree.machine, mount_at(0, 23, "/dev/gone")) == []
    tree.write("dev/plain", "")
    assert find_queues(tree.machine, mount_at(0, 23, "/dev/plain")) == []
    assert find_queues(tree.machine, mount_at(8, 99)) == []


def test_memory_is_limited_by_the_machine_and_by_every_group_around(tree: Tree) -> None:
    tree.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    tree.write("proc/self/cgroup", "4:cpu,memory:/pod/engine\n3:cpu:/\n0::/slice\n")
    groups = "sys/fs/cgroup"
    tree.write(f"{groups}/memory/pod/memory.limit_in_bytes", "5000")
    tree.write(f"{groups}/memory/pod/memory.usage_in_bytes", "1000")
    statistics = "total_rss 9\ntotal_active_file 100\ntotal_inactive_file 20\n"
    tree.write(f"{groups}/memory/pod/memory.stat", statistics)
    tree.write(f"{groups}/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    tree.write(f"{groups}/memory/memory.usage_in_bytes", "1")
    tree.write(f"{groups}/memory.max", "3000")
    tree.write(f"{groups}/memory.current", "4000")
    tree.write(f"{groups}/memory.stat", "anon 9\nactive_file 500\ninactive_file 1500\n")
    tree.write(f"{groups}/slice/memory.max", "max")
    tree.write(f"{groups}/slice/memory.current", "1")
    assert memory_limits(tree.machine.proc, tree.machine.sys) == [
        MemoryLimit("available memory", 64 << 10),
        MemoryLimit("the control group's memory.limit_in_bytes", 4120),
        MemoryLimit("the control group's memory.max", 1000),
    ]


def test_a_machine_that_says_nothing_has_no_limits(tree: Tree) -> None:
    assert memory_limits(tree.machine.proc, tree.machine.sys) == []
    assert huge_page_pool(tree.machine.proc) == HugePagePool(0, 0, 0)


def test_reserved_huge_pages_are_not_free(tree: Tree) -> None:
    tree.write(
        "proc/meminfo",
        "HugePages_Total:      64\nHugePages_Free:       60\nHugePages_Rsvd:       10\n"
        "Hugepagesize:       2048 kB\n",
    )
    assert huge_page_pool(tree.machine.proc) == HugePagePool(2 << 20, total=64, free=50)


def statuses(findings: Iterable[Finding]) -> list[str]:
    return [finding.status.value for finding in findings]


def mount_of(kind: str, *options: str) -> Mount:
    return Mount(259, 1, Path("/data"), kind, "/dev/nvme0n1p1", frozenset({"rw", *options}))


@pytest.mark.parametrize(
    ("kind", "status", "word"),
    [
        ("ext4", "ok", "mounted at /data"),
        ("xfs", "ok", "mounted at /data"),
        ("tmpfs", "warning", "memory, not a disk"),
        ("overlay", "warning", "deleted with the container"),
        ("btrfs", "warning", "copies on write"),
        ("zfs", "warning", "copies on write"),
        ("nfs", "warning", "network file system"),
        ("nfs4", "warning", "network file system"),
        ("fuse.sshfs", "warning", "network file system"),
        ("virtiofs", "warning", "network file system"),
        ("f2fs", "note", "not tested on it"),
    ],
)
def test_a_file_system_is_judged_by_its_kind(kind: str, status: str, word: str) -> None:
    finding = check_mount("nvme", mount_of(kind), exempt_from_cow=False)
    assert (finding.check, finding.status) == ("nvme: file system", status)
    assert word in finding.reason


def test_btrfs_without_copy_on_write_is_fine() -> None:
    plain, without = mount_of("btrfs"), mount_of("btrfs", "nodatacow")
    assert check_mount("nvme", plain, exempt_from_cow=True).status is Status.OK
    assert check_mount("nvme", without, exempt_from_cow=False).status is Status.OK


def queue_findings(queue: BlockQueue) -> list[Finding]:
    return list(check_queues("nvme", [queue], piece_nbytes=8 << 20))


def test_a_good_drive_is_one_line() -> None:
    (finding,) = queue_findings(NVME)
    assert finding.check == "nvme: device nvme0n1"
    assert finding.reason == "requests of 1280 KiB, scheduler none"


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"rotational": True, "name": "sda"}, "warning", "a spinning disk"),
        ({"rotational": True, "name": "vda"}, "note", "a virtual disk"),
        ({"scheduler": "mq-deadline"}, "warning", "scheduler mq-deadline"),
        ({"scheduler": "bfq", "name": "sda"}, "warning", "scheduler bfq"),
        ({"logical_block_nbytes": 16384}, "warning", "sectors of 16.0 KiB"),
        ({"max_request_kb": 128}, "warning", "requests of 128 KiB; the device takes"),
    ],
)
def test_a_limit_that_slows_a_drive_down_is_a_finding(
    change: dict[str, object], status: str, words: str
) -> None:
    _, finding = queue_findings(replace(NVME, **change))  # type: ignore[arg-type]
    assert finding.status == status
    assert words in finding.reason


def test_small_requests_are_no_fault_where_the_device_takes_no_larger_ones() -> None:
    small = replace(NVME, max_request_kb=128, max_hardware_request_kb=128)
    assert statuses(queue_findings(small)) == ["ok"]


def test_a_scheduler_on_other_drives_is_left_alone() -> None:
    queue = replace(NVME, name="sda", scheduler="mq-deadline")
    assert statuses(queue_findings(queue)) == ["ok"]


def test_a_file_system_without_a_device_cannot_be_judged() -> None:
    (finding,) = check_queues("nvme", [], piece_nbytes=8 << 20)
    assert finding.status is Status.NOTE


@pytest.mark.parametrize(
    ("free", "engine_runs", "status"),
    [
        (65 * GIB, False, "ok"),
        (64 * GIB, False, "warning"),
        (64 * GIB - 1, False, "problem"),
        (64 * GIB - 1, True, "note"),
        (65 * GIB, True, "ok"),
    ],
)
def test_the_tightest_limit_decides_about_memory(
    free: int, engine_runs: bool, status: str
) -> None:
    limits = [MemoryLimit("available memory", 900 * GIB), MemoryLimit("memory.max", free)]
    finding = check_memory(64 * GIB, limits, engine_runs=engine_runs)
    assert finding.status == status
    assert "memory.max leaves" in finding.reason


def test_unknown_free_memory_is_a_note() -> None:
    assert check_memory(GIB, [], engine_runs=False).status is Status.NOTE


@pytest.mark.parametrize(
    ("free", "mode", "status"),
    [
        (513, "auto", "ok"),
        (513, "require", "ok"),
        (512, "auto", "note"),
        (512, "require", "problem"),
        (0, "off", "ok"),
    ],
)
def test_huge_pages_are_counted_against_the_ram_tier(free: int, mode: str, status: str) -> None:
    finding = check_huge_pages(GIB, HugePagePool(2 << 20, total=600, free=free), mode=mode)
    assert finding.status == status
    if free == 513:
        assert finding.reason == "the RAM tier needs 513; 513 are reserved and free"
    if free == 512:
        taken = "the RAM tier needs 513; 512 are reserved and free: small pages "
        assert finding.reason.startswith(taken)
        assert finding.remedy.endswith("vm.nr_hugepages=601")


def test_a_kernel_without_huge_pages_is_a_problem_only_if_they_are_required() -> None:
    pool = HugePagePool(0, 0, 0)
    assert check_huge_pages(GIB, pool, mode="auto").status is Status.OK
    assert check_huge_pages(GIB, pool, mode="require").status is Status.PROBLEM
