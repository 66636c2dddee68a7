"""What the probes read from the kernel's files, laid out in a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.doctor._devices import BlockQueue, find_queues
from kvtier.doctor._machine import Machine
from kvtier.doctor._memory import (
    find_gpus,
    process_limits,
    shared_memory_nbytes,
)
from kvtier.doctor._mounts import Mount, find_mount, is_exempt_from_cow, parse_mounts
from kvtier.doctor._store import stored_chunk_nbytes
from kvtier.os.limits import HugePagePool, MemoryLimit, huge_page_pool, memory_limits
from kvtier.tiers.slab.namespace import Layout
from kvtier.types import LayoutFingerprint

QUEUE = {
    "logical_block_size": "512",
    "max_sectors_kb": "1280",
    "max_hw_sectors_kb": "2048",
    "nr_requests": "1023",
    "scheduler": "[none] mq-deadline",
    "rotational": "0",
    "write_cache": "write back",
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
    expected = BlockQueue("nvme0n1", 512, 1280, 2048, 1023, "none", False, "write back")
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
    assert find_gpus(tree.machine) == []
    assert huge_page_pool(tree.machine.proc) == HugePagePool(0, 0, 0)


def test_gpus_are_counted_without_their_helpers(tree: Tree) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        tree.write(f"dev/{name}", "")
    assert find_gpus(tree.machine) == ["nvidia0", "nvidia1"]


def test_huge_pages_promised_to_somebody_are_not_free(tree: Tree) -> None:
    tree.write(
        "proc/meminfo",
        "HugePages_Total:      64\nHugePages_Free:       60\nHugePages_Rsvd:       10\n"
        "Hugepagesize:       2048 kB\n",
    )
    assert huge_page_pool(tree.machine.proc) == HugePagePool(2 << 20, total=64, free=50)


def test_this_machine_has_limits_and_shared_memory() -> None:
    limits = process_limits()
    assert limits.open_files is None or limits.open_files > 0
    assert shared_memory_nbytes(Machine()) > 0


def make_namespace(root: Path, slot_nbytes: int) -> Path:
    """Lay out what an engine with slots of this size leaves; returns its directory."""
    layout = Layout(LayoutFingerprint({"model": f"m{slot_nbytes}"}), slot_nbytes)
    directory = root / layout.fingerprint.namespace()
    directory.mkdir()
    (directory / "layout.json").write_text(layout.to_json())
    (directory / "lock").write_text(f"pid {slot_nbytes} on host a\x1b\n")
    return directory


def test_a_chunk_is_as_large_as_that_of_the_model_that_came_last(tmp_path: Path) -> None:
    for slot_nbytes, opened_ns in ((8192, 1), (4096, 3), (16384, 2)):
        os.utime(make_namespace(tmp_path, slot_nbytes), ns=(opened_ns, opened_ns))
    assert stored_chunk_nbytes(tmp_path) == 4096


def test_a_store_that_no_model_used_has_no_chunk_size(tmp_path: Path) -> None:
    assert stored_chunk_nbytes(tmp_path) is None
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/lock").write_text("")
    assert stored_chunk_nbytes(tmp_path) is None
