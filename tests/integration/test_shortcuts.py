"""With its shortcuts, kvtier's connector does what vLLM's half does when asked everything.

The two halves are the same code over two caches built alike, driven by vLLM's scheduler with
the same requests: one is shown every step as it is, the other is behind ``KVTierConnector``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvtier.config import parse_config
from kvtier.connector.metadata import (
    BlockSpec,
    ConnectorMetadata,
    SlotSpec,
    TransferJob,
    WorkerOutput,
)
from kvtier.vllm import compat
from kvtier.vllm import connector as door
from kvtier.vllm.connector import KVTierConnector
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.shortcuts import BusyRequests
from tests.integration.scheduler_pair import PairSpec, TeeConnector
from tests.integration.scheduler_setup import Setup, random_tokens
from tests.integration.scheduler_world import World
from tests.integration.test_scheduler_differential import SETUPS, run

if TYPE_CHECKING:
    from kvtier.connector.service import CacheService

SETTINGS = parse_config("tiers:\n- {kind: ram, capacity: 1GiB}\n", source="test")


class SecondSpec(PairSpec):
    """Builds the second cache's manager."""

    def get_manager(self) -> Any:
        service = cast("CacheService", self.pair.ours)
        return KVTierManager(service, persistent=False, report_metrics=False)


def with_second(vllm_config: Any, kv_cache_config: Any = None) -> Any:
    """Stand in for the connector's own choice of a spec."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | {
        "spec_name": SecondSpec.__name__,
        "spec_module_path": SecondSpec.__module__,
    }
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed


class Behind:
    """``KVTierConnector`` as the tee's second half."""

    def __init__(self, world: World) -> None:
        scheduler = world.scheduler
        self._connector = KVTierConnector(
            scheduler.vllm_config, KVConnectorRole.SCHEDULER, scheduler.kv_cache_config
        )
        self._seen = world.seen
        self._service = world.pair.ours
        half = self._connector.connector_scheduler
        build = half.build_connector_meta

        def counted(output: SchedulerOutput) -> Any:
            self._seen["steps shown"] += 1
            self._seen["requests shown"] += len(output.num_scheduled_tokens)
            return build(output)

        half.build_connector_meta = counted

    def build_connector_meta(self, output: SchedulerOutput) -> ConnectorMetadata:
        self._seen["steps built"] += 1
        self._seen["requests"] += len(output.num_scheduled_tokens)
        metadata: Any = self._connector.build_connector_meta(output)
        return ConnectorMetadata(
            {job_id: told(job, load=True) for job_id, job in metadata.load_jobs.items()},
            {job_id: told(job, load=False) for job_id, job in metadata.store_jobs.items()},
            frozenset(metadata.jobs_to_flush),
        )

    def update_connector_output(self, output: WorkerOutput) -> None:
        jobs = dict(output.completed_jobs)
        meta = OffloadingWorkerMetadata(completed_jobs=jobs) if jobs else None
        self._connector.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=meta)
        )

    def take_events(self) -> Iterable[Any]:
        events: Iterable[Any] = self._service.take_events()
        return events

    def has_pending_work(self) -> bool:
        return bool(self._connector.has_pending_push_work())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


def told(job: Any, *, load: bool) -> TransferJob:
    slots, blocks = job.src_spec, job.dst_spec
    if not load:
        slots, blocks = blocks, slots
    return TransferJob(
        job.req_id,
        BlockSpec(
            tuple(blocks.block_ids.tolist()),
            tuple(blocks.group_sizes),
            tuple(blocks.block_indices),
        ),
        SlotSpec(tuple(slots.slots), tuple(slots.generations)),
    )


