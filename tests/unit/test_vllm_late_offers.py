"""Which engines make vLLM's half offer chunks of sliding windows late."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm import compat
from tests.unit.test_vllm_compat_engine import FACTS
from tests.unit.vllm_modules import Load, vllm_with


class Full:
    """What layers keep that read the whole prefix."""


@dataclasses.dataclass
class Window:
    """What layers keep that read some last tokens of it."""

    sliding_window: int
    extra_retained_tokens: int = 0


class State:
    """What layers keep that read no tokens."""


class Half:
    """vLLM's scheduler half since 0.30."""

    def _final_swa_alignment_blocks(self) -> None: ...


DEFAULT = SimpleNamespace(cache_config=SimpleNamespace(prefix_cache_retention_interval=0))
DENSE = SimpleNamespace(cache_config=SimpleNamespace(prefix_cache_retention_interval=None))
OLD = SimpleNamespace(cache_config=SimpleNamespace())
LATE = ((64, Full()), (16, Window(40)))


def vllm_of(half: type = Half, **modules: Any) -> Load:
    package = "vllm__distributed__kv_transfer__kv_connector__v1__offloading__scheduler"
    kinds = SimpleNamespace(FullAttentionSpec=Full, SlidingWindowSpec=Window)
    return vllm_with(
        **{package: SimpleNamespace(OffloadingConnectorScheduler=half)},
        vllm__v1__kv_cache_interface=kinds,
        **modules,
    )


@pytest.mark.parametrize(
    ("groups", "blocks_per_chunk", "is_late"),
    [
        (LATE, 1, True),
        (LATE, 2, True),
        # Chunks of equal length, and longer ones of the window: each is offered in its turn.
        (((16, Full()), (16, Window(40))), 1, False),
        (((16, Full()), (64, Window(100))), 1, False),
        (((16, Full()), (64, Window(100))), 8, False),
        (((48, Full()), (32, Window(10))), 1, False),
        # A window that reaches from one end to the one before leaves nothing out.
        (((64, Full()), (16, Window(49))), 1, True),
        (((64, Full()), (16, Window(50))), 1, False),
        (((64, Full()), (16, Window(48, extra_retained_tokens=2))), 1, False),
        (((64, Full()), (16, Window(1024))), 4, False),
        # A chunk is passed over if no block of it is needed.
        (((64, Full()), (16, Window(40))), 5, True),
        (((24, Full()), (16, Window(10))), 2, True),
        (((24, Full()), (16, Window(20))), 2, False),
        # Without full attention the longest chunks count; with two lengths of it, none.
        (((16, Window(40)), (64, Window(100))), 1, True),
        (((16, Window(40)), (64, State())), 1, True),
        (((64, Full()), (32, Full()), (16, Window(10))), 1, False),
        (((64, Full()), (16, State())), 1, False),
        (((64, Full()),), 1, False),
    ],
)
def test_chunks_that_are_passed_over_are_offered_late(
    groups: tuple[tuple[int, object], ...], blocks_per_chunk: int, is_late: bool
) -> None:
    late = compat.offers_late(DENSE, groups, blocks_per_chunk=blocks_per_chunk, load=vllm_of())
    assert late is is_late


@pytest.mark.parametrize("config", [DEFAULT, OLD])
def test_nothing_is_offered_late_by_default(config: SimpleNamespace) -> None:
    assert not compat.offers_late(config, LATE, blocks_per_chunk=1, load=vllm_of())


@pytest.mark.parametrize("half", [object, None])
def test_nothing_is_offered_late_before_the_half_did_so(half: Any) -> None:
    assert not compat.offers_late(DENSE, LATE, blocks_per_chunk=1, load=vllm_of(half))


@pytest.mark.parametrize(("config", "is_late"), [(DENSE, True), (DEFAULT, False)])
def test_a_worker_asks_its_layers_and_only_where_it_matters(
    config: SimpleNamespace, is_late: bool
) -> None:
    asked: list[object] = []

    def layer(kind: object) -> SimpleNamespace:
        def answer(own: object) -> object:
            asked.append(own)
            return kind

        return SimpleNamespace(get_kv_cache_spec=answer)

    layers = {f"layer.{number}": layer(kind) for number, (_, kind) in enumerate(LATE)}
    own = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=config.cache_config,
    )
    engine = dataclasses.replace(FACTS, groups=((64, ("layer.0",)), (16, ("layer.1",))))
    assert compat.worker_offers_late(own, engine, load=vllm_of()) is is_late
    assert asked == [own, own] * is_late
