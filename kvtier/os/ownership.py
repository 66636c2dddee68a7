"""Who else could put files where kvtier keeps its own.

Whoever writes into a store decides what a model answers, and a checksum proves nothing: it is
stored beside the bytes. So what kvtier opens must belong to its user, and nobody else may be
able to put another directory in its place. These are the rules of sshd's ``StrictModes``, and
they hold for root too, which would otherwise serve what any user planted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Exposure", "find_exposure", "find_foreign_owner", "is_ambiguous"]

_ROOT: Final = 0
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_UID_MAP: Final = Path("/proc/self/uid_map")
_ALL_USERS: Final = ["0", "0", "4294967295"]


class Exposure(NamedTuple):
    """How others can replace what is in a directory.

    Attributes:
        problem: What is wrong, beginning with the directory's name.
        remedy: What to do.
    """

    problem: str
    remedy: str


def find_exposure(directory: Path) -> Exposure | None:
    """Return how another user can replace what is in ``directory``; None if nobody can.

    Parts of the path that do not exist yet are ignored. Symbolic links are followed.

    Raises:
        OSError: A part of the path may not be looked at.
    """
    uid = os.geteuid()
    if is_ambiguous(uid):
        return Exposure(_unmapped(uid), "run the engine as a user that it maps")
    real = Path(os.path.realpath(directory))
    for place in (real, *real.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = place.stat()
            if exposure := _judge(place, status, uid, is_parent=place != real):
                return exposure
            if place != real and status.st_mode & stat.S_ISVTX:
                return None
    return None


def find_foreign_owner(paths: Iterable[Path]) -> str:
    """Return which of ``paths`` may belong to another user, in words; empty if none does.

    Absent ones are ignored. Symbolic links are not followed.

    Raises:
        OSError: A path may not be looked at.
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


def is_ambiguous(uid: int) -> bool:
    """Return whether the kernel reports ``uid`` for several users.

    In a user namespace that does not map all users, the kernel shows each of the others as one
    and the same number, mostly 65534.
    """
    try:
        is_overflow = uid == int(_OVERFLOW_UID.read_text("ascii"))
        return is_overflow and _UID_MAP.read_text("ascii").split() != _ALL_USERS
    except OSError:  # no /proc, so no answer: 65534 is the number in every kernel's sources
        return uid == 65534


def _unmapped(uid: int) -> str:
    return (
        f"this process runs as user {uid}, which stands for every user that this user "
        "namespace does not map"
    )


def _judge(
    place: Path, status: os.stat_result, uid: int, *, is_parent: bool
) -> Exposure | None:
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    # Whoever set up the user namespace vouches for parents of unmapped owners.
    if is_parent and owner not in {uid, _ROOT} and not is_ambiguous(owner):
        return Exposure(
            f"{place} belongs to user {owner}, who can replace what is in it",
            f"use a path whose directories belong to root or to user {uid}",
        )
    if not is_parent and owner != uid:
        return Exposure(
            f"{place} belongs to user {owner}, and this process runs as user {uid}",
            f"run: chown -R {uid} {place}"
            if owner == _ROOT
            else f"run the engine as user {owner}, or use a directory of user {uid}'s",
        )
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return Exposure(
            f"{place} has mode {mode:04o}: other users can replace what is in it",
            f"run: chmod go-w {place}",
        )
    return None
