"""What does not move bytes: the manager's calls, and opening a large store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

from tests.bench.nvme.isolation import IsolatedProcess
from tests.bench.nvme.lab import Lab
from tests.bench.nvme.manager_cost import ManagerPeer, manager_cost
from tests.bench.nvme.opening import Opened, fill_store, open_once
from tests.bench.nvme.passes import TransferSpec
from tests.bench.nvme.rows import Row
from tests.bench.nvme.workload import Workload

__all__ = ["manager", "opening"]

_SLOT_NBYTES = 4096
_CHUNKS = 1_000_000
_LIMIT_S = 5.0
_LIMIT_NBYTES = 400.0


def manager(lab: Lab) -> Iterator[Row]:
    """Compare what a chunk costs in the scheduler's thread, with LRU and by default."""
    costs: dict[tuple[ManagerPeer, str], list[float]] = defaultdict(list)
    peers: tuple[ManagerPeer, ...] = ("native_lru", "kvtier", "kvtier_default")
    with ExitStack() as stack:
        processes = {peer: stack.enter_context(IsolatedProcess()) for peer in peers}
        for number in range(1, lab.plan.rounds + 1):
            for peer in peers if number % 2 else reversed(peers):
                lab.say(f"manager, round {number} of {lab.plan.rounds}: {peer}")
                cost = processes[peer].run(manager_cost, peer)
                lab.say(f"    store {cost.store_us:.2f} us, load {cost.load_us:.2f} us")
                costs[peer, "lookup+store"].append(cost.store_us)
                costs[peer, "lookup+load"].append(cost.load_us)
    prefixes: dict[ManagerPeer, str] = {"kvtier": "", "kvtier_default": "default, "}
    for side, of in product(prefixes, ("lookup+store", "lookup+load")):
        both, which = (costs[side, of], costs["native_lru", of]), prefixes[side] + of
        yield Row.over_rounds("manager", 0, "native_lru", both, "us/chunk", of=which)


def opening(lab: Lab) -> Iterator[Row]:
    """Open a store of a million chunks, again and again, each time in a new process.

    A store of one chunk is opened as well, because what any open tier takes does not grow with
    the chunks.
    """
    seconds: list[float] = []
    nbytes: list[float] = []
    with lab.scratch("large") as large_path, lab.scratch("small") as small_path:
        small, large = (
            TransferSpec("kvtier", path, Workload(_SLOT_NBYTES, size, lab.plan.ram_nbytes))
            for path, size in ((small_path, _SLOT_NBYTES), (large_path, _CHUNKS * _SLOT_NBYTES))
        )
        lab.say(f"open: store {_CHUNKS:,} chunks first")
        for spec in (small, large):
            lab.process("kvtier").run(fill_store, spec)
        for number in range(1, lab.plan.rounds + 1):
            empty, full = (_open(spec) for spec in (small, large))
            seconds.append(full.seconds)
            chunks = full.chunks - empty.chunks
            nbytes.append((full.nbytes - empty.nbytes) / chunks)
            lab.say(
                f"open, round {number} of {lab.plan.rounds}: {full.chunks:,} chunks in "
                f"{full.seconds:.2f} s, {nbytes[-1]:.0f} bytes each"
            )
    remark = "open has no peer: what it is compared with is its limit."
    for of, unit, figures, limit in (
        ("seconds", "s", seconds, _LIMIT_S),
        ("memory", "B/chunk", nbytes, _LIMIT_NBYTES),
    ):
        both = figures, [limit] * len(figures)
        yield Row.over_rounds("open", _SLOT_NBYTES, "self", both, unit, of=of, remark=remark)


def _open(spec: TransferSpec) -> Opened:
    with IsolatedProcess() as process:
        return process.run(open_once, spec)
