"""Loads within a forward pass: their order, what the model waits for, and how they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtier.connector.step_loads import StepLoad, StepLoader, batches_of_layers

from kvtier.connector import step_loads
from kvtier.connector.device import DeviceEngine
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.memory import ControlBlock, HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks, plan_copy
from kvtier.memory.slot_layout import RankShare, shard_of
from kvtier.types import Outcome, Why
from tests.unit.regions import open_regions

LAYERS = ("a", "b", "c", "d")
PAGE_NBYTES = 64
SOON_S = 30.0
NEVER_S = 0.05
STAMP = 7
SLOTS = 8


class Gated:
    """A copier that copies a batch only when the test lets it, and notes what it copied."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, slice]] = []
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.fails: Callable[[int, slice], None] = lambda first, pages: None
        self.closed = False

    def load(self, plan: Any, *, after: object, pages: slice) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=SOON_S)
        self.fails(plan.slots[0], pages)
        self.copied.append((plan.slots[0], pages))

    def let(self, batches: int) -> None:
        self.gate.release(batches)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def copier() -> Gated:
    return Gated()


@pytest.fixture
def control() -> ControlBlock:
    buffer = memoryview(bytearray(ControlBlock.nbytes(SLOTS, 1)))
    control = ControlBlock(buffer, slots=SLOTS, ranks=1)
    control.publish(range(SLOTS), [STAMP] * SLOTS)
    return control


MakeLoader = Callable[..., StepLoader]


@pytest.fixture
def make(copier: Gated, control: ControlBlock) -> Iterator[MakeLoader]:
    loaders: list[StepLoader] = []

    def loader(**options: Any) -> StepLoader:
        chosen: dict[str, Any] = {
            "layers": LAYERS,
            "page_nbytes": [PAGE_NBYTES] * len(LAYERS),
            "timeout_s": SOON_S,
            "batch_nbytes": 1,
            **options,
        }
        loaders.append(StepLoader(cast("BlockCopier", copier), control, rank=0, **chosen))
        return loaders[-1]

    yield loader
    copier.let(1000)
    for each in loaders:
        each.close(timeout_s=SOON_S)
        each.close(timeout_s=SOON_S)
    assert copier.closed


def load_of(job_id: int, slots: Sequence[int], stamp: int = STAMP) -> StepLoad:
    plan = plan_copy(list(slots), [len(slots)], [0], slots, blocks_per_chunk=1)
    return StepLoad(job_id, plan, [stamp] * len(slots), None)


def started(make: MakeLoader, *loads: StepLoad, **options: Any) -> StepLoader:
    """Return a loader of a step with ``loads``, which has begun."""
    loader = make(**options)
    for load in loads:
        loader.add(load)
    loader.start()
    return loader


def errors(loads: Sequence[StepLoad]) -> dict[int, str]:
    return {load.job_id: load.error for load in loads}


def pass_through(loader: StepLoader) -> dict[int, str]:
    """Wait for every layer in order, as a model does, and return what came of the loads."""
    for layer in LAYERS:
        loader.wait_for(layer)
    return errors(loader.end())


# -- order and waiting


def test_layers_are_copied_in_order_and_each_for_all_loads_of_the_step(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2, 3]), load_of(2, [5]))
    copier.let(8)
    assert pass_through(loader) == {1: "", 2: ""}
    assert copier.copied == [
        (first, slice(layer, layer + 1)) for layer in range(4) for first in (2, 5)
    ]


def test_the_model_goes_on_as_soon_as_its_layer_is_there(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]))
    for number, layer in enumerate(LAYERS, start=1):
        copier.let(1)
        loader.wait_for(layer)
        assert len(copier.copied) == number, "what comes later is not waited for"
    assert errors(loader.end()) == {1: ""}


def test_the_model_does_not_go_on_before_its_layer_is_there(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]))
    reached = threading.Event()

    def compute() -> None:
        loader.wait_for("a")
        reached.set()

    model = threading.Thread(target=compute)
    model.start()
    assert copier.begun.acquire(timeout=SOON_S)
    assert not reached.is_set()
    copier.let(1)
    assert reached.wait(SOON_S)
    model.join()
    copier.let(3)
    pass_through(loader)


