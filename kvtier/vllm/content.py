"""Digests of an engine's KV layout and KV settings, for the identity of stored bytes.

vLLM's block hashes name tokens, media and LoRA adapters. Keys and values also depend on
settings of the model, and their bytes depend on each layer's layout. An engine with other keys
or values must find an empty cache. For example, KV with another position embedding gives wrong
tokens, and checksums do not detect such KV. A setting that changes only the last digits
(kernels, graphs, ranks) or the sampling must not change the digests, so that the engine keeps
its warm cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from kvtier.config import variables
from kvtier.errors import UnsupportedError
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.refusals import refuse_worker
from kvtier.vllm.versions import supported

__all__ = ["kv_content", "kv_meaning"]

_IMMATERIAL: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "id2label",
        "label2id",
        "max_model_len",  # some models of vLLM write it into their configuration
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Names of settings in a model's configuration that do not change keys or values."""

_ROPES_OF_ANY_LENGTH: Final = frozenset(
    {
        None,
        "axial",  # within images, as the next two
        "rope_2d",
        "rope_3d",
        "bailing_mrope",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "dynamic",
        "linear",
        "llama3",
        "mllama4",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "xdrope",
        "yarn",
    }
)
"""Position embeddings that do not depend on ``--max-model-len``; LongRoPE does."""

_LENGTH_SWITCH: Final = "attn_temperature_tuning"
"""Llama 4's setting for long contexts, which a generation configuration may disable."""

