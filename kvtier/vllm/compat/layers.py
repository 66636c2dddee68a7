"""What the bytes of one layer follow from, and what a layer does to them by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["layer_content"]


def layer_content(
    name: str,
    layer: Any,  # noqa: ANN401 - vLLM's
    config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Callable[[str], Any] = importlib.import_module,
) -> list[str]:
    """Return a layer's name, its backend, the element types it is known to have, their order.

    Layers that quantise have ``kv_cache_dtype``; caches of indexers ``dtype``, and as many
    bytes of it as another element type behind it takes; and layers with a state in place of
    keys and values one type, and one shape, for each part of it. The shapes follow from the
    number of tokens that are guessed, and a page that is padded has room for several: without
    them states are cut elsewhere. On a CPU the instructions that the processor has decide how a
    page is ordered, an environment variable how the state of a convolution is, and wherever
    kernels have shorter blocks than vLLM their length.

    Args:
        name: What the layer is called.
        layer: The layer, once it has its KV memory.
        config: vLLM's configuration.
        load: Imports a module.
    """
    states = getattr(layer, "get_state_dtype", None)
    types = [getattr(layer, "kv_cache_dtype", ""), getattr(layer, "dtype", "")]
    if states is not None:
        types += [*states(), _convolution_layout(load), _state_shapes(layer)]
    if str(types[0]).startswith("fp8"):
        types += _kind_of_fp8(load)
    order = [getattr(layer, "isa", ""), *_of_pages(layer, config)]
    return [name, layer.get_attn_backend().get_name(), *map(str, [*types, *order])]


def _kind_of_fp8(load: Callable[[str], Any]) -> list[str]:
    """Return what 8 bits stand for where that is not what most devices take them for.

    AMD's gfx94 has an exponent that is off by one: the same bits are half the number, and what
    is no number elsewhere is one there.
    """
    platform = load("vllm.platforms").current_platform
    return ["fnuz"] if platform.is_fp8_fnuz() else []


def _convolution_layout(load: Callable[[str], Any]) -> str:
    """Return how the state of a convolution is laid out; nothing where there is one way."""
    utilities = load("vllm.model_executor.layers.mamba.mamba_utils")
    layout = getattr(utilities, "get_conv_state_layout", str)
    return str(layout())


def _state_shapes(layer: Any) -> list[list[int]]:  # noqa: ANN401 - vLLM's
    """Return how long each part of a state is, in this rank; nothing where it is not said."""
    shapes = getattr(layer, "get_state_shape", tuple)
    return [list(map(int, shape)) for shape in shapes()]


def _of_pages(layer: Any, config: Any) -> list[object]:  # noqa: ANN401 - vLLM's
    """Return what else the order of a page follows from, where it does.

    Kernels that take blocks of some lengths only get longer ones in parts, of which each has
    all heads. Which lengths they take depends on the GPU and on other settings, and so does who
    writes the scales of 4 bits.

    Returns:
        Elements of a token, for a layer that has no ``kv_cache_dtype``; the rows of a kernel's
        block, where they are others than the layer asked for; and another writer's name.
    """
    kind = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
    found: list[object] = []
    if not hasattr(layer, "kv_cache_dtype"):
        found += [getattr(kind, "head_size", "")]
    rows = getattr(kind, "num_states", None)
    cache: Any = getattr(layer, "kv_cache", None)
    if rows is not None and getattr(cache, "ndim", 0) > 2 and cache.shape[-2] != rows:
        found += [int(cache.shape[-2])]
    if getattr(getattr(layer, "impl", None), "nvfp4_fa2", False):
        found += ["fa2"]
    return found
