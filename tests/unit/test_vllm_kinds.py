"""What layers keep that kvtier takes, and what it refuses because nobody has read it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm import compat
from tests.unit.test_vllm_compat_engine import FACTS
from tests.unit.vllm_modules import vllm_with


class Full:
    """Keeps every token; stands for vLLM's class, as the others do."""

    num_kv_heads = 1

    def __init__(self, tokens_per_state: object = 1) -> None:
        self.tokens_per_state = tokens_per_state


class Evicting(Full):
    """A plugin's, whose manager gives blocks away amid a prompt."""


class State:
    """Keeps what follows some last token."""

    def __init__(self, mode: str = "align") -> None:
        self.mamba_cache_mode = mode


class Ring:
    """Keeps the tokens of a row that is not finished."""

    prefix_cacheable = False


class Tail(Ring):
    """What vLLM 0.30 and 0.31 call such a ring of GLM-5-Next's."""


KINDS = SimpleNamespace(
    FullAttentionSpec=Full, MambaSpec=State, CircularBufferSpec=Ring, KpoolTailSpec=Tail
)


def layer_of(kind: object, customize: Any = None) -> SimpleNamespace:
    backend = SimpleNamespace(**({"customize_spec": customize} if customize else {}))
    return SimpleNamespace(
        get_kv_cache_spec=lambda config: kind, get_attn_backend=lambda: backend
    )


VLLM = vllm_with(vllm__v1__kv_cache_interface=KINDS)


def kept_by(*layers: SimpleNamespace) -> dict[str, Any]:
    """Return what ``layers`` keep, as their worker's configuration says."""
    named = {f"layer.{number}": layer for number, layer in enumerate(layers)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=named))
    return compat.kept_by_layers(config)


def ask(*kept: tuple[int, object], others: tuple[object, ...] = ()) -> None:
    """Ask for an engine whose groups have one layer each, which keeps that.

    Args:
        kept: The tokens of a block of each group, and what its layer keeps.
        others: What layers keep that are in no group.
    """
    groups = tuple((tokens, (f"layer.{at}",)) for at, (tokens, _) in enumerate(kept))
    layers = [layer_of(kind) for kind in (*(kind for _, kind in kept), *others)]
    engine = dataclasses.replace(FACTS, groups=groups, group_ids=tuple(range(len(groups))))
    compat.require_known_layers(engine, kept_by(*layers), load=VLLM)


def test_kinds_that_were_read_are_taken() -> None:
    ask((16, Full()), (16, State()), others=(None, Ring()))
    compat.require_known_layers(FACTS, kept_by(SimpleNamespace()), load=VLLM)


@pytest.mark.parametrize("buffer", [Ring(), Tail()], ids=["ring", "tail"])
def test_a_buffer_is_taken_beside_what_is_stored_and_refused_where_it_is_stored(
    buffer: object,
) -> None:
    ask((16, Full()), others=(buffer,))
    with pytest.raises(UnsupportedError, match=r"layer\.1 keeps what .* use vLLM 0\.31 or"):
        ask((16, Full()), (16, buffer))


@pytest.mark.parametrize("others", [False, True], ids=["stored", "beside"])
def test_a_kind_derived_from_one_that_was_read_is_refused(others: bool) -> None:
    odd = Evicting()
    with pytest.raises(UnsupportedError, match=r"layer\.1 keeps tests\..*\.Evicting, which"):
        ask((16, Full()), *(() if others else ((16, odd),)), others=(odd,) if others else ())


def test_a_kind_that_a_backend_makes_of_a_layers_is_refused() -> None:
    made: list[object] = []

    def customize(kind: object) -> Evicting:
        made.append(kind)
        return Evicting()

    own = Full()
    with pytest.raises(UnsupportedError, match="Evicting"):
        compat.require_known_layers(FACTS, kept_by(layer_of(own, customize)), load=VLLM)
    assert made == [own]
    compat.require_known_layers(FACTS, kept_by(layer_of(State(), customize)), load=VLLM)
    assert made == [own], "a backend has no say in what a state is"


def group_of(kind: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=["layer.7"], kv_cache_spec=kind)


@pytest.mark.parametrize(
    ("kind", "is_known"),
    [
        (Full(), True),
        (SimpleNamespace(kv_cache_specs={"layer.7": Full(), "layer.8": Full()}), True),
        (Evicting(), False),
        (SimpleNamespace(kv_cache_specs={"layer.7": Full(), "layer.8": Evicting()}), False),
    ],
    ids=["one", "several", "odd", "odd among several"],
)
def test_groups_are_of_kinds_that_were_read(kind: object, is_known: bool) -> None:
    config = SimpleNamespace(kv_cache_groups=[group_of(Full()), group_of(kind)])
    if is_known:
        compat.require_known_groups(config, load=VLLM)
        return
    with pytest.raises(UnsupportedError, match=r"layer\.7 keeps .*Evicting"):
        compat.require_known_groups(config, load=VLLM)


@pytest.mark.parametrize(
    ("tokens", "is_refused"),
    [((32, 32), False), ((32, 64), False), ((32, 16), True), ((32, 32, 48), True)],
    ids=str,
)
def test_states_that_a_hit_may_end_between_are_refused(
    tokens: tuple[int, ...], is_refused: bool
) -> None:
    kept = [(tokens[0], State()), *((other, Full()) for other in tokens[1:])]
    if is_refused:
        with pytest.raises(UnsupportedError, match=r"every 32 tokens .*blocks of (16|48) "):
            ask(*kept)
    else:
        ask(*kept)
    ask((tokens[0], State("none")), *kept[1:])  # one of them has the whole of every prompt


@pytest.mark.parametrize(
    ("row", "block", "is_refused"),
    [(4, 64, False), (4, 6, True), (1, 6, False), (0.5, 7, False)],
    ids=str,
)
def test_rows_that_a_hit_may_end_within_are_refused(
    row: float, block: int, is_refused: bool
) -> None:
    kept = ((64, Full(row)), (block, Full()))
    ask(*kept)  # what is not finished is stored as well
    if is_refused:
        with pytest.raises(UnsupportedError, match=r"one row for 4 tokens, and layer\.1 .* 6:"):
            ask(*kept, others=(Ring(),))
    else:
        ask(*kept, others=(Ring(),))


def test_an_engine_keeps_states_if_a_layer_of_its_groups_does() -> None:
    engine = dataclasses.replace(FACTS, groups=((16, ("layer.0",)), (16, ("layer.1",))))
    both = kept_by(layer_of(Full()), layer_of(State()))
    assert compat.states_are_kept(engine, both)
    none = kept_by(layer_of(Full()), layer_of(State("none")))
    assert not compat.states_are_kept(engine, none)
