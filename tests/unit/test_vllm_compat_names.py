"""What kvtier reads of vLLM where its names and its state have changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm import compat
from tests.unit.vllm_modules import BASE, Job, vllm_with


def test_the_policy_has_had_two_names() -> None:
    assert compat.chunk_level(SimpleNamespace(BLOCK_LEVEL=1, REQUEST_LEVEL=2)) == 1
    assert compat.chunk_level(SimpleNamespace(CHUNK_LEVEL=3, REQUEST_LEVEL=2)) == 3
    with pytest.raises(UnsupportedError, match="CHUNK_LEVEL"):
        compat.chunk_level(SimpleNamespace(REQUEST_LEVEL=2))


def test_what_is_there_but_not_loadable_is_asked_for_again_where_vllm_has_no_word_for_it() -> (
    None
):
    assert compat.hit_pending(SimpleNamespace(RETRY=1)) == 1
    assert compat.hit_pending(SimpleNamespace(RETRY=1, HIT_PENDING=2)) == 2


def test_media_are_strings_until_vllm_has_an_enumeration() -> None:
    assert compat.media(vllm_with()) == ("CPU", "STORAGE")
    medium = SimpleNamespace(CPU="c", STORAGE="s")
    assert compat.media(vllm_with(**{BASE: SimpleNamespace(Medium=medium)})) == ("c", "s")


def test_a_hits_source_is_nothing_where_nobody_asks() -> None:
    assert compat.hit_sources(vllm_with()) == (None, None)
    module = SimpleNamespace(CacheHitSource=SimpleNamespace(HOST="h", DISK="d"))
    load = vllm_with(vllm__v1__metrics__cache_hit_source=module)
    assert compat.hit_sources(load) == ("h", "d")


@pytest.mark.parametrize(
    ("hashing", "random"),
    [
        ({}, True),  # before 0.29
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": None}, False),
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": "c"}, False),
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": "b7f1"}, True),
    ],
    ids=["no constant seed", "not seeded yet", "constant", "drawn"],
)
def test_hashes_are_stable_with_a_constant_seed_only(
    hashing: dict[str, Any], random: bool
) -> None:
    load = vllm_with(vllm__v1__core__kv_cache_utils=SimpleNamespace(**hashing))
    assert compat.hashes_are_seeded_at_random(load) is random


@dataclasses.dataclass
class Event:
    """What an old vLLM says of residency."""

    keys: list[bytes]
    removed: bool


@dataclasses.dataclass
class LaterEvent(Event):
    """What a new one says."""

    ownership: str | None = None
    removal_expected: bool = False


def test_events_say_what_they_have_room_for() -> None:
    assert not compat.names_tiers(Event)
    assert compat.event_extras(Event) == {}
    assert compat.names_tiers(LaterEvent)
    assert compat.event_extras(LaterEvent) == {"removal_expected": True}


def test_a_requests_chunks_are_told_where_vllm_keeps_them() -> None:
    @dataclasses.dataclass
    class Context:
        req_id: str
        _offload_key_positions: dict[bytes, int]

    assert compat.chunk_positions(Job) is None
    told = compat.chunk_positions(Context)
    assert told is not None
    assert told(Context("a", {b"k": 32})) == {b"k": 32}


def test_a_pages_split_over_ranks_is_unknown_before_vllm_says_it() -> None:
    assert compat.page_mapping(SimpleNamespace(page_size_bytes=1)) is None
    assert compat.page_mapping(SimpleNamespace(mapping="m")) == "m"


def test_the_layout_vllm_chose_is_unknown_before_it_says_so() -> None:
    for cache, layout in [({}, "unknown"), ({"kv_cache_layout": None}, "unknown")]:
        config = SimpleNamespace(cache_config=SimpleNamespace(**cache))
        assert compat.kv_cache_layout(config) == layout
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout="LBHNC"))
    assert compat.kv_cache_layout(config) == "LBHNC"


def test_requests_are_named_where_vllm_has_a_class_for_it() -> None:
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    assert compat.transfer_results(vllm_with(**{base: SimpleNamespace()})) is None
    named = SimpleNamespace(KVConnectorTransferResults=Job)
    assert compat.transfer_results(vllm_with(**{base: named})) is Job


@dataclasses.dataclass
class Step:
    """What a vLLM's scheduler decides that knows of loads within the forward pass."""

    has_sync_kv_loads: bool


