"""Checks of the machine: memory, file systems, and the disks under them."""

from __future__ import annotations

import array
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor._findings import Finding, Status
from kvtier.os.limits import HugePagePool, MemoryLimit, read_kernel_text
from kvtier.units import approximate_size

__all__ = [
    "BlockQueue",
    "Machine",
    "Mount",
    "check_huge_pages",
    "check_memory",
    "check_mount",
    "check_queues",
    "find_mount",
    "find_queues",
    "is_exempt_from_cow",
    "parse_mounts",
]

_ENGINE_NBYTES: Final = 1 << 30
"""Number of bytes of memory to leave for the engine, besides the RAM tier."""
_SLOT_ALIGNMENT_NBYTES: Final = 4096
_SMALL_REQUEST_KB: Final = 512
_VIRTUAL_DISK: Final = re.compile("(vd|xvd)[a-z]+")
_TESTED: Final = frozenset({"ext4", "xfs"})
_COPY_ON_WRITE: Final = frozenset({"btrfs", "zfs", "bcachefs"})
_UNSUITED: Final = (
    (
        re.compile("tmpfs|ramfs|hugetlbfs"),
        "memory, not a disk",
        "name a directory on a local disk, or remove the tier and raise tiers[0].capacity",
    ),
    (
        re.compile("overlay|aufs"),
        "a container's own layer, slow and deleted with the container",
        "mount a volume of a local disk into the container and name it as path",
    ),
    (
        re.compile("|".join(sorted(_COPY_ON_WRITE))),
        "copies on write: slots scatter, and writes fail on a full disk",
        "use ext4 or xfs; on btrfs, run chattr +C on the directory while it is empty",
    ),
    (
        re.compile(
            r"nfs4?|cifs|smb3|ceph|lustre|gpfs|beegfs|glusterfs|afs|9p|virtiofs"
            r"|fuse(blk)?(\..*)?"
        ),
        "a network file system: its pauses delay loads, its locks may fail",
        "name a directory on a local ext4 or xfs",
    ),
)

_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_NOCOW_FL: Final = 0x00800000


