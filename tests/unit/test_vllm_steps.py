"""What the scheduler side learns of a step that vLLM planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.protocols import BoundaryState, Step
from kvtier.vllm.steps import StepReader
from tests.unit.vllm_kv import FullAttentionSpec, MambaSpec, groups_of, kv_cache_config

NULL = 0
TOKENS_PER_STATE = 16


def blocks_of(*groups: Sequence[int]) -> Any:
    """Return the blocks of a request, per group; number 0 is the placeholder."""
    return SimpleNamespace(
        blocks=tuple(
            [SimpleNamespace(block_id=number, is_null=number == NULL) for number in group]
            for group in groups
        )
    )


def new(req_id: str, *block_ids: Sequence[int], computed: int = 0) -> Any:
    """Return a request that is scheduled for the first time."""
    return SimpleNamespace(
        req_id=req_id, block_ids=list(block_ids), num_computed_tokens=computed
    )


def copy(source: int, target: int) -> Any:
    return SimpleNamespace(src_block_id=source, dst_block_id=target)


@dataclass
class Output:
    """vLLM's decisions in one step: none, unless a test says."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: Sequence[Any] = ()
    resumed: Sequence[str] = ()
    new_block_ids: Sequence[Any] = ()
    preempted_req_ids: set[str] | None = None
    kv_cache_block_copies: Sequence[Any] | None = None
    new_block_ids_to_zero: Sequence[int] | None = None
    states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def scheduled_cached_reqs(self) -> Any:
        return SimpleNamespace(
            new_block_ids=self.new_block_ids, resumed_req_ids=set(self.resumed)
        )

    @property
    def kv_connector_block_state(self) -> Any:
        if self.states is None:
            return None
        return SimpleNamespace(boundary_state_offloads=self.states)


class Engine:
    """The part of an engine that a reader looks at.

    Attributes:
        tables: Blocks of each request.
    """

    def __init__(self, *, states: bool = False, second_runner: bool = False) -> None:
        specs = [FullAttentionSpec(), *([MambaSpec(block_size=TOKENS_PER_STATE)] * states)]
        config: Any = kv_cache_config(groups_of(*specs), needs_kv_cache_zeroing=second_runner)
        settings: Any = SimpleNamespace(use_v2_model_runner=second_runner)
        self.reader = StepReader(settings, config)
        self.tables: dict[str, Any] = {}

    def get_blocks(self, req_id: str) -> Any:
        return self.tables[req_id]

    def only_generates(self, **decisions: Any) -> bool:
        output: Any = Output(**decisions)
        return self.reader.only_generates(output)

    def step(self, **decisions: Any) -> Step:
        output: Any = Output(**decisions)
        tables: Any = self
        return self.reader.read(output, tables)


def test_a_step_that_only_generates_has_its_tokens_and_nothing_else() -> None:
    tokens = {"a": 1, "b": 1}
    step = Engine(states=True).step(num_scheduled_tokens=tokens, new_block_ids=[None, None])
    assert step.num_scheduled_tokens is tokens
    assert step.prompt_tokens == 0
    assert not any((step.started, step.preempted, step.allocated, step.overwritten))
    assert step.states == {}


GENERATING = {"num_scheduled_tokens": {"a": 1, "b": 1}, "new_block_ids": [None, None]}


def test_a_step_that_only_generates_is_recognized_by_its_output() -> None:
    assert Engine().only_generates(**GENERATING)


@pytest.mark.parametrize(
    "more",
    [
        {"num_scheduled_tokens": {}},
        {"num_scheduled_tokens": {"a": 1, "b": 2}},
        {"scheduled_new_reqs": [new("a", [1])]},
        {"resumed": ["a"]},
        {"new_block_ids": [None, ([4],)]},
        {"preempted_req_ids": {"c"}},
        {"new_block_ids_to_zero": [1]},
        {"kv_cache_block_copies": [copy(8, 3)]},
    ],
    ids=str,
)
def test_a_step_that_does_more_does_not_only_generate(more: Mapping[str, Any]) -> None:
    assert not Engine().only_generates(**{**GENERATING, **more})


def test_a_step_after_an_allocation_or_with_states_does_not_only_generate() -> None:
    engine = Engine()
    engine.reader.note_allocation(blocks_of([6]))
    assert not engine.only_generates(**GENERATING)
    assert not Engine(states=True).only_generates(**GENERATING)