class Trusting(World):
    """A world that does not look into blocks: what vLLM's half stores is not in question."""

    def _is(self, *_: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def arranged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(door, "_with_spec", with_second)
    monkeypatch.setattr(door, "_settings", lambda _: SETTINGS)
    monkeypatch.setattr(TeeConnector, "_offer_anew", lambda *_: None)


@contextmanager
def a_world(setup: Setup, directory: Path, seed: int) -> Iterator[World]:
    world = Trusting(setup, directory / "model", seed)
    world.pair.half = cast("Any", Behind(world))
    world.pair.excused.why = lambda key, context: None
    world.pair.excused.whole_prefix = False
    try:
        yield world
    finally:
        world.close()


def stream(setup: Setup, directory: Path, seed: int, steps: int) -> World:
    with a_world(setup, directory, seed) as world:
        run(world, steps)
    return world


def test_the_installed_vllm_is_one_whose_source_was_read() -> None:
    assert compat.source_was_read(), "read what changed in it, then add it to the digests"


@pytest.mark.parametrize("name", SETUPS)
def test_what_is_not_shown_would_have_changed_nothing(name: str, tmp_path: Path) -> None:
    world = stream(SETUPS[name], tmp_path, seed=3, steps=150)
    seen = world.seen
    assert seen["stored"]
    assert seen["aborts"]
    assert seen["steps shown"] < seen["steps built"]
    assert seen["requests shown"] < 0.6 * seen["requests"]


def test_what_is_computed_after_a_shorter_load_is_offered_in_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[int] = []
    with a_world(Setup(), tmp_path, seed=0) as world:
        prepare = world.pair.ours.prepare_store

        def noted(keys: Sequence[bytes], req_id: str) -> Any:
            offered.append(len(keys))
            return prepare(keys, req_id)

        monkeypatch.setattr(world.pair.ours, "prepare_store", noted)
        prompt = random_tokens(world.draw, 100, 100)
        request = world.submit(prompt, 40, {"max_load_tokens": 64})
        while request.num_tokens < 110:
            world.step()
        assert offered == [6]
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
        # vLLM's half alone does not take a load in the step of the preemption.
        world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        world.step()
        world.scheduler.set_pause_state(PauseState.UNPAUSED)
        world.settle()
    assert offered == [6, 2], "four chunks were loaded, so the prompt's last two are computed"


def test_most_steps_that_generate_are_not_looked_at_request_by_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = BusyRequests.of

    def noted(busy: BusyRequests, output: SchedulerOutput) -> Any:
        looks.append(len(output.num_scheduled_tokens))
        return look(busy, output)

    monkeypatch.setattr(BusyRequests, "of", noted)
    with a_world(Setup(), tmp_path, seed=0) as world:
        told = world.pair.ours.calls
        request = world.submit(random_tokens(world.draw, 100, 100), 140)
        while request.num_tokens < 112:
            world.step()
        before = world.seen["steps built"]
        looks.clear()
        while request.num_tokens < 208:
            world.step()
            assert not told, "both caches were compared"
        steps = world.seen["steps built"] - before
    assert 90 <= steps <= 100
    assert len(looks) <= 0.4 * steps, "one in 16 fills a chunk, and some more bring it down"


def half_of_one_request() -> Any:
    """Return what is read of vLLM's half: request a has 17 tokens and stored a chunk of 16."""
    request = SimpleNamespace(num_computed_tokens=17, num_prompt_tokens=40, resumable=False)
    state = SimpleNamespace(
        req=request,
        max_offload_tokens=None,
        group_states=(SimpleNamespace(next_stored_chunk_idx=1),),
    )
    return SimpleNamespace(
        config=SimpleNamespace(
            kv_group_configs=(SimpleNamespace(tokens_per_chunk=16),), offload_prompt_only=True
        ),
        _req_status={"a": state},
        _current_batch_load_jobs={},
        _current_batch_jobs_to_flush=set(),
        _current_batch_allocated_block_ids=set(),
    )


def a_step(tokens: int = 1, **said: Any) -> SchedulerOutput:
    """Return a step of request a, and what else it says."""
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids = ["a"], [None]
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": tokens},
        **said,
    )


@pytest.fixture
def half() -> Any:
    return half_of_one_request()


@pytest.fixture
def busy(half: Any) -> BusyRequests:
    busy = BusyRequests(half)
    busy.looked_at(a_step())
    return busy


def test_a_step_that_fills_no_chunk_is_not_shown(busy: BusyRequests) -> None:
    assert busy.of(a_step()) is None
    assert busy.of(a_step(14)) is None


@pytest.fixture
def quiet(half: Any, busy: BusyRequests) -> BusyRequests:
    """Return what has looked at a step that means nothing."""
    assert not busy.is_quiet(a_step())
    assert busy.of(a_step()) is None
    half._req_status["a"].req.num_computed_tokens += 1
    return busy


def test_steps_mean_nothing_until_a_request_fills_a_chunk(
    half: Any, quiet: BusyRequests
) -> None:
    request = half._req_status["a"].req
    for tokens in (1, 4, 1, 7):
        assert quiet.is_quiet(a_step(tokens))
        request.num_computed_tokens += tokens
    assert request.num_computed_tokens == 31
    assert not quiet.is_quiet(a_step())
    assert quiet.of(a_step()) is not None


def test_more_tokens_than_expected_are_looked_at_once(half: Any, quiet: BusyRequests) -> None:
    half._req_status["a"].req.num_computed_tokens = 3  # the others were rejected
    assert not quiet.is_quiet(a_step(14))
    assert quiet.of(a_step(14)) is None
    half._req_status["a"].req.num_computed_tokens += 14
    assert quiet.is_quiet(a_step(14))
    assert not quiet.is_quiet(a_step())


