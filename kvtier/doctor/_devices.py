"""The block devices under a file system, and the limits of their queues."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._machine import Machine
from kvtier.doctor._mounts import Mount
from kvtier.os.limits import read_kernel_text
from kvtier.units import approximate_size

__all__ = ["BlockQueue", "check_queues", "find_queues"]

_SECTOR_ALIGNMENT_NBYTES: Final = 4096
_SMALL_REQUEST_KB: Final = 512
_VIRTUAL_DISK: Final = re.compile("(vd|xvd)[a-z]+")


@dataclass(frozen=True, slots=True)
class BlockQueue:
    """Limits of one disk's queue, from ``/sys/block/NAME/queue``; see Linux's sysfs-block.

    Attributes:
        name: The disk, such as ``nvme0n1``.
        logical_block_nbytes: Unit of addressing; O_DIRECT must be aligned to it.
        max_request_kb: Largest request the kernel sends, in KiB (``max_sectors_kb``).
        max_hardware_request_kb: What the device would take (``max_hw_sectors_kb``).
        requests: Requests the queue holds (``nr_requests``); per hardware queue.
        scheduler: The one in use; ``none`` or empty for none.
        rotational: Whether the device says that it spins.
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
    """Return the disks that ``mount`` ends up on; empty where the kernel names none.

    Partitions lead to their disk, and device-mapper and RAID devices to their members, for
    these are what does the work.
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
    """Say what of the disks' limits holds the tier back.

    Args:
        tier: Name of the tier.
        queues: The disks under it.
        piece_nbytes: Bytes of the largest I/O call.
        threads: I/O calls at once.
    """
    if not queues:
        found = "the kernel names no block device under it, so its queue cannot be judged"
        yield Finding(f"{tier}: device", Verdict.NOTE, found, "trust the measured rates only")
    for queue in queues:
        odd = [*_unsuited(tier, queue), *_narrow(tier, queue, piece_nbytes, threads)]
        yield _summary(tier, queue)
        yield from odd


def _summary(tier: str, queue: BlockQueue) -> Finding:
    parts = [
        f"requests of {queue.max_request_kb} KiB",
        f"{queue.requests} in the queue",
        f"scheduler {queue.scheduler or 'none'}",
    ]
    if queue.write_cache:
        parts.append(f"{queue.write_cache} cache")
    return Finding(_label(tier, queue), Verdict.OK, ", ".join(parts))


def _unsuited(tier: str, queue: BlockQueue) -> Iterator[Finding]:
    label = _label(tier, queue)
    if queue.logical_block_nbytes > _SECTOR_ALIGNMENT_NBYTES:
        size = approximate_size(queue.logical_block_nbytes)
        found = f"sectors of {size}: slots are multiples of 4 KiB, so no O_DIRECT"
        remedy = "format the drive with sectors of 4 KiB or less, or set direct_io: off"
        yield Finding(label, Verdict.WARNING, found, remedy)
    if queue.rotational and _VIRTUAL_DISK.fullmatch(queue.name):
        found = "says that it spins, as virtual disks do, whatever is behind them"
        yield Finding(label, Verdict.NOTE, found, "trust the measured rates")
    elif queue.rotational:
        found = "a spinning disk: recomputing a prefix is usually faster than reading it"
        yield Finding(label, Verdict.WARNING, found, "name a directory on an NVMe drive")
    if queue.scheduler == "bfq" or (
        queue.name.startswith("nvme") and queue.scheduler not in {"", "none"}
    ):
        found = f"scheduler {queue.scheduler}: processor time for an order the drive ignores"
        remedy = f"as root: echo none > /sys/block/{queue.name}/queue/scheduler"
        yield Finding(label, Verdict.WARNING, found, remedy)


def _narrow(tier: str, queue: BlockQueue, piece_nbytes: int, threads: int) -> Iterator[Finding]:
    label = _label(tier, queue)
    reachable_kb = min(queue.max_hardware_request_kb, piece_nbytes >> 10)
    if queue.max_request_kb < min(_SMALL_REQUEST_KB, reachable_kb):
        found = (
            f"a piece of {approximate_size(piece_nbytes)} is cut into requests of "
            f"{queue.max_request_kb} KiB although the device takes more"
        )
        file = f"/sys/block/{queue.name}/queue/max_sectors_kb"
        remedy = f"as root: echo {min(reachable_kb, 4096)} > {file}"
        yield Finding(label, Verdict.WARNING, found, remedy)
    wanted = threads * max(1, (piece_nbytes >> 10) // max(1, queue.max_request_kb))
    if wanted > queue.requests:
        found = (
            f"{threads} pieces at once are {wanted} requests, the queue holds "
            f"{queue.requests}: the rest waits"
        )
        remedy = f"as root: echo {wanted} > /sys/block/{queue.name}/queue/nr_requests"
        yield Finding(label, Verdict.NOTE, found, remedy)


def _label(tier: str, queue: BlockQueue) -> str:
    return f"{tier}: device {queue.name}"


def _device_number(machine: Machine, source: str) -> str:
    """Return ``MAJOR:MINOR`` of the device node ``source``; empty if it is none."""
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
    """Yield the sysfs directories of the disks that the device at ``entry`` ends up on."""
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