_FITS_MEDIA: Final = frozenset(
    {
        "Dots3NoteForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    }
)
"""Models that shrink images or videos to fit the longest context."""

_ROUNDS_AGAIN: Final = frozenset({"flashinfer_moe_ep_cutedsl"})
"""Expert kernels for which vLLM rounds the weights again at load time."""

_VARIABLES: Final = re.compile(
    r"VLLM_(\w+_QUANT_CONFIG|MARLIN_INPUT_DTYPE|CPU_INT4_W4A8|B12X_MOE_FP4_FORCE_A16"
    r"|ROCM_USE_AITER_MOE_(SITUV2|A4W4_DSV4)|ROCM_QUICK_REDUCE_QUANTIZATION"
    r"|ROCM_USE_AITER_FP[48]BMM|FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"
    r"|ROCM_SHUFFLE_KV_CACHE_LAYOUT|MOE_ROUTING_SIMULATION_STRATEGY"
    r"|VIDEO_LOADER_BACKEND|MEDIA_CONNECTOR)"
)
"""Environment variables that change quantization, the order of a block's bytes, or a video's
frames.

These variables change neither the model's configuration nor vLLM's hashes of tokens and media.
"""

_SOURCES: Final = ("_dir", "_path", "_uri")
"""Endings of loader options that say where the weights are. Other options only change speed."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_DEPTH: Final = 32
"""Largest depth of nesting. A configuration with deeper nesting must contain itself."""


def kv_content(
    config: Any,  # noqa: ANN401 - vLLM's
    engine: EngineFacts,
    *,
    load: Callable[[str], Any] = importlib.import_module,
) -> str:
    """Return digests of the KV layout and the KV settings; refuse engines with unusable KV.

    A worker calls this when vLLM registers the KV memory. Two layers may have pages of the same
    size but different element types (``--kv-cache-dtype-skip-layers``), and two attention
    backends may arrange the same bytes differently. So each layer is listed with its settings.
    All ranks get the same result. The result depends on the number of ranks only if a layer has
    recurrent states.

    Args:
        config: vLLM's configuration in a worker, once the model is built.
        engine: The engine.
        load: Function that imports a module by its name.

    Returns:
        The element type and two digests: of the layers, and of :func:`kv_meaning`.

    Raises:
        UnsupportedError: vLLM does not describe its KV, or the engine is refused.
    """
    try:
        refuse_worker(config, engine)
        layers = config.compilation_config.static_forward_context
        names = [name for _, group in engine.groups for name in group]
        content = [_layer_content(name, layers[name], config, load=load) for name in names]
        digests = [_digest(json.dumps(content)), _digest(kv_meaning(config))]
        return " ".join([str(config.model_config.dtype), *digests])
    except (AttributeError, ImportError, KeyError) as error:
        raise UnsupportedError(
            f"this vLLM lacks a setting that describes its KV cache ({error!r}): {supported()}"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- bytes -------------------------------------------------------------------------------------


def _layer_content(
    name: str,
    layer: Any,  # noqa: ANN401 - vLLM's
    config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Callable[[str], Any],
) -> list[str]:
    """Return a layer's name, backend, element types, and settings that arrange its bytes.

    Layers that quantise have ``kv_cache_dtype``; caches of indexers have ``dtype``; layers with
    a recurrent state have a type and a shape for each part of the state. The shapes depend on
    the number of speculative tokens. Pages with different shapes may be padded to the same
    size. On a CPU the instruction set (``isa``) decides how bytes are arranged in a page.
    """
    states = getattr(layer, "get_state_dtype", None)
    types = [getattr(layer, "kv_cache_dtype", ""), getattr(layer, "dtype", "")]
    if states is not None:
        shapes = getattr(layer, "get_state_shape", tuple)
        utilities = load("vllm.model_executor.layers.mamba.mamba_utils")
        types += [*states(), str(utilities.get_conv_state_layout())]
        types += [[list(map(int, shape)) for shape in shapes()]]
    # On AMD's gfx94 the exponent of fp8 is off by one: the same bits are other numbers.
    if (
        str(types[0]).startswith("fp8")
        and load("vllm.platforms").current_platform.is_fp8_fnuz()
    ):
        types += ["fnuz"]
    order = [getattr(layer, "isa", ""), *_page_order(layer, config)]
    return [name, layer.get_attn_backend().get_name(), *map(str, [*types, *order])]


def _page_order(layer: Any, config: Any) -> list[object]:  # noqa: ANN401 - vLLM's
    """Return the settings that arrange the elements of a page in memory.

    An attention kernel may support only some block lengths. vLLM then divides a longer block
    into parts, each with all heads. The lengths depend on the GPU and on other settings. The
    arrangement of 4-bit scales also depends on the kernel that writes them.

    Returns:
        A list with up to three entries: the head size, if the layer has no ``kv_cache_dtype``;
        the number of rows of a kernel's block, if it differs from the layer's block; ``fa2``,
        if this kernel writes 4-bit scales.
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


# -- meaning -----------------------------------------------------------------------------------


def kv_meaning(config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Return the engine's settings that change keys and values, as JSON.

    All ranks, and all starts with the same settings, get the same result.

    Args:
        config: vLLM's configuration after the model is built, because models may complete it.

    Returns:
        Canonical JSON.

    Raises:
        AttributeError: The configuration lacks an attribute that every release has.
    """
    model = config.model_config
    architecture = _plain(model.hf_config)  # with --hf-overrides
    meaning = {
        "architecture": architecture,
        "class": model.architecture,  # --model-impl: may permute weights
        "class_overrides": model.model_class_overrides,
        "quantization": [
            model.quantization,
            model.quantization_config,
            *variables(_VARIABLES),
            *_rounding(config),
        ],
        "weights": _weights(model, config.load_config),
        "draft": _draft(model, config.speculative_config),
        "length": _length(model, architecture),
        "media": _media(model.multimodal_config),
    }
    return json.dumps(_plain(meaning), sort_keys=True)


def _rounding(config: Any) -> list[str]:  # noqa: ANN401 - vLLM's
    """Return a list with the MoE backend, or ``[]`` if it keeps the weights' rounding."""
    kernels = config.kernel_config.moe_backend
    return [kernels] if kernels in _ROUNDS_AGAIN else []


def _weights(model: Any, loading: Any) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return the settings that select weights, besides the model's name."""
    options = loading.model_loader_extra_config
    sources = (
        {name: value for name, value in options.items() if str(name).endswith(_SOURCES)}
        if isinstance(options, Mapping)
        else {}
    )
    return [
        model.revision or "",  # of a hub's model, from --revision
        "made up" if _plain(loading.load_format) == "dummy" else "",
        model.model_weights,  # in an object store
        sources,
    ]


def _media(media: Any) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return the engine's settings that affect the embeddings of images and other media.

    vLLM's hash of such a medium covers only the settings in the request.
    """
    processor = getattr(media, "mm_processor_kwargs", None) or {}
    return [
        {name: value for name, value in processor.items() if name != "device"},
        getattr(media, "media_io_kwargs", None) or {},
        getattr(media, "video_pruning_rate", None) or None,
        getattr(media, "video_pruning_method", None),
        getattr(media, "mm_encoder_attn_dtype", None),
        getattr(media, "mm_encoder_fp8_scale_path", None),
    ]


def _draft(model: Any, speculation: Any) -> str | None:  # noqa: ANN401 - vLLM's
    """Return the name of the draft model; None without a separate draft model."""
    draft = getattr(getattr(speculation, "draft_model_config", None), "model", None)
    return None if draft == model.model else draft


def _length(model: Any, architecture: object) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return the longest context and related settings if KV depends on them; else ``[]``.

    With ``--max-model-len auto`` the model is built for the length in its configuration.
    Afterwards vLLM reduces the length to fit the free memory, which differs at every start.
    """
    fitted = model.original_max_model_len == -1
    longest = -1 if fitted else model.max_model_len
    settings = list(_settings(architecture))
    length: list[Any] = []
    if any(
        name == "rope_type" and value not in _ROPES_OF_ANY_LENGTH for name, value in settings
    ):
        length = [longest]
    if any(name == _LENGTH_SWITCH for name, _ in settings):
        overrides = model.override_generation_config or {}
        length = [longest, model.generation_config, overrides.get(_LENGTH_SWITCH)]
    if model.architecture in _FITS_MEDIA:
        length = [*length, model.max_model_len]  # after the cut: media are fitted to it
    return length


def _settings(value: object) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each scalar setting in a nested configuration."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from [(name, inner)] if not isinstance(inner, dict | list) else ()
            yield from _settings(inner)
            if str(name).startswith("rope_") and isinstance(inner, dict):
                yield "rope_type", str(inner.get("type", "default"))  # its older name
    elif isinstance(value, list):
        for inner in value:
            yield from _settings(inner)


def _plain(value: Any, depth: int = _DEPTH) -> Any:  # noqa: ANN401 - anything
    """Return ``value`` as JSON types; convert other types to text."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not depth:
        return type(value).__qualname__
    parts = _parts(value)
    if isinstance(parts, Mapping):
        return {
            str(name): _plain(inner, depth - 1)
            for name, inner in parts.items()
            if name not in _IMMATERIAL
        }
    if parts is None:
        return _text(value)
    plain = [_plain(inner, depth - 1) for inner in parts]
    if isinstance(parts, set | frozenset):  # their order changes
        plain.sort(key=lambda inner: json.dumps(inner, sort_keys=True))
    return plain


def _parts(value: Any) -> Mapping[Any, Any] | Iterable[Any] | None:  # noqa: ANN401 - anything
    """Return the items of a container or the fields of a configuration, else None."""
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return value
    if isinstance(value, type):
        return None
    if hasattr(value, "to_dict"):
        try:
            parts = value.to_dict()
        except Exception:  # noqa: BLE001 - a checkpoint's own code
            parts = getattr(value, "__dict__", None)
        return parts if isinstance(parts, Mapping) else None
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name, None) for name in names}
    return None


def _text(value: object) -> str:
    """Return the ``repr`` of a value without its memory address."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # noqa: BLE001 - as above
        return type(value).__qualname__
