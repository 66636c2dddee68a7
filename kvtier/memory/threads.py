"""Keeps copies on the thread that asks for them, and out of the model's way.

torch spreads an operation over OpenMP threads, and every thread that asks for one gets a team
of its own. Two things then go wrong beside a model that computes on the same processors. The
teams together have more threads than there are processors, and GNU's OpenMP answers by letting
no team spin: each of the model's few hundred parallel loops a step ends in sleeping and waking,
which made steps of a small model half as long again, also in steps that copied nothing. And
the second team's threads, where they do spin, take the processors from the first.

A copy gains nothing from a team: one thread saturates what it copies through.
"""

from __future__ import annotations

import threading

import torch
from torch._C import set_num_threads  # vLLM replaces torch's own name for it on CPUs

from kvtier.os.iopool import start_thread

__all__ = ["compute_alone"]


def compute_alone() -> None:
    """Let torch use the calling thread alone for what this thread asks of it.

    The limit is the thread's own, but torch also remembers it for threads that have not
    computed yet; so another thread puts back what it remembers.
    """
    others = torch.get_num_threads()
    set_num_threads(1)
    restore = threading.Thread(target=set_num_threads, args=(others,), name="kvtier-restore")
    start_thread(restore)
    restore.join()