def test_prompts_are_counted_without_the_tokens_that_are_generated_beside_them() -> None:
    step = Engine().step(num_scheduled_tokens={"a": 1, "b": 512, "c": 4, "d": 100})
    assert step.prompt_tokens == 612


def test_new_and_resumed_requests_start_and_preempted_ones_are_named() -> None:
    step = Engine().step(
        scheduled_new_reqs=[new("a", [1])], resumed=["b"], preempted_req_ids={"c"}
    )
    assert list(step.started) == ["a", "b"]
    assert set(step.preempted) == {"c"}


def test_blocks_of_all_groups_of_new_and_of_running_requests_are_given_away() -> None:
    step = Engine().step(
        scheduled_new_reqs=[new("a", [1, 2], [NULL, 3])],
        new_block_ids=[None, ([4], [NULL, 5])],
    )
    assert step.allocated == {1, 2, 3, 4, 5}


def test_blocks_of_a_request_that_waits_for_a_load_are_given_away_in_one_step() -> None:
    engine = Engine()
    engine.reader.note_allocation(blocks_of([6, NULL], [7]))
    engine.reader.note_allocation(blocks_of([8]))
    assert engine.step().allocated == {6, 7, 8}
    assert engine.step().allocated == set()


def test_blocks_that_are_cleared_or_copied_into_are_given_away() -> None:
    written = {"new_block_ids_to_zero": [1, 2], "kv_cache_block_copies": [copy(8, 3)]}
    step = Engine().step(**written)
    assert step.allocated == {1, 2, 3}
    assert step.overwritten == set(), "the first runner flushes stores before it writes"


def test_the_second_runner_writes_before_stores_are_flushed() -> None:
    written = {"new_block_ids_to_zero": [1], "kv_cache_block_copies": [copy(8, 3)]}
    step = Engine(second_runner=True).step(**written)
    assert step.overwritten == {1, 3}
    assert step.overwritten <= step.allocated


def test_the_second_runner_moves_states_into_new_blocks() -> None:
    step = Engine(states=True, second_runner=True).step(
        scheduled_new_reqs=[new("a", [1, 2, 3], [4, 5, 6], computed=TOKENS_PER_STATE)],
        new_block_ids=[None, ([7], [8])],
    )
    assert step.overwritten == {5, 6, 8}, "the block of what is computed already stays"


@pytest.mark.parametrize("offered", [None, {}])
def test_without_offered_states_there_are_none(offered: Any) -> None:
    assert Engine(states=True).step(states=offered).states == {}


def test_a_state_that_is_still_in_a_block_of_its_request_is_offered() -> None:
    engine = Engine(states=True)
    engine.tables = {"a": blocks_of([1, 2], [NULL, 4])}
    tokens = 2 * TOKENS_PER_STATE
    assert engine.step(states={"a": [(1, 4, tokens)]}).states == {
        "a": [BoundaryState(1, 4, tokens)]
    }


def test_a_state_is_followed_to_the_block_it_is_copied_from() -> None:
    engine = Engine(states=True)
    engine.tables = {"a": blocks_of([1], [4])}
    found = engine.step(
        states={"a": [(1, 9, TOKENS_PER_STATE)]}, kv_cache_block_copies=[copy(4, 9)]
    )
    assert found.states == {"a": [BoundaryState(1, 9, TOKENS_PER_STATE)]}


@pytest.mark.parametrize(
    "entry",
    [
        (1, 5, TOKENS_PER_STATE),  # freed in the step that computed it
        (1, 6, TOKENS_PER_STATE),  # in a later block, which another state has by now
        (1, NULL, TOKENS_PER_STATE),
        (0, 1, TOKENS_PER_STATE),  # of a group that keeps no states
    ],
)
def test_a_state_that_is_gone_is_dropped(entry: tuple[int, int, int]) -> None:
    engine = Engine(states=True)
    engine.tables = {"a": blocks_of([1, 2], [4, 6])}
    assert engine.step(states={"a": [entry]}).states == {}


def test_models_without_states_are_not_asked_for_any() -> None:
    assert Engine().step(states={"a": [(0, 1, 16)]}).states == {}