class Bound:
    """A connector that is told of the KV cache manager."""

    def bind_kv_cache_manager(self, manager: object) -> None: ...


@pytest.mark.parametrize(
    ("connector", "output", "first"),
    [(Bound, Step, True), (object, Step, False), (Bound, Job, False)],
    ids=["both", "no manager", "no sign of loads"],
)
def test_loads_come_before_the_pass_where_vllm_has_both_signs(
    connector: type[Any], output: type[Any], first: bool
) -> None:
    assert compat.loads_before_the_pass(connector, output) is first


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_blocks_are_written_to_first_where_the_second_runner_clears_them(
    is_second: bool, clears: bool
) -> None:
    engine = SimpleNamespace(use_v2_model_runner=is_second)
    cache = SimpleNamespace(needs_kv_cache_zeroing=clears)
    assert compat.writes_to_blocks_first(engine, cache) is (is_second and clears)
    assert not compat.writes_to_blocks_first(SimpleNamespace(), cache)
    assert not compat.writes_to_blocks_first(engine, SimpleNamespace())


def test_states_move_where_they_are_left_in_full_blocks() -> None:
    kinds = [
        SimpleNamespace(block_size=16),
        SimpleNamespace(block_size=32, mamba_cache_mode="align"),
        SimpleNamespace(block_size=64, mamba_cache_mode="none"),
    ]
    groups = [SimpleNamespace(kv_cache_spec=kind) for kind in kinds]
    assert compat.moving_states(SimpleNamespace(kv_cache_groups=groups)) == {1: 32}


@pytest.mark.parametrize(
    ("states", "ahead", "guesses", "astray"),
    [
        (False, False, False, False),
        (False, True, True, False),
        (False, False, True, True),
        (True, True, False, True),
        (True, False, False, False),
    ],
)
def test_parts_go_astray_where_more_is_computed_than_they_keep(
    states: bool, ahead: bool, guesses: bool, astray: bool
) -> None:
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        speculative_config=object() if guesses else None,
    )
    cache = SimpleNamespace(has_mamba_layers=states)
    assert compat.parts_go_astray(engine, cache) is astray


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("guesses", [0, 1, 2])
def test_states_are_handed_over_too_late_where_a_step_may_pass_them_by_two(
    mode: str, asynchronous: bool, guesses: int
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        num_speculative_tokens=guesses,
    )
    late = compat.hands_over_lost_states(config)
    assert late is (mode == "align" and asynchronous and guesses > 1)


def test_offers_can_be_bounded_where_a_half_keeps_a_limit() -> None:
    half = SimpleNamespace(_req_status={})
    limited = dataclasses.make_dataclass("RequestOffloadState", ["max_offload_tokens"])
    module = SimpleNamespace(RequestOffloadState=limited)
    assert compat.offers_can_be_bounded(half, lambda _: module)
    assert not compat.offers_can_be_bounded(SimpleNamespace(), lambda _: module)
    assert not compat.offers_can_be_bounded(half, lambda _: SimpleNamespace())
    unlimited = SimpleNamespace(RequestOffloadState=Job)
    assert not compat.offers_can_be_bounded(half, lambda _: unlimited)


def test_aborted_requests_are_bounded_where_a_half_stores_the_tails_of_their_windows() -> None:
    module = SimpleNamespace(
        RequestOffloadState=dataclasses.make_dataclass("State", ["req", "transfer_jobs"]),
        TransferJobStatus=dataclasses.make_dataclass("Status", ["is_store"]),
    )
    half = SimpleNamespace(_jobs={}, _final_swa_alignment_blocks=None)
    assert compat.bounds_aborted(half, lambda _: module)
    assert not compat.bounds_aborted(SimpleNamespace(_jobs={}), lambda _: module)
    assert not compat.bounds_aborted(half, lambda _: SimpleNamespace())


