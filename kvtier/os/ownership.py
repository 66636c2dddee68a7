"""Ownership checks: whether other users can replace kvtier's files.

A user who can write to a cache can change the answers of a model. Checksums do not prevent
this, because they are stored beside the bytes. So kvtier's files must belong to its user, and
other users must not be able to replace their directory. These are the rules of sshd's
``StrictModes``. The rules apply to root too: otherwise root would serve files that any user
planted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "Exposure",
    "find_exposure",
    "find_foreign_owner",
    "find_writable",
    "holds_foreign_entries",
    "is_ambiguous",
]

_ROOT: Final = 0
_OTHERS_WRITE: Final = 0o022
_OWN_NAMES: Final = re.compile(r"[0-9a-f]{16}|requests-\d+\.jsonl|lost\+found")
"""Names that kvtier or a new file system creates: namespaces, recordings and ``lost+found``."""
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_UID_MAP: Final = Path("/proc/self/uid_map")
_ALL_USERS: Final = ["0", "0", "4294967295"]


class Exposure(NamedTuple):
    """A way for other users to replace a directory's content.

    Attributes:
        problem: The problem, which starts with the directory's name.
        remedy: What to do.
    """

    problem: str
    remedy: str


def find_exposure(directory: Path) -> Exposure | None:
    """Return how other users can replace the content of ``directory``; None if they cannot.

    Parts of the path that do not exist yet are ignored. Symbolic links are followed.

    Raises:
        OSError: The permission to examine a part of the path is missing.
    """
    uid = os.geteuid()
    if is_ambiguous(uid):
        return Exposure(_unmapped(uid), "run the engine as a user that it maps")
    real = Path(os.path.realpath(directory))
    if real == real.parent:
        problem = f"{directory} leads to the root of the file system"
        return Exposure(problem, "use a directory that only kvtier fills")
    for path in (real, *real.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            if exposure := _judge(path, status, uid, is_parent=path != real):
                return exposure
            if path != real and status.st_mode & stat.S_ISVTX:
                return None
    return None


def find_foreign_owner(paths: Iterable[Path]) -> str:
    """Return a message if one of ``paths`` may belong to another user; else empty.

    Absent paths are ignored. Symbolic links are not followed.

    Raises:
        OSError: The permission to examine a path is missing.
    """
    uid = os.geteuid()
    if is_ambiguous(uid):
        return _unmapped(uid)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if owner != uid:
                return f"{path} belongs to user {owner}, and this process runs as user {uid}"
    return ""


def find_writable(paths: Iterable[Path]) -> str:
    """Return a message if other users can write to one of ``paths``; else empty.

    Absent paths are ignored. The paths must not be symbolic links.

    Raises:
        OSError: The permission to examine a path is missing.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & _OTHERS_WRITE:
                problem = f"{path} has mode {mode:04o}: other users can write to it"
                return f"{problem} (if none did, run: chmod go-w {path})"
    return ""


def holds_foreign_entries(directory: Path) -> bool:
    """Return whether ``directory`` has entries with names that kvtier does not use.

    Such a directory may serve other programs, so its mode and owner must stay as they are.
    """
    try:
        return not all(_OWN_NAMES.fullmatch(entry.name) for entry in directory.iterdir())
    except OSError:  # nothing is known of its entries
        return True


def is_ambiguous(uid: int) -> bool:
    """Return whether the kernel reports ``uid`` for several users.

    In a user namespace that does not map all users, the kernel reports all unmapped users as
    one number, usually 65534.
    """
    try:
        is_overflow = uid == int(_OVERFLOW_UID.read_text("ascii"))
        return is_overflow and _UID_MAP.read_text("ascii").split() != _ALL_USERS
    except OSError:  # no /proc; 65534 is the default in the kernel's sources
        return uid == 65534


def _unmapped(uid: int) -> str:
    return (
        f"this process runs as user {uid}, which stands for every user that this user "
        "namespace does not map"
    )


def _judge(path: Path, status: os.stat_result, uid: int, *, is_parent: bool) -> Exposure | None:
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    # Parents with unmapped owners are trusted like the user namespace itself.
    if is_parent and owner not in {uid, _ROOT} and not is_ambiguous(owner):
        return Exposure(
            f"{path} belongs to user {owner}, who can replace what is in it",
            f"use a path whose directories belong to root or to user {uid}",
        )
    if not is_parent and owner != uid:
        remedy = f"run the engine as user {owner}, or use a directory of user {uid}'s"
        if owner == _ROOT:
            remedy = f"run: chown -R {uid} {path}"
            if holds_foreign_entries(path):
                remedy = f"use a directory that only kvtier fills, and that user {uid} owns"
        problem = f"{path} belongs to user {owner}, and this process runs as user {uid}"
        return Exposure(problem, remedy)
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        remedy = f"run: chmod go-w {path}"
        if not is_parent and holds_foreign_entries(path):
            remedy = f"use a directory that only kvtier fills, outside of {path}"
        problem = f"{path} has mode {mode:04o}: other users can replace what is in it"
        return Exposure(problem, remedy)
    return None
