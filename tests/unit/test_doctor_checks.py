"""Every verdict of every check, from plain values."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvtier.doctor import Finding, MeasuredRates, Verdict
from kvtier.doctor._devices import BlockQueue, check_queues
from kvtier.doctor._memory import (
    check_memory,
    check_open_files,
    check_pages,
    check_pinning,
    check_shared_memory,
)
from kvtier.doctor._mounts import Mount, check_mount
from kvtier.doctor._rates import check_rates
from kvtier.doctor._store import (
    Room,
    check_direct_io,
    check_directory,
    check_room,
    check_use,
)
from kvtier.os.limits import HugePagePool, MemoryLimit
from kvtier.os.ownership import Exposure

GIB = 1 << 30
KEY = "tiers[1].capacity"
NVME = BlockQueue(
    name="nvme0n1",
    logical_block_nbytes=512,
    max_request_kb=1280,
    max_hardware_request_kb=2048,
    requests=1023,
    scheduler="none",
    rotational=False,
    write_cache="write back",
)
RATES = MeasuredRates(
    path="/data",
    direct_io=True,
    piece_bytes=8 << 20,
    threads=4,
    file_bytes=4 * GIB,
    seconds=2.0,
    read_bytes_per_s=6.5e9,
    read_p50_s=0.005,
    read_p99_s=0.009,
    read_pieces=1500,
    write_bytes_per_s=2.5e9,
    write_p50_s=0.012,
    write_p99_s=1.5,
    write_pieces=600,
)


def verdicts(findings: Iterable[Finding]) -> list[str]:
    return [finding.verdict.value for finding in findings]


def mount(kind: str, *options: str) -> Mount:
    return Mount(259, 1, Path("/data"), kind, "/dev/nvme0n1p1", frozenset({"rw", *options}))


def test_what_is_not_well_cannot_be_said_without_a_remedy() -> None:
    Finding("a", Verdict.NOTE, "b")
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("a", Verdict.WARNING, "b")


@pytest.mark.parametrize(
    ("kind", "verdict", "word"),
    [
        ("ext4", "ok", "mounted at /data"),
        ("xfs", "ok", "mounted at /data"),
        ("tmpfs", "warning", "memory, not a disk"),
        ("overlay", "warning", "gone with the container"),
        ("btrfs", "warning", "copies on write"),
        ("zfs", "warning", "copies on write"),
        ("nfs", "warning", "second engine"),
        ("nfs4", "warning", "second engine"),
        ("fuse.sshfs", "warning", "second engine"),
        ("virtiofs", "warning", "second engine"),
        ("f2fs", "note", "not one that kvtier is tested on"),
    ],
)
def test_a_file_system_is_judged_by_its_kind(kind: str, verdict: str, word: str) -> None:
    (finding,) = check_mount("nvme", mount(kind), exempt_from_cow=False)
    assert (finding.check, finding.verdict) == ("nvme: file system", verdict)
    assert word in finding.found


def test_btrfs_without_copy_on_write_is_fine() -> None:
    assert verdicts(check_mount("nvme", mount("btrfs"), exempt_from_cow=True)) == ["ok"]
    option = check_mount("nvme", mount("btrfs", "nodatacow"), exempt_from_cow=False)
    assert verdicts(option) == ["ok"]


@pytest.mark.parametrize(
    ("option", "verdict"),
    [("sync", "warning"), ("data=journal", "warning"), ("usrquota", "note")],
)
def test_an_odd_mount_option_is_a_finding_of_its_own(option: str, verdict: str) -> None:
    kind, odd = check_mount("nvme", mount("ext4", option), exempt_from_cow=False)
    assert (kind.verdict, odd.verdict) == (Verdict.OK, verdict)
    assert odd.found.startswith(f"mounted with {option}: ")


@pytest.mark.parametrize(
    ("free", "wanted", "verdict"),
    [
        (9 * GIB, 8 * GIB, "ok"),
        (1 * GIB, 0, "ok"),
        (8 * GIB + 1, 8 * GIB, "warning"),
        (4 * GIB, 4 * GIB, "warning"),
        (4 * GIB, 4 * GIB + 1, "problem"),
        (None, 4 * GIB, "ok"),
    ],
)
def test_the_capacity_is_held_against_free_space_and_the_store(
    free: int | None, wanted: int, verdict: str
) -> None:
    (finding,) = check_room("nvme", Room(free, 0, wanted, None), 8 * GIB, KEY)
    assert (finding.verdict, finding.key) == (verdict, KEY)
    assert "for a capacity of 8.00 GiB" in finding.found


def test_a_file_system_that_runs_out_of_inodes_is_a_warning() -> None:
    assert verdicts(check_room("nvme", Room(9 * GIB, 0, 8 * GIB, 64), 8 * GIB, KEY)) == ["ok"]
    few = verdicts(check_room("nvme", Room(9 * GIB, 0, 8 * GIB, 63), 8 * GIB, KEY))
    assert few == ["ok", "warning"]


def status(mode: int, uid: int) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "intruder", "verdict", "words"),
    [
        (None, None, "ok", "is not there yet"),
        (None, Exposure("/data has mode 0777", "chmod"), "problem", "/data has mode 0777"),
        (status(0o700, 1000), None, "ok", "mode 0700, user 1000"),
        (status(0o700, 0), Exposure("it is root's", "chown"), "problem", "it is root's"),
        (status(0o750, 1000), None, "warning", "mode 0750: others get at"),
    ],
    ids=["absent", "below what others fill", "own", "foreign", "open to others"],
)
def test_the_directory_is_this_users_and_nobody_elses(
    found: os.stat_result | None, intruder: Exposure | None, verdict: str, words: str
) -> None:
    finding = check_directory("nvme", Path("/data/kv"), found, intruder, "tiers[1].path")
    assert finding.verdict == verdict
    assert words in finding.found


@pytest.mark.parametrize(
    ("refusal", "wanted", "verdict"),
    [
        ("", "auto", "ok"),
        ("", "require", "ok"),
        ("", "off", "note"),
        ("Invalid argument", "auto", "warning"),
        ("Invalid argument", "require", "problem"),
        ("Invalid argument", "off", "note"),
    ],
)
def test_direct_io_is_judged_by_what_the_file_asks_for(
    refusal: str, wanted: Literal["auto", "require", "off"], verdict: str
) -> None:
    finding = check_direct_io("nvme", refusal, wanted, "tiers[1].direct_io")
    assert finding.verdict == verdict
    assert refusal in finding.found


def test_a_store_in_use_is_a_note_and_one_that_is_not_is_nothing() -> None:
    assert list(check_use("nvme", [])) == []
    (finding,) = check_use("nvme", ["pid 4711 on host a"])
    assert (finding.verdict, finding.found) == (Verdict.NOTE, "by pid 4711 on host a")


def queue_findings(queue: BlockQueue) -> list[Finding]:
    return list(check_queues("nvme", [queue], piece_nbytes=8 << 20, threads=4))


def test_a_good_drive_is_one_line() -> None:
    (finding,) = queue_findings(NVME)
    assert finding.check == "nvme: device nvme0n1"
    assert finding.found == (
        "requests of 1280 KiB, 1023 in the queue, scheduler none, write back cache"
    )


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({"rotational": True, "name": "sda"}, "warning", "a spinning disk"),
        ({"rotational": True, "name": "vda"}, "note", "as virtual disks do"),
        ({"scheduler": "mq-deadline"}, "warning", "scheduler mq-deadline"),
        ({"scheduler": "bfq", "name": "sda"}, "warning", "scheduler bfq"),
        ({"logical_block_nbytes": 16384}, "warning", "sectors of 16.0 KiB"),
        ({"max_request_kb": 128}, "warning", "requests of 128 KiB although"),
        ({"requests": 16}, "note", "4 pieces at once are 24 requests"),
    ],
)
def test_what_holds_a_drive_back_is_a_finding(
    change: dict[str, object], verdict: str, words: str
) -> None:
    _, finding = queue_findings(replace(NVME, **change))  # type: ignore[arg-type]
    assert finding.verdict == verdict
    assert words in finding.found


def test_small_requests_are_no_fault_where_the_device_takes_no_larger_ones() -> None:
    small = replace(NVME, max_request_kb=128, max_hardware_request_kb=128)
    assert verdicts(queue_findings(small)) == ["ok"]


def test_a_scheduler_on_other_drives_is_left_alone() -> None:
    queue = replace(NVME, name="sda", scheduler="mq-deadline")
    assert verdicts(queue_findings(queue)) == ["ok"]


def test_a_file_system_without_a_device_cannot_be_judged() -> None:
    (finding,) = check_queues("nvme", [], piece_nbytes=8 << 20, threads=4)
    assert finding.verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("free", "engine_runs", "verdict"),
    [
        (65 * GIB, False, "ok"),
        (64 * GIB, False, "warning"),
        (64 * GIB - 1, False, "problem"),
        (64 * GIB - 1, True, "note"),
        (65 * GIB, True, "ok"),
    ],
)
def test_the_tightest_limit_decides_about_memory(
    free: int, engine_runs: bool, verdict: str
) -> None:
    limits = [MemoryLimit("available memory", 900 * GIB), MemoryLimit("memory.max", free)]
    finding = check_memory(64 * GIB, limits, engine_runs=engine_runs)
    assert finding.verdict == verdict
    assert finding.found.startswith("memory.max leaves ")


def test_memory_that_nobody_counts_is_a_note() -> None:
    assert check_memory(GIB, [], engine_runs=False).verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("locked", "gpus", "verdict"),
    [
        (None, 1, "ok"),
        (GIB, 1, "ok"),
        (GIB - 1, 1, "warning"),
        (GIB - 1, 0, "ok"),
    ],
)
def test_the_memlock_limit_matters_only_with_a_gpu(
    locked: int | None, gpus: int, verdict: str
) -> None:
    assert check_pinning(GIB, locked, gpus=gpus).verdict == verdict


@pytest.mark.parametrize(("limit", "verdict"), [(None, "ok"), (1024, "ok"), (1023, "warning")])
def test_open_files_may_be_too_few(limit: int | None, verdict: str) -> None:
    assert check_open_files(limit).verdict == verdict


@pytest.mark.parametrize(
    ("free", "wanted", "verdict"),
    [
        (513, "auto", "ok"),
        (513, "require", "ok"),
        (512, "auto", "note"),
        (512, "require", "problem"),
        (0, "off", "ok"),
    ],
)
def test_huge_pages_are_counted_against_the_ram_tier(
    free: int, wanted: str, verdict: str
) -> None:
    finding = check_pages(GIB, HugePagePool(2 << 20, total=600, free=free), wanted=wanted)
    assert finding.verdict == verdict
    if free == 513:
        assert finding.found == "513 huge pages reserved and free; the RAM tier takes 513"
    if free == 512:
        taken = "512 huge pages reserved and free; the RAM tier takes 513: in small pages "
        assert finding.found.startswith(taken)
        assert finding.remedy.endswith("vm.nr_hugepages=601")


def test_a_kernel_without_huge_pages_matters_only_to_who_requires_them() -> None:
    pool = HugePagePool(0, 0, 0)
    assert check_pages(GIB, pool, wanted="auto").verdict is Verdict.OK
    assert check_pages(GIB, pool, wanted="require").verdict is Verdict.PROBLEM


def test_a_small_dev_shm_matters_to_the_engine_and_not_to_kvtier() -> None:
    assert check_shared_memory(GIB).verdict is Verdict.OK
    docker = check_shared_memory(64 << 20)
    assert docker.verdict is Verdict.WARNING
    assert "kvtier, which does not use it" in docker.found


def test_rates_are_put_into_words() -> None:
    read, write = check_rates("nvme", RATES, chunk_nbytes=2 << 20)
    assert (read.verdict, write.verdict) == (Verdict.OK, Verdict.OK)
    assert read.found == (
        "6.50 GB/s; p50 5 ms, p99 9 ms a piece of 8.00 MiB, 4 at once; "
        "0.323 ms for a chunk of 2.00 MiB"
    )
    assert write.found == "2.50 GB/s; p50 12 ms, p99 1.5 s a piece of 8.00 MiB, 4 at once"


def test_a_disk_slower_than_nvme_is_a_warning_in_each_direction() -> None:
    slow = replace(RATES, read_bytes_per_s=0.99e9, write_bytes_per_s=0.49e9)
    read, write = check_rates("nvme", slow, chunk_nbytes=None)
    assert (read.verdict, write.verdict) == (Verdict.WARNING, Verdict.WARNING)
    assert "chunk of" not in read.found


def test_rates_through_the_page_cache_are_marked() -> None:
    findings = check_rates("nvme", replace(RATES, direct_io=False), chunk_nbytes=None)
    assert verdicts(findings) == ["note", "note"]