@dataclass(frozen=True, slots=True)
class Machine:
    """Paths of the kernel's file systems. Tests use other paths.

    Attributes:
        proc: Mount point of procfs.
        sys: Mount point of sysfs.
        dev: Directory of the device nodes.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def check_memory(
    ram_nbytes: int, limits: Sequence[MemoryLimit], *, engine_runs: bool
) -> Finding:
    """Check that the RAM tier fits into free memory and leaves memory for the engine.

    Args:
        ram_nbytes: Number of bytes of all ranks' RAM tiers together.
        limits: The memory limits of this machine and control group.
        engine_runs: Whether an engine has a cache open. The engine may then use the memory.
    """
    check, key = "memory", "tiers[0].capacity"
    if not limits:
        reason = "the kernel does not report free memory"
        return Finding(check, Status.NOTE, reason, "mount /proc")
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    reason = (
        f"the RAM tier needs {approximate_size(ram_nbytes)}, "
        f"{tightest.name} leaves {approximate_size(tightest.free_bytes)}"
    )
    left_nbytes = tightest.free_bytes - ram_nbytes
    if left_nbytes >= _ENGINE_NBYTES:
        return Finding(check, Status.OK, reason)
    if engine_runs:
        reason = f"{reason}; a running engine may hold its RAM tier already"
        return Finding(check, Status.NOTE, reason, "stop it and run this again", key)
    remedy = "lower the capacity or raise the limit: pinned memory cannot be swapped out"
    if left_nbytes < 0:
        return Finding(check, Status.PROBLEM, reason, remedy, key)
    return Finding(check, Status.WARNING, f"{reason}: little for the engine", remedy, key)


def check_huge_pages(ram_nbytes: int, pool: HugePagePool, *, mode: str) -> Finding:
    """Check whether the RAM tier gets huge pages.

    Args:
        ram_nbytes: Number of bytes of the RAM tier.
        pool: The kernel's pool of huge pages.
        mode: The value of ``tiers[0].huge_pages``.
    """
    check, key = "huge pages", "tiers[0].huge_pages"
    if mode == "off":
        return Finding(check, Status.OK, "off in the file")
    bad = Status.PROBLEM if mode == "require" else Status.NOTE
    file_nbytes = ram_nbytes + pool.page_nbytes  # one page for the other content of the file
    needed = pool.needed(file_nbytes)
    if not needed:
        status = Status.PROBLEM if mode == "require" else Status.OK
        return Finding(check, status, "this kernel has none", "write huge_pages: auto", key)
    reason = f"the RAM tier needs {needed:,}; {pool.free:,} are reserved and free"
    if pool.holds(file_nbytes):
        return Finding(check, Status.OK, reason)
    reason = f"{reason}: small pages make disk I/O take 1.4 times the processor time"
    total = pool.total + needed - pool.free
    remedy = f"run as root, best at boot: sysctl -w vm.nr_hugepages={total}"
    return Finding(check, bad, reason, remedy, key)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        major: Major device number; 0 for a file system without its own device.
        minor: Minor device number.
        point: The mount point.
        kind: File system type, such as ``ext4``.
        source: The mounted device or remote directory, such as ``/dev/nvme0n1p1``.
        options: Options of the mount and of the file system.
    """

    major: int
    minor: int
    point: Path
    kind: str
    source: str
    options: frozenset[str]


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts in ``text``, the content of a proc_pid_mountinfo(5) file.

    >>> line = "27 1 254:0 / /data rw,relatime shared:1 - ext4 /dev/vda rw,discard"
    >>> mount = next(parse_mounts(line))
    >>> mount.kind, mount.point, sorted(mount.options)
    ('ext4', PosixPath('/data'), ['discard', 'relatime', 'rw'])
    """
    for line in text.splitlines():
        mine, _, theirs = line.partition(" - ")
        fields, tail = mine.split(), theirs.split()
        if len(fields) < 6 or len(tail) < 2:
            continue
        major, _, minor = fields[2].partition(":")
        options = {*fields[5].split(","), *(tail[2].split(",") if len(tail) > 2 else ())}
        point = Path(_unescape(fields[4]))
        yield Mount(
            int(major), int(minor), point, tail[0], _unescape(tail[1]), frozenset(options)
        )


def find_mount(machine: Machine, directory: Path) -> Mount:
    """Return the mount that contains the existing directory ``directory``.

    Raises:
        OSError: The machine has no procfs.
        LookupError: No mount contains ``directory``.
    """
    resolved = directory.resolve()
    found: Mount | None = None
    text = (machine.proc / "self/mountinfo").read_text("utf-8", "surrogateescape")
    for mount in parse_mounts(text):
        # If two mounts have the same mount point, the later one hides the earlier one.
        if resolved.is_relative_to(mount.point) and (
            found is None or len(mount.point.parts) >= len(found.point.parts)
        ):
            found = mount
    if found is None:
        raise LookupError(f"no mount contains {directory}")
    return found


def is_exempt_from_cow(directory: Path) -> bool:
    """Return whether ``chattr +C`` disables copy-on-write for new files in ``directory``."""
    flags = array.array("l", [0])
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
    except OSError:  # a file system without attributes
        return False
    finally:
        os.close(fd)
    return bool(flags[0] & _FS_NOCOW_FL)


def check_mount(tier: str, mount: Mount, *, exempt_from_cow: bool) -> Finding:
    """Check that the file system suits a cache.

    Args:
        tier: Name of the tier.
        mount: The mount of the tier's directory.
        exempt_from_cow: Whether writes to new files in the directory overwrite data even
            though the file system copies on write.
    """
    exempt = exempt_from_cow or "nodatacow" in mount.options
    status, problem, remedy = _judge_kind(mount.kind, exempt_from_cow=exempt)
    reason = f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    if problem:
        reason = f"{reason}: {problem}"
    return Finding(f"{tier}: file system", status, reason, remedy)


def _judge_kind(kind: str, *, exempt_from_cow: bool) -> tuple[Status, str, str]:
    if kind in _TESTED or (kind in _COPY_ON_WRITE and exempt_from_cow):
        return Status.OK, "", ""
    for kinds, problem, remedy in _UNSUITED:
        if kinds.fullmatch(kind):
            return Status.WARNING, problem, remedy
    return Status.NOTE, "kvtier is not tested on it", "prefer a local ext4 or xfs"


def _unescape(text: str) -> str:
    """Replace each octal escape in ``text`` by its character."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True, slots=True)
class BlockQueue:
    """Limits of one disk's queue, from ``/sys/block/NAME/queue``.

    Attributes:
        name: The disk, such as ``nvme0n1``.
        logical_block_nbytes: Size of a logical block. O_DIRECT accesses must be aligned to it.
        max_request_kb: Largest request that the kernel sends, in KiB (``max_sectors_kb``).
        max_hardware_request_kb: Largest request that the device accepts, in KiB
            (``max_hw_sectors_kb``).
        scheduler: The I/O scheduler in use; ``none`` or empty for none.
        rotational: Whether the device reports that it is a spinning disk.
    """

    name: str
    logical_block_nbytes: int
    max_request_kb: int
    max_hardware_request_kb: int
    scheduler: str
    rotational: bool


