"""Copies within the forward pass that fail as a plan says, in whatever process loads this.

A test installs this file where its engine finds modules, and names it as a tier's eviction
policy, so every process of the engine imports it. Layers are copied one by one, that a fault
may strike in the midst of a load. What is done is written to a ledger beside this file, a word
each: ``copied`` or the fault.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.connector.step_loads import StepLoader
from kvtier.memory import ControlBlock
from kvtier.memory.copy import ALL_PAGES, BlockCopier, BlockCopyPlan
from kvtier.policies.eviction import Lru as Order

__all__ = ["FAULTS", "LATE_S", "NAME", "Order", "injected", "install", "plan"]

FAULTS = ("fail", "torn", "late")
LATE_S = 1.2
"""How late a late copy is; longer than ``load_timeout`` should be."""
NAME = "failing_copies"
PLAN, LEDGER = f"{NAME}.json", f"{NAME}.txt"

_here = Path(__file__).parent

_draw = random.Random(5)
_torn: set[tuple[int, ...]] = set()
"""The slots of loads that read other bytes than they were to read."""


def install(directory: Path) -> None:
    """Make ``directory``, once it is on Python's path, provide this module by its own name."""
    shutil.copy(__file__, directory / f"{NAME}.py")


def plan(directory: Path, fault: str, one_in: int) -> dict[Path, str]:
    """Return the file that has every ``one_in``-th copy of a layer suffer ``fault``."""
    return {directory / PLAN: json.dumps({"fault": fault, "one_in": one_in})}


def injected(directory: Path) -> dict[str, int]:
    """Return how often each word is in the ledger."""
    words = (directory / LEDGER).read_text().split()
    return {word: words.count(word) for word in ("copied", *FAULTS)}


def chosen() -> str:
    """Return the fault that the next copy suffers; empty for none."""
    file = _here / PLAN
    wanted = json.loads(file.read_text()) if file.exists() else {"one_in": 0}
    if wanted["one_in"] and _draw.randrange(wanted["one_in"]) == 0:
        return str(wanted["fault"])
    return ""


def load(
    self: BlockCopier, plan: BlockCopyPlan, *, after: Any, pages: slice = ALL_PAGES
) -> None:
    if pages == ALL_PAGES:
        copy(self, plan, after=after)
        return
    fault = chosen()
    with (_here / LEDGER).open("a") as ledger:
        ledger.write(f"{fault or 'copied'}\n")
    if fault == "fail":
        raise OSError("a copy that fails because a test says so")
    if fault == "late":
        threading.Event().wait(LATE_S)
    if fault == "torn":
        _torn.add(tuple(plan.slots))
        # Bytes from elsewhere, as if the slots were somebody else's by now.
        parts = [replace(part, slots=np.full_like(part.slots, 0)) for part in plan.groups]
        plan = replace(plan, groups=parts)
    copy(self, plan, after=after, pages=pages)


def bears(
    self: ControlBlock, rank: int, slots: Sequence[int], generations: Sequence[int]
) -> bool:
    if tuple(slots) in _torn:
        _torn.discard(tuple(slots))
        return False
    return compare(self, rank, slots, generations)


if __name__ == NAME:
    copy, compare = BlockCopier.load, ControlBlock.bears
    BlockCopier.load = load  # type: ignore[method-assign]
    ControlBlock.bears = bears  # type: ignore[method-assign]
    assert StepLoader.__init__.__kwdefaults__ is not None
    StepLoader.__init__.__kwdefaults__["batch_nbytes"] = 1
