"""The file system of a directory, and whether it suits a store."""

from __future__ import annotations

import array
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor._findings import Finding, Status
from kvtier.doctor._memory import Machine

__all__ = ["Mount", "check_mount", "find_mount", "is_exempt_from_cow", "parse_mounts"]

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
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        major: Major device number; 0 for a file system without a device of its own.
        minor: Minor device number.
        point: Where it is mounted.
        kind: File system type, such as ``ext4``.
        source: What is mounted, such as ``/dev/nvme0n1p1``.
        options: Options of the mount and of the file system.
    """

    major: int
    minor: int
    point: Path
    kind: str
    source: str
    options: frozenset[str]


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts that ``text``, a mountinfo file, names; see proc_pid_mountinfo(5).

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


def find_mount(machine: Machine, place: Path) -> Mount:
    """Return the mount that contains the existing directory ``place``.

    Raises:
        OSError: There is no procfs.
        LookupError: No mount contains ``place``.
    """
    resolved = place.resolve()
    found: Mount | None = None
    text = (machine.proc / "self/mountinfo").read_text("utf-8", "surrogateescape")
    for mount in parse_mounts(text):
        # Of equal mount points the later covers the earlier.
        if resolved.is_relative_to(mount.point) and (
            found is None or len(mount.point.parts) >= len(found.point.parts)
        ):
            found = mount
    if found is None:
        raise LookupError(f"no mount contains {place}")
    return found


def is_exempt_from_cow(place: Path) -> bool:
    """Return whether new files in ``place`` are overwritten in place (``chattr +C``)."""
    flags = array.array("l", [0])
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
    except OSError:  # a file system without attributes
        return False
    finally:
        os.close(fd)
    return bool(flags[0] & _FS_NOCOW_FL)


def check_mount(tier: str, mount: Mount, *, exempt_from_cow: bool) -> Finding:
    """Check that the file system suits a store.

    Args:
        tier: Name of the tier.
        mount: The mount of its directory.
        exempt_from_cow: Whether files there are overwritten in place although the file system
            copies on write.
    """
    exempt = exempt_from_cow or "nodatacow" in mount.options
    status, problem, remedy = _judge(mount.kind, exempt_from_cow=exempt)
    reason = f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    if problem:
        reason = f"{reason}: {problem}"
    return Finding(f"{tier}: file system", status, reason, remedy)


def _judge(kind: str, *, exempt_from_cow: bool) -> tuple[Status, str, str]:
    if kind in _TESTED or (kind in _COPY_ON_WRITE and exempt_from_cow):
        return Status.OK, "", ""
    for kinds, problem, remedy in _UNSUITED:
        if kinds.fullmatch(kind):
            return Status.WARNING, problem, remedy
    return Status.NOTE, "kvtier is not tested on it", "prefer a local ext4 or xfs"


def _unescape(text: str) -> str:
    """Undo the octal escapes of white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
