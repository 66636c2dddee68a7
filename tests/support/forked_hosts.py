"""Hosts of tiers that are forked from a process that has imported kvtier.

A host of a Python of its own takes half a second of one core, nearly all of it for imports.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import cache

from kvtier.config import child_environment
from kvtier.tiers.hosted import host
from tests.support.forking import Forked, fork_for_requests, start_server

__all__ = ["run_host"]


def run_host(*descriptors: int) -> Forked:
    """Do what kvtier does to start a host, by a fork."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        files = [nothing.fileno(), 1, 2, *descriptors]
        return Forked(parent(), [str(os.getpid())], files, child_environment())


@cache
def parent() -> socket.socket:
    """Start the process that imports kvtier, and return the way to it."""
    # With threads of its own it could not be forked.
    return start_server("tests.support.forked_hosts", {"OPENBLAS_NUM_THREADS": "1"})


def main() -> None:
    """Be a host, in each of the processes that are forked."""
    arguments, descriptors = fork_for_requests([])
    sys.argv = [host.__name__, *map(str, descriptors), *arguments]
    host.main()


if __name__ == "__main__":
    main()
