"""What layers may keep: only what was read in vLLM's source.

What a layer keeps, and when its blocks are given away, filled or left out, follows from the
class of its ``KVCacheSpec``. A platform, a plugin or a model may derive one of its own, with a
manager of its own: one that evicts tokens from the middle of a prompt, say, is full attention
by ``isinstance`` and keeps nothing that a chunk could be made of. So classes are compared, not
their parents, and any other is refused until somebody has read it.

Not taken although vLLM has them: ``RSWASpec`` and ``CrossAttentionSpec``, of which no request
can use what another one computed, and ``SinkFullAttentionSpec``, whose manager cannot be built
in the release that was read.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import UnsupportedError
from kvtier.vllm.compat.checks import Load
from kvtier.vllm.compat.sharing import layer_kinds

if TYPE_CHECKING:
    from kvtier.vllm.compat.engine import EngineFacts

__all__ = ["kept_by_layers", "require_known_groups", "require_known_layers", "states_are_kept"]

_INTERFACE: Final = "vllm.v1.kv_cache_interface"
_KNOWN: Final = (
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KpoolTailSpec",  # up to 0.31: a circular buffer of GLM-5-Next's
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "TQFullAttentionSpec",  # up to 0.27: TurboQuant's, whose pages are shorter
)
_OF_GROUPS: Final = ("HiSparseHotSpec", "HiSparseResidentSpec")
"""What vLLM makes groups of besides, which are neither stored nor loaded."""


def require_known_groups(
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Load = importlib.import_module,
) -> None:
    """Refuse an engine of whose KV cache groups one is of no known kind.

    Args:
        kv_cache_config: The engine's KV cache groups.
        load: Imports a module.

    Raises:
        UnsupportedError: One is not; says which.
    """
    known = _classes((*_KNOWN, *_OF_GROUPS), load)
    for group in kv_cache_config.kv_cache_groups:
        kind = group.kv_cache_spec
        each = getattr(kind, "kv_cache_specs", None)
        for own in each.values() if each else [kind]:
            _require_known(own, known, group.layer_names)


def kept_by_layers(config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return what each layer keeps that keeps anything of its own, by its name.

    Args:
        config: vLLM's configuration in a worker, which
            :func:`~kvtier.vllm.compat.engine.kv_content` took.
    """
    layers = config.compilation_config.static_forward_context
    return {
        name: _customized(layers[name], kind)
        for name, kind in layer_kinds(config).items()
        if kind is not None
    }


def require_known_layers(
    engine: EngineFacts, kept: Mapping[str, Any], *, load: Load = importlib.import_module
) -> None:
    """Refuse a worker's engine of whose layers one keeps what is of no known kind.

    Args:
        engine: The engine.
        kept: What :func:`kept_by_layers` returned.
        load: Imports a module.

    Raises:
        UnsupportedError: One does, or what it keeps is stored and of no use to other requests,
            or a hit may end where some of what it needs is not stored.
    """
    known = _classes(_KNOWN, load)
    for name, kind in kept.items():
        _require_known(kind, known, [name])
    _require_no_buffers(engine, kept)
    _require_states_at_ends(engine, kept)
    _require_whole_rows_at_ends(engine, kept)


def states_are_kept(engine: EngineFacts, kept: Mapping[str, Any]) -> bool:
    """Return whether layers of a worker's engine keep a state for each block.

    Args:
        engine: The engine.
        kept: What :func:`kept_by_layers` returned.
    """
    return any(_keeps_states(kept.get(name)) for _, names in engine.groups for name in names)


def _classes(names: Collection[str], load: Load) -> set[type[Any]]:
    module = load(_INTERFACE)
    found = (getattr(module, name, None) for name in names)
    return {each for each in found if each is not None}


def _require_known(
    kind: object, known: Collection[type[Any]], layer_names: Collection[str]
) -> None:
    own = type(kind)
    if own not in known:
        raise UnsupportedError(
            f"{next(iter(layer_names), 'a layer')} keeps {own.__module__}.{own.__qualname__}, "
            "which is no kind of KV cache that kvtier knows how to store; start vLLM without "
            "kvtier"
        )


def _keeps_states(kind: object) -> bool:
    return getattr(kind, "mamba_cache_mode", None) == "align"


def _customized(layer: Any, kind: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return what a layer keeps as its backend has it, which may make a class of its own."""
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    customize = getattr(backend, "customize_spec", None)
    is_attention = hasattr(kind, "num_kv_heads")
    return customize(kind) if customize is not None and is_attention else kind


def _require_no_buffers(engine: EngineFacts, kept: Mapping[str, Any]) -> None:
    """Refuse stored groups of buffers that a request writes over and over.

    What is in one does not follow from the tokens of a block. vLLM stores none since 0.31.
    """
    for _, names in engine.groups:
        for name in names:
            if not getattr(kept.get(name), "prefix_cacheable", True):
                raise UnsupportedError(
                    f"{name} keeps what is of use to its own request only, and this vLLM has "
                    "it stored: use vLLM 0.31 or later, or start vLLM without kvtier"
                )


def _require_states_at_ends(engine: EngineFacts, kept: Mapping[str, Any]) -> None:
    """Refuse states between two of which a hit may end.

    vLLM's half looks a state up by the block that a hit ends in. Where another group's blocks
    end in the middle of that one it would load the state of its end, which follows tokens that
    are computed once more.
    """
    for tokens, names in engine.groups:
        if not _keeps_states(kept.get(names[0])):
            continue
        for other_tokens, other_names in engine.groups:
            if other_tokens % tokens:
                raise UnsupportedError(
                    f"a state of this model follows every {tokens} tokens ({names[0]}), and "
                    f"other layers have blocks of {other_tokens} ({other_names[0]}): a hit "
                    "could end where there is no state; start vLLM without kvtier, or without "
                    "these layers if they are a draft model's"
                )


def _require_whole_rows_at_ends(engine: EngineFacts, kept: Mapping[str, Any]) -> None:
    """Refuse layers that keep one row for several tokens where a hit may end within a row.

    The tokens of an unfinished row are kept in a buffer that is not stored, which is no loss
    where a hit ends behind a whole one.
    """
    if all(getattr(kind, "prefix_cacheable", True) for kind in kept.values()):
        return
    rows = {getattr(kind, "tokens_per_state", 1) for kind in kept.values()}
    long_rows = sorted(row for row in rows if isinstance(row, int) and row > 1)
    for tokens, names in engine.groups:
        odd = [row for row in long_rows if tokens % row]
        if odd:
            raise UnsupportedError(
                f"layers of this model keep one row for {odd[0]} tokens, and {names[0]} has "
                f"blocks of {tokens}: a hit could end within a row; start vLLM without kvtier"
            )