def test_after_a_step_that_is_shown_for_another_nothing_is_expected(
    half: Any, quiet: BusyRequests
) -> None:
    half._req_status["b"] = half_of_one_request()._req_status["a"]
    both = a_step(5)
    both.num_scheduled_tokens["b"] = 1
    shown = quiet.of(both)
    assert shown is not None
    assert list(shown.num_scheduled_tokens) == ["b"]
    quiet.looked_at(shown)
    half._req_status["a"].req.num_computed_tokens += 5
    assert not quiet.is_quiet(a_step(9))
    assert quiet.of(a_step(9)) is not None, "23 and 9 are two chunks"


@pytest.mark.parametrize(
    "said",
    [
        {"finished_req_ids": {"b"}},
        {"preempted_req_ids": {"b"}},
        {"scheduled_new_reqs": [None]},
        {"new_block_ids_to_zero": [5]},
    ],
    ids=str,
)
def test_a_step_that_says_more_is_never_quiet(
    said: dict[str, Any], quiet: BusyRequests
) -> None:
    assert not quiet.is_quiet(a_step(**said))
    assert quiet.is_quiet(a_step())


def test_a_request_that_is_not_known_is_never_quiet(quiet: BusyRequests) -> None:
    quiet.forget("a")
    assert not quiet.is_quiet(a_step())


def test_a_request_is_shown_when_it_fills_a_chunk(busy: BusyRequests) -> None:
    step = a_step(15)
    assert busy.of(step) is step


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("_current_batch_load_jobs", {7: None}),
        ("_current_batch_jobs_to_flush", {7}),
        ("_current_batch_allocated_block_ids", {5}),
    ],
)
def test_a_step_is_shown_if_anything_was_gathered_for_it(
    name: str, gathered: Any, half: Any, busy: BusyRequests
) -> None:
    setattr(half, name, gathered)
    shown = busy.of(a_step())
    assert shown is not None
    assert not shown.num_scheduled_tokens
    assert not shown.scheduled_cached_reqs.req_ids


@pytest.mark.parametrize(
    "said",
    [{"finished_req_ids": {"b"}}, {"preempted_req_ids": {"b"}}, {"scheduled_new_reqs": [None]}],
    ids=str,
)
def test_a_step_is_shown_if_a_request_came_or_went(
    said: dict[str, Any], busy: BusyRequests
) -> None:
    assert busy.of(a_step(**said)) is not None


def test_a_request_that_loaded_since_is_shown(busy: BusyRequests) -> None:
    busy.forget("a")
    step = a_step()
    assert busy.of(step) is step


def test_a_request_whose_prompt_may_grow_is_always_shown(half: Any, busy: BusyRequests) -> None:
    half._req_status["a"].req.resumable = True
    busy.forget("a")
    busy.looked_at(a_step())
    assert busy.of(a_step()) is not None


def test_what_comes_after_the_prompt_is_not_shown_where_only_prompts_are_stored(
    half: Any, busy: BusyRequests
) -> None:
    request = half._req_status["a"].req
    half._req_status["a"].group_states[0].next_stored_chunk_idx = 2
    request.num_computed_tokens = 47
    busy.forget("a")
    busy.looked_at(a_step())
    assert busy.of(a_step()) is None


def test_a_half_that_was_changed_is_not_one_that_was_read(tmp_path: Path) -> None:
    def changed(name: str) -> Any:
        module = importlib.import_module(name)
        copied = tmp_path / f"{name}.py"
        copied.write_text(Path(str(module.__file__)).read_text() + "# changed")
        return SimpleNamespace(__file__=str(copied))

    assert not compat.source_was_read(changed)


def test_a_half_that_was_not_read_is_shown_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "source_was_read", lambda: False)
    caplog.set_level(logging.INFO)
    seen = stream(SETUPS["one group"], tmp_path, seed=3, steps=60).seen
    assert caplog.text.count("half is asked everything at every step") == 1
    assert seen["steps shown"] == seen["steps built"] > 0
    assert seen["requests shown"] == seen["requests"]


def test_figures_of_vllms_half_are_told_with_kvtiers_own_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_world(SETUPS["one group"], tmp_path, seed=3) as world:
        connector = cast("Any", world.pair.half)
        figures = connector.connector_scheduler._connector_stats
        figures.increase_counter("vllm:kv_offload_load_bytes", 7)
        with monkeypatch.context() as early:
            early.setattr(connector._kvtier, "has_stats", lambda: False)
            assert connector.get_kv_connector_stats() is None
            figures.increase_counter("vllm:kv_offload_load_bytes", 5)
        told = connector.get_kv_connector_stats()
        assert told.reduce()["vllm:kv_offload_load_bytes"] == 12
        assert connector.get_kv_connector_stats() is None, "told once"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 12))
@pytest.mark.parametrize("name", SETUPS)
def test_what_is_not_shown_in_long_streams_would_have_changed_nothing(
    name: str, seed: int, tmp_path: Path
) -> None:
    assert stream(SETUPS[name], tmp_path, seed, steps=400).seen["stored"]
