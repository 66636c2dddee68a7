"""The block devices under a file system, and the limits of their queues."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor._findings import Finding, Status
from kvtier.doctor._memory import Machine
from kvtier.doctor._mounts import Mount
from kvtier.os.limits import read_kernel_text
from kvtier.units import approximate_size

__all__ = ["BlockQueue", "check_queues", "find_queues"]

_SLOT_ALIGNMENT_NBYTES: Final = 4096
_SMALL_REQUEST_KB: Final = 512
_VIRTUAL_DISK: Final = re.compile("(vd|xvd)[a-z]+")


@dataclass(frozen=True, slots=True)
class BlockQueue:
    """Limits of one disk's queue, from ``/sys/block/NAME/queue``.

    Attributes:
        name: The disk, such as ``nvme0n1``.
        logical_block_nbytes: Unit of addressing; O_DIRECT must be aligned to it.
        max_request_kb: Largest request the kernel sends, in KiB (``max_sectors_kb``).
        max_hardware_request_kb: Largest request the device takes (``max_hw_sectors_kb``).
        requests: Requests that each hardware queue holds (``nr_requests``).
        scheduler: The I/O scheduler in use; ``none`` or empty for none.
        rotational: Whether the device reports that it spins.
        write_cache: ``write back``, ``write through``, or empty if unknown.
    """

    name: str
    logical_block_nbytes: int
    max_request_kb: int
    max_hardware_request_kb: int
    requests: int
    scheduler: str
    rotational: bool
    write_cache: str


def find_queues(machine: Machine, mount: Mount) -> list[BlockQueue]:
    """Return the disks under ``mount``; empty if the kernel names none.

    A partition resolves to its disk, a device-mapper or RAID device to its members.
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
    tier: str, queues: Sequence[BlockQueue], *, piece_nbytes: int, threads: int
) -> Iterator[Finding]:
    """Check whether a limit of the disks slows the tier down.

    Args:
        tier: Name of the tier.
        queues: The disks under it.
        piece_nbytes: Bytes of the largest I/O call.
        threads: Concurrent I/O calls.
    """
    if not queues:
        reason = "the kernel names no block device under the file system"
        remedy = "run kvtier doctor: it measures the rates"
        yield Finding(f"{tier}: device", Status.NOTE, reason, remedy)
    for queue in queues:
        check = f"{tier}: device {queue.name}"
        limits = list(_slow_limits(queue, piece_nbytes, threads))
        scheduler, cache = queue.scheduler or "none", queue.write_cache or "unknown"
        reason = (
            f"requests of {queue.max_request_kb} KiB, {queue.requests} in the queue, "
            f"scheduler {scheduler}, cache {cache}"
        )
        yield Finding(check, Status.OK, reason)
        for status, problem, remedy in limits:
            yield Finding(check, status, problem, remedy)


def _slow_limits(
    queue: BlockQueue, piece_nbytes: int, threads: int
) -> Iterator[tuple[Status, str, str]]:
    settings = f"/sys/block/{queue.name}/queue"
    if queue.logical_block_nbytes > _SLOT_ALIGNMENT_NBYTES:
        size = approximate_size(queue.logical_block_nbytes)
        problem = f"sectors of {size}: slots are multiples of 4 KiB, so O_DIRECT fails"
        remedy = "format the drive with sectors of 4 KiB or less, or set direct_io: off"
        yield Status.WARNING, problem, remedy
    if queue.rotational and _VIRTUAL_DISK.fullmatch(queue.name):
        problem = "a virtual disk, which reports itself as spinning"
        yield Status.NOTE, problem, "run kvtier doctor: it measures the rates"
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
    wanted = threads * max(1, (piece_nbytes >> 10) // max(1, queue.max_request_kb))
    if wanted > queue.requests:
        problem = (
            f"{threads} pieces at once are {wanted} requests; the queue holds {queue.requests}"
        )
        yield Status.NOTE, problem, f"run as root: echo {wanted} > {settings}/nr_requests"


def _device_number(machine: Machine, source: str) -> str:
    """Return ``MAJOR:MINOR`` of ``source``; empty if it is not a block device."""
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
    """Yield the sysfs directories of the disks under the device at ``entry``."""
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
        requests=int(read_kernel_text(queue / "nr_requests")),
        scheduler=chosen[1] if chosen else schedulers,
        rotational=read_kernel_text(queue / "rotational") == "1",
        write_cache=read_kernel_text(queue / "write_cache"),
    )