def test_a_layer_that_shares_anothers_kv_waits_for_all(make: MakeLoader, copier: Gated) -> None:
    loader = started(make, load_of(1, [2]))
    copier.let(4)
    loader.wait_for("e, which reads what c wrote")
    assert len(copier.copied) == 4
    assert pass_through(loader) == {1: ""}


def test_without_loads_nothing_is_waited_for(make: MakeLoader, copier: Gated) -> None:
    loader = make()
    loader.start()
    assert pass_through(loader) == {}
    assert loader.end() == []
    assert copier.copied == []


def test_where_pages_are_not_layers_all_is_copied_before_the_pass(
    make: MakeLoader, copier: Gated
) -> None:
    loader = make(layers=(), page_nbytes=[4 * PAGE_NBYTES])
    loader.add(load_of(1, [2]))
    copier.let(1)
    loader.start()
    assert copier.copied == [(2, slice(0, 1))]
    loader.wait_for("a")
    assert errors(loader.end()) == {1: ""}


def test_steps_follow_one_another(make: MakeLoader, copier: Gated) -> None:
    loader = make()
    copier.let(8)
    for job_id in (1, 2):
        loader.add(load_of(job_id, [job_id]))
        loader.start()
        assert pass_through(loader) == {job_id: ""}


@given(
    pages=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    blocks=st.integers(1, 20),
    least=st.integers(1, 2000),
)
def test_batches_are_all_layers_in_order_and_as_few_as_their_size_allows(
    pages: list[int], blocks: int, least: int
) -> None:
    batches = batches_of_layers(pages, blocks, batch_nbytes=least)
    numbers = list(range(len(pages)))
    assert [number for batch in batches for number in numbers[batch]] == numbers
    for batch in batches[:-1]:
        nbytes = [page * blocks for page in pages[batch]]
        assert sum(nbytes) >= least > sum(nbytes[:-1])


# -- failures


@pytest.mark.parametrize("layer", range(4))
def test_a_copy_that_fails_at_any_layer_fails_its_load_and_no_other(
    make: MakeLoader, copier: Gated, layer: int
) -> None:
    def fail(first: int, pages: slice) -> None:
        if (first, pages.start) == (2, layer):
            raise OSError("no such memory")

    copier.fails = fail
    loader = started(make, load_of(1, [2]), load_of(2, [5]))
    copier.let(8)
    assert pass_through(loader) == {1: "OSError: no such memory", 2: ""}
    assert [pages.start for first, pages in copier.copied if first == 2] == [*range(layer)]
    assert [pages.start for first, pages in copier.copied if first == 5] == [*range(4)]


def test_a_slot_that_bears_another_stamp_is_not_copied(make: MakeLoader, copier: Gated) -> None:
    loader = started(make, load_of(1, [2], stamp=STAMP + 1), load_of(2, [5], stamp=0))
    assert pass_through(loader) == {
        1: "a slot's stamp is not the one promised",
        2: "there was no RAM slot for a chunk after all",
    }
    assert copier.copied == []


@pytest.mark.parametrize("layer", range(4))
def test_a_slot_that_is_given_away_at_any_layer_fails_its_load(
    make: MakeLoader, copier: Gated, control: ControlBlock, layer: int
) -> None:
    def reuse(first: int, pages: slice) -> None:
        if (first, pages.start) == (2, layer):
            control.withdraw([3])

    copier.fails = reuse
    loader = started(make, load_of(1, [2, 3]), load_of(2, [5]))
    copier.let(8)
    assert pass_through(loader) == {1: "a slot was given away while it was read", 2: ""}


def test_a_layer_that_does_not_come_in_time_fails_the_step_and_delays_it_once(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]), timeout_s=NEVER_S)
    assert copier.begun.acquire(timeout=SOON_S)
    for layer in LAYERS:
        loader.wait_for(layer)
    assert copier.copied == [], "the model went on without"
    copier.let(1)
    assert errors(loader.end()) == {1: "a layer was not copied in time"}
    assert len(copier.copied) == 1, "what was begun ended, and no more was begun"