def test_what_events_say_of_chunks_is_there_where_they_describe_themselves() -> None:
    payloads = {b"key": object()}
    tracker = SimpleNamespace(_pending_event_metadata=payloads)
    assert compat.event_payloads(SimpleNamespace(_events_tracker=tracker)) is payloads
    assert compat.event_payloads(SimpleNamespace()) is None
    assert compat.event_payloads(SimpleNamespace(_events_tracker=object())) is None


def read_state() -> SimpleNamespace:
    """Return vLLM's scheduler half's module, with all that is read of its state."""

    def kept(name: str, *fields: str) -> type[Any]:
        return dataclasses.make_dataclass(name, fields)

    return SimpleNamespace(
        RequestOffloadState=kept(
            "RequestOffloadState",
            "group_states",
            "num_locally_computed_tokens",
            "partial_tail_boundary",
            "req",
            "req_context",
            "transfer_jobs",
        ),
        RequestGroupState=kept("RequestGroupState", "next_stored_chunk_idx", "offload_keys"),
        SchedulerOffloadConfig=kept(
            "SchedulerOffloadConfig", "kv_group_configs", "tokens_per_hash"
        ),
        GroupOffloadConfig=kept("GroupOffloadConfig", "tokens_per_block", "tokens_per_chunk"),
    )


def test_a_half_is_known_if_all_that_is_read_of_it_is_there() -> None:
    half = SimpleNamespace(_jobs={}, _req_status={})

    def known(half: object, module: object) -> bool:
        return compat.half_is_known(half, lambda _: module)

    assert known(half, read_state())
    assert not known(SimpleNamespace(_jobs={}), read_state())
    for name in vars(read_state()):
        without = read_state()
        delattr(without, name)
        assert not known(half, without)
        setattr(without, name, Job)
        assert not known(half, without)


def test_blocks_can_be_struck_out_where_a_half_keeps_its_tables() -> None:
    half = SimpleNamespace(_current_batch_allocated_block_ids=(), _req_status={}, config=None)
    tables = {
        "RequestOffloadState": ["group_states"],
        "RequestGroupState": ["block_ids", "next_stored_chunk_idx"],
        "SchedulerOffloadConfig": ["blocks_per_chunk", "kv_group_configs"],
        "GroupOffloadConfig": ["group_idx", "sliding_window_size_in_chunks"],
    }
    kept = {name: dataclasses.make_dataclass(name, fields) for name, fields in tables.items()}

    def possible(half: object, **other: Any) -> bool:
        module = SimpleNamespace(**kept | other)
        return compat.blocks_can_be_struck_out(half, lambda _: module)

    assert possible(half)
    assert not possible(SimpleNamespace())
    for name in kept:
        assert not possible(half, **{name: None})
        assert not possible(half, **{name: Job})


def test_offers_can_be_repeated_where_a_half_keeps_how_far_it_got() -> None:
    half = SimpleNamespace(_jobs={}, _req_status={}, config=None)
    places = {
        "RequestOffloadState": [
            "group_states",
            "num_locally_computed_tokens",
            "req",
            "transfer_jobs",
        ],
        "RequestGroupState": ["next_stored_chunk_idx"],
        "SchedulerOffloadConfig": ["kv_group_configs"],
        "GroupOffloadConfig": ["tokens_per_block", "tokens_per_chunk"],
    }
    kept = {name: dataclasses.make_dataclass(name, fields) for name, fields in places.items()}

    def possible(half: object, **other: Any) -> bool:
        module = SimpleNamespace(**kept | other)
        return compat.offers_can_be_repeated(half, lambda _: module)

    assert possible(half)
    assert not possible(SimpleNamespace())
    for name in kept:
        assert not possible(half, **{name: None})
        assert not possible(half, **{name: Job})


def test_a_half_without_source_was_not_read(tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    other = tmp_path / "other.py"
    other.write_text("# not vLLM's")
    assert not compat.source_was_read(missing)
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=None))
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=f"{tmp_path}/none"))
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=str(other)))