def find_queues(machine: Machine, mount: Mount) -> list[BlockQueue]:
    """Return the queue of each disk under ``mount``; an empty list if the kernel names none.

    For a partition, the disk is the whole disk. For a device-mapper or RAID device, the disks
    are the members.
    """
    if mount.major:
        number = f"{mount.major}:{mount.minor}"
    else:  # btrfs has an anonymous number and names one of its devices
        number = _device_number(machine, mount.source)
    entry = machine.sys / "dev/block" / number
    if not number or not entry.exists():
        return []
    disks = sorted(set(_disks(entry.resolve())))
    return [_read_queue(disk) for disk in disks]


def check_queues(
    tier: str, queues: Sequence[BlockQueue], *, piece_nbytes: int
) -> Iterator[Finding]:
    """Yield a finding for each disk, and one for each setting that slows the tier down.

    Args:
        tier: Name of the tier.
        queues: The queues of the disks under the tier.
        piece_nbytes: Number of bytes of the largest I/O call.
    """
    if not queues:
        reason = "the kernel names no block device under the file system"
        remedy = "judge it by the rates that kvtier doctor measures"
        yield Finding(f"{tier}: device", Status.NOTE, reason, remedy)
    for queue in queues:
        check = f"{tier}: device {queue.name}"
        scheduler = queue.scheduler or "none"
        reason = f"requests of {queue.max_request_kb} KiB, scheduler {scheduler}"
        yield Finding(check, Status.OK, reason)
        for status, problem, remedy in _slow_limits(queue, piece_nbytes):
            yield Finding(check, status, problem, remedy)


def _slow_limits(queue: BlockQueue, piece_nbytes: int) -> Iterator[tuple[Status, str, str]]:
    settings = f"/sys/block/{queue.name}/queue"
    if queue.logical_block_nbytes > _SLOT_ALIGNMENT_NBYTES:
        size = approximate_size(queue.logical_block_nbytes)
        problem = f"sectors of {size}: slots are multiples of 4 KiB, so O_DIRECT fails"
        remedy = "format the drive with sectors of 4 KiB or less, or set direct_io: off"
        yield Status.WARNING, problem, remedy
    if queue.rotational and _VIRTUAL_DISK.fullmatch(queue.name):
        problem = "a virtual disk, which reports itself as spinning"
        yield Status.NOTE, problem, "judge it by the rates that kvtier doctor measures"
    elif queue.rotational:
        problem = "a spinning disk: recomputing a prefix is usually faster than reading it"
        yield Status.WARNING, problem, "name a directory on an NVMe drive"
    if queue.scheduler == "bfq" or (
        queue.name.startswith("nvme") and queue.scheduler not in {"", "none"}
    ):
        problem = f"scheduler {queue.scheduler}: costs processor time and orders nothing"
        yield Status.WARNING, problem, f"run as root: echo none > {settings}/scheduler"
    reachable_kb = min(queue.max_hardware_request_kb, piece_nbytes >> 10)
    if queue.max_request_kb < min(_SMALL_REQUEST_KB, reachable_kb):
        problem = (
            f"splits a piece of {approximate_size(piece_nbytes)} into requests of "
            f"{queue.max_request_kb} KiB; the device takes larger ones"
        )
        remedy = f"run as root: echo {min(reachable_kb, 4096)} > {settings}/max_sectors_kb"
        yield Status.WARNING, problem, remedy


def _device_number(machine: Machine, source: str) -> str:
    """Return ``MAJOR:MINOR`` of the device ``source``; empty if it is no block device."""
    if not source.startswith("/dev/"):
        return ""
    try:
        status = (machine.dev / source.removeprefix("/dev/")).stat()
    except OSError:
        return ""
    if not stat.S_ISBLK(status.st_mode):
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _disks(entry: Path) -> Iterator[Path]:
    """Yield the sysfs directory of each disk under the device at ``entry``."""
    disk = entry.parent if (entry / "partition").exists() else entry
    members = sorted(disk.glob("slaves/*"))
    if not members:
        yield disk
    for member in members:
        yield from _disks(member.resolve())


def _read_queue(disk: Path) -> BlockQueue:
    queue = disk / "queue"
    schedulers = read_kernel_text(queue / "scheduler")
    chosen = re.search(r"\[(\S+)\]", schedulers)
    return BlockQueue(
        name=disk.name,
        logical_block_nbytes=int(read_kernel_text(queue / "logical_block_size") or 512),
        max_request_kb=int(read_kernel_text(queue / "max_sectors_kb")),
        max_hardware_request_kb=int(read_kernel_text(queue / "max_hw_sectors_kb")),
        scheduler=chosen[1] if chosen else schedulers,
        rotational=read_kernel_text(queue / "rotational") == "1",
    )