def test_a_step_ends_only_when_nothing_is_written_any_more(
    make: MakeLoader, copier: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loads, "_LEAVE_TIMEOUT_S", NEVER_S)
    loader = started(make, load_of(1, [2]), timeout_s=NEVER_S)
    assert copier.begun.acquire(timeout=SOON_S)
    loader.wait_for("a")
    with pytest.raises(KvtierError, match="did not end"):
        loader.end()


def test_a_model_that_does_not_wait_for_a_layer_is_found_out(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]))
    copier.let(4)
    for layer in ("a", "b", "d"):
        loader.wait_for(layer)
    (load,) = loader.end()
    assert load.error == "the model did not wait for layer c"


def test_for_a_model_that_does_not_wait_all_is_copied_before_the_steps_that_follow(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]))
    copier.let(5)
    loader.wait_for("a")
    assert errors(loader.end()) == {1: "the model did not wait for layer b"}
    loader.add(load_of(2, [3]))
    loader.start()
    assert copier.copied[4:] == [(3, slice(0, 4))], "before the model asks for anything"
    loader.wait_for("a")
    assert errors(loader.end()) == {2: ""}


def test_a_thread_that_could_not_be_prepared_copies_all_the_same(
    make: MakeLoader,
    copier: Gated,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(step_loads, "compute_alone", fail)
    loader = make(timeout_s=1.0)
    assert "no more threads" in caplog.text
    loader.add(load_of(1, [2]))
    loader.start()
    copier.let(4)
    assert pass_through(loader) == {1: ""}


def test_closing_amid_a_step_lets_the_copy_end_and_begins_no_other(
    make: MakeLoader, copier: Gated
) -> None:
    loader = started(make, load_of(1, [2]))
    assert copier.begun.acquire(timeout=SOON_S)
    closing = threading.Thread(target=loader.close, kwargs={"timeout_s": SOON_S})
    closing.start()
    copier.let(1000)
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert len(copier.copied) < len(LAYERS)


# -- real bytes


BLOCKS = 12


def layered_kv(*, fill: bool) -> KVBlocks:
    tensors = [
        torch.full((BLOCKS, PAGE_NBYTES * 2), layer if fill else 0, dtype=torch.int8)
        for layer in range(1, len(LAYERS) + 1)
    ]
    for tensor in tensors if fill else ():
        tensor.add_(torch.arange(BLOCKS, dtype=torch.int8)[:, None] * 8)
    return KVBlocks(tensors, [[(at, PAGE_NBYTES * 2) for at in range(len(LAYERS))]])


@pytest.fixture
def region(request: pytest.FixtureRequest) -> Iterator[HostRegion]:
    stripes = int(request.param)
    stripe = 2 * len(LAYERS) * PAGE_NBYTES * 2 // stripes
    geometry = RegionGeometry(
        slots=6, slot_nbytes=4096, stripe_nbytes=stripe, stripes=stripes, ranks=1
    )
    with open_regions() as open_region:
        yield open_region(geometry)


every_striping = pytest.mark.parametrize("region", [1, 8], indirect=True)


@every_striping
def test_each_batch_copies_its_layers_and_leaves_the_others_alone(region: HostRegion) -> None:
    stripes = region.geometry.stripes
    share = shard_of(0) if stripes == 1 else RankShare(tuple(range(stripes)))
    source, target = layered_kv(fill=True), layered_kv(fill=False)
    plan = plan_copy([9, 1, 4], [3], [1], [5, 2], blocks_per_chunk=2)
    out = BlockCopier(source, region, share=share, blocks_per_chunk=2)
    out.store(plan, after=None)
    into = BlockCopier(target, region, share=share, blocks_per_chunk=2)
    beside = into.beside()
    for pages in (slice(0, 1), slice(1, 3), slice(3, 4)):
        untouched = [tensor.clone() for tensor in target.tensors]
        beside.load(plan, after=None, pages=pages)
        for layer, (was, now) in enumerate(zip(untouched, target.tensors, strict=True)):
            expected = was.clone()
            if layer in range(*pages.indices(len(LAYERS))):
                expected[[9, 1, 4]] = source.tensors[layer][[9, 1, 4]]
            assert torch.equal(now, expected)
    for copier in (out, beside, into):
        copier.close()


@pytest.fixture
def device(region: HostRegion) -> Iterator[tuple[DeviceEngine, KVBlocks]]:
    kv = layered_kv(fill=True)
    stripes = region.geometry.stripes
    engine = DeviceEngine(
        kv,
        region,
        rank=0,
        share=shard_of(0) if stripes == 1 else RankShare(tuple(range(stripes))),
        blocks_per_chunk=2,
        close_timeout_s=SOON_S,
    )
    yield engine, kv
    engine.close()


@every_striping
def test_an_engine_loads_within_the_step_what_it_stored(
    device: tuple[DeviceEngine, KVBlocks], region: HostRegion
) -> None:
    engine, kv = device
    control = region.control
    assert engine.open_steps(LAYERS, timeout_s=SOON_S)
    expected = [tensor[[1, 2, 3, 4]].clone() for tensor in kv.tensors]
    control.issue([0, 4])
    engine.store(1, engine.plan([1, 2, 3, 4], [4], [0], [0, 4]), [STAMP] * 2)
    assert engine.wait_any(timeout_s=SOON_S)
    assert [result.why for result in engine.poll()] == [Why.STORE]
    plan = engine.plan([8, 9, 10, 11], [4], [0], [0, 4])
    control.issue([0, 4])
    engine.load_in_step(2, plan, [STAMP] * 2)
    engine.start_step()
    for layer, tensor, old in zip(LAYERS, kv.tensors, expected, strict=True):
        engine.wait_for_layer(layer)
        assert torch.equal(tensor[[8, 9, 10, 11]], old)
    assert engine.end_step() == []
    assert not engine.idle
    (result,) = engine.poll()
    assert (result.job_id, result.why, result.is_whole) == (2, Why.LOAD, True)
    assert result.nbytes == 2 * 2 * len(LAYERS) * PAGE_NBYTES * 2
    assert control.loaded([0, 4], [STAMP] * 2) == [True, True]
    assert control.quiet([0, 4]) == [True, True]
    assert engine.idle


@every_striping
def test_a_load_within_the_step_that_fails_is_acknowledged_and_refused(
    device: tuple[DeviceEngine, KVBlocks], region: HostRegion
) -> None:
    engine, _ = device
    control = region.control
    engine.open_steps(LAYERS, timeout_s=SOON_S)
    control.publish([0, 4], [STAMP] * 2)
    control.issue([0, 4])
    engine.load_in_step(3, engine.plan([8, 9, 10, 11], [4], [0], [0, 4]), [STAMP, STAMP + 1])
    engine.start_step()
    for layer in LAYERS:
        engine.wait_for_layer(layer)
    assert engine.end_step() == [3]
    (result,) = engine.poll()
    assert result.outcomes == [Outcome.FAILED] * 2
    assert result.nbytes == 0
    assert control.loaded([0, 4], [STAMP, STAMP + 1]) == [False, False]
    assert control.quiet([0, 4]) == [True, True]


@every_striping
def test_an_engine_with_all_layers_in_one_page_copies_them_before_the_step(
    device: tuple[DeviceEngine, KVBlocks],
) -> None:
    engine, _ = device
    assert not engine.open_steps((*LAYERS, "one more"), timeout_s=SOON_S)


@every_striping
def test_a_worker_that_was_not_prepared_refuses_loads_within_the_step(
    device: tuple[DeviceEngine, KVBlocks],
) -> None:
    engine, _ = device
    with pytest.raises(UnsupportedError):
        engine.load_in_step(1, engine.plan([8, 9], [2], [0], [0]), [STAMP])
    engine.start_step()
    engine.wait_for_layer("a")
    assert engine.end_step() == []
