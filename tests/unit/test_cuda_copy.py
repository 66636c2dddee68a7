"""Copies on a GPU that runs queued work when it likes (:mod:`tests.support.fake_cuda`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import CudaError
from tests.support.fake_cuda import FakeCuda
from tests.unit.cuda_world import METHODS, Mutation, load_modules, open_world

MODULES: Final = load_modules()
JOBS: Final = 3
EXAMPLES: Final = 30
SEEDS: Final = st.integers(0, (1 << 32) - 1)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=EXAMPLES)
@given(seed=SEEDS)
def test_copies_equal_program_order_in_any_schedule(method: str, seed: int) -> None:
    with open_world(random.Random(seed), method, MODULES) as world:
        world.run(JOBS)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, locked=st.integers(0, 2))
def test_memory_that_cannot_be_locked_is_copied_all_the_same(seed: int, locked: int) -> None:
    prepare = refusing_after(locked)
    with open_world(random.Random(seed), "batch", MODULES, prepare=prepare) as world:
        assert world.copier.is_pageable is not bool(world.cuda.locked)
        world.run(JOBS)


def refusing_after(segments: int) -> Callable[[FakeCuda], None]:
    """Return what makes a driver refuse to lock more than so many segments."""
    return lambda cuda: setattr(cuda, "refuses_from", segments)


def check_failed_start(chance: random.Random, modules: Mapping[str, ModuleType]) -> None:
    """Check that a copier which does not start leaves nothing behind."""
    gpus: list[FakeCuda] = []

    def fail(**_: bool) -> None:
        assert gpus[0].locked
        raise CudaError("there is no stream")

    def let_streams_fail(cuda: FakeCuda) -> None:
        gpus.append(cuda)
        cuda.__dict__["open_stream"] = fail

    opening = open_world(chance, "batch", modules, prepare=let_streams_fail)
    with pytest.raises(CudaError, match="there is no stream"), opening:
        pass
    assert not gpus[0].locked


def test_a_start_that_fails_leaves_no_locked_memory() -> None:
    check_failed_start(random.Random(0), MODULES)


# -- mutants -----------------------------------------------------------------------------------

MUTANTS: Final[Mapping[str, Mutation]] = {
    "no copy follows its fence": Mutation("cuda_methods", "if after is not None:", "if False:"),
    "only copy engines follow the fence": Mutation(
        "cuda_methods", "stream.follow(after)", "self.copies.follow(after)"
    ),
    "nobody waits for the copies": Mutation(
        "cuda_methods", "self.copies.record().wait()", "self.copies.record()"
    ),
    "nobody waits for the kernels": Mutation(
        "cuda_methods", "self.copies.follow(self.kernels.record())", "pass"
    ),
    "loads are queued behind stores": Mutation(
        "cuda_copy",
        "self._streams = Streams(driver.open_stream(), kernels)",
        "self._streams = driver.__dict__.setdefault(\n"
        "            'one', Streams(driver.open_stream(), kernels))",
    ),
    "both directions stage in one buffer": Mutation(
        "cuda_copy",
        "            self._stores, self._loads = (\n",
        "            one = by_torch()\n            by_torch = lambda: one\n"
        "            self._stores, self._loads = (\n",
    ),
    "the blocks of other writers are stored": Mutation(
        "cuda_copy",
        "self._planner.plan_gradually(plan, stores=stores,",
        "self._planner.plan_gradually(plan, stores=False,",
    ),
    "memory that is not locked is copied in batches": Mutation(
        "cuda_copy", "if not self.is_pageable:", "if True:"
    ),
    "a failed start leaves memory locked": Mutation(
        "cuda_copy", "            opened.callback(self._slots.close)\n", ""
    ),
    "copies cross the edges of segments": Mutation(
        "cuda_methods",
        "cut(fragments, self._edges)",
        "fragments",
    ),
    "a copy is cut where it ends at an edge": Mutation(
        "pinning", 'nbytes, side="left")', 'nbytes, side="right")'
    ),
    "the second part of a cut copy has the wrong source": Mutation(
        "pinning", "fragments.device[crosses] + head]", "fragments.device[crosses]]"
    ),
    "locked memory is not released": Mutation(
        "pinning", "self._driver.unregister(address)", "pass"
    ),
    "the first segments stay locked when one fails": Mutation(
        "pinning", "            self.close()\n", ""
    ),
    "stores are read at any time": Mutation(
        "cuda_methods", "SourceOrder.STREAM if stores", "SourceOrder.ANY if stores"
    ),
    "loads are read in order only": Mutation(
        "cuda_methods", "else SourceOrder.ANY", "else SourceOrder.STREAM"
    ),
    "a batch has the sizes of another": Mutation(
        "cuda_methods",
        "fragments.nbytes[some], order",
        "fragments.nbytes[: len(host[some])], order",
    ),
    "the last copy is left out": Mutation(
        "cuda_methods",
        "range(0, len(host), _BATCHED)",
        "range(0, len(host) - 1, _BATCHED)",
    ),
    "a staging buffer is used again too early": Mutation(
        "cuda_methods", "if self.ended is not None:", "if False:"
    ),
    "a buffer is stored before the kernel has filled it": Mutation(
        "cuda_methods", "            copies.follow(kernels.record())\n", ""
    ),
    "a kernel reads a buffer before a load has filled it": Mutation(
        "cuda_methods", "            kernels.follow(copies.record())\n", ""
    ),
    "more is staged than a buffer holds": Mutation(
        "cuda_methods", "starts[bounds[-1]] + STAGING_NBYTES", "starts[-1] + STAGING_NBYTES"
    ),
    "a kernel gets more copies than its table holds": Mutation(
        "cuda_methods", "min(end, bounds[-1] + _ROWS)", "end"
    ),
    "a range crosses two buffers": Mutation(
        "cuda_methods", "    begins_run[bounds[:-1]] = True\n", ""
    ),
    "ranges that are not adjacent are one": Mutation(
        "cuda_methods",
        "    np.not_equal(host[1:], host[:-1] + nbytes[:-1], out=begins_run[1:])\n",
        "    begins_run[1:] = False\n",
    ),
    "the kernel copies parts of words": Mutation(
        "cuda_methods", "return not words % _WORD_NBYTES", "return True"
    ),
}


@pytest.mark.untraced
@pytest.mark.parametrize("mutation", MUTANTS.values(), ids=MUTANTS)
def test_the_checks_find_every_mutation(mutation: Mutation) -> None:
    modules = load_modules(mutation)
    for seed in range(120):
        chance = random.Random(seed)
        try:
            if seed % 10 == 9:
                check_failed_start(chance, modules)
            else:
                named = {"prepare": refusing_after(seed % 3)} if seed % 4 == 3 else {}
                with open_world(chance, METHODS[seed % 3], modules, **named) as world:
                    world.run(JOBS)
        except Exception:  # noqa: BLE001 - whatever finds it
            return
    pytest.fail("nothing goes wrong")
