"""What gives a model's KV its meaning besides the weights' names and the tokens.

vLLM's block hashes name tokens, media and LoRA adapters. What an engine makes of them depends
on settings too, and one of these must find an empty store where it changes keys or values:
another position embedding is wrong tokens, and no checksum finds it. A setting that changes
the last digits only (kernels, graphs, ranks), or what is sampled, must not: every such flag
would cost a warm cache.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from kvtier.config import environment

__all__ = ["kv_meaning"]

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
"""Names within a model's configuration that no key or value depends on."""

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
"""Position embeddings that are the same for every ``--max-model-len``, unlike LongRoPE."""

_LENGTH_SWITCH: Final = "attn_temperature_tuning"
"""Llama 4's; on unless the generation's configuration says otherwise, for long contexts."""

_FITS_MEDIA: Final = frozenset(
    {
        "Dots3NoteForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    }
)
"""Models whose images or videos are made as small as the longest context asks for."""

_ROUNDS_AGAIN: Final = frozenset({"flashinfer_moe_ep_cutedsl"})
"""Kernels of experts that round a checkpoint's weights otherwise when they are loaded."""

_SOURCES: Final = ("_dir", "_path", "_uri")
"""How the options of a loader end that say where weights are; others say how fast."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_DEPTH: Final = 32
"""Configurations nest a few levels; deeper is one that contains itself."""


def kv_meaning(config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Return what keys and values depend on besides weights, tokens, media and adapters.

    The same in every rank, and at every start with the same settings.

    Args:
        config: vLLM's configuration, once the model is built: some models complete theirs.

    Returns:
        Canonical JSON.

    Raises:
        AttributeError: It has not what every release has.
    """
    model = config.model_config
    architecture = _plain(model.hf_config)  # with --hf-overrides
    meaning = {
        "architecture": architecture,
        "class": getattr(model, "architecture", None),  # --model-impl: may permute weights
        "class_overrides": getattr(model, "model_class_overrides", None),
        "quantization": [
            model.quantization,
            getattr(model, "quantization_config", None),
            *environment().kv,
            *_rounding(config),
        ],
        "weights": _weights(model, config.load_config),
        "draft": _draft(model, getattr(config, "speculative_config", None)),
        "length": _length(model, architecture),
        "media": _media(getattr(model, "multimodal_config", None)),
    }
    return json.dumps(_plain(meaning), sort_keys=True)


def _rounding(config: Any) -> list[str]:  # noqa: ANN401 - vLLM's
    """Return the name of the kernels of experts if their weights are others."""
    kernels = getattr(getattr(config, "kernel_config", None), "moe_backend", None)
    return [kernels] if kernels in _ROUNDS_AGAIN else []


def _weights(model: Any, loading: Any) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return where weights come from, besides what the model is called."""
    options = getattr(loading, "model_loader_extra_config", None)
    sources = (
        {name: value for name, value in options.items() if str(name).endswith(_SOURCES)}
        if isinstance(options, Mapping)
        else {}
    )
    return [
        getattr(model, "revision", None) or "",  # of a hub's model, as --revision says it
        "made up" if _plain(loading.load_format) == "dummy" else "",
        getattr(model, "model_weights", ""),  # in an object store
        sources,
    ]


def _media(media: Any) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return how media become embeddings.

    vLLM's hash of a medium has what its request says of this, and not what the engine does.
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
    """Return the name of the model that layers of its own draft with, if it is another one."""
    draft = getattr(getattr(speculation, "draft_model_config", None), "model", None)
    return None if draft == model.model else draft


def _length(model: Any, architecture: object) -> list[Any]:  # noqa: ANN401 - vLLM's
    """Return the longest context where keys depend on it, and what else has a say there.

    With ``--max-model-len auto`` the model is built for what its configuration says, and the
    context is cut afterwards to what fits into memory, which is another length at every start.
    """
    fitted = getattr(model, "original_max_model_len", None) == -1
    longest = -1 if fitted else model.max_model_len
    settings = list(_settings(architecture))
    length: list[Any] = []
    if any(
        name == "rope_type" and value not in _ROPES_OF_ANY_LENGTH for name, value in settings
    ):
        length = [longest]
    if any(name == _LENGTH_SWITCH for name, _ in settings):
        overrides = getattr(model, "override_generation_config", None) or {}
        length = [
            longest,
            getattr(model, "generation_config", None),
            overrides.get(_LENGTH_SWITCH),
        ]
    if getattr(model, "architecture", None) in _FITS_MEDIA:
        length = [*length, model.max_model_len]  # as it was cut: media are fitted afterwards
    return length


def _settings(value: object) -> Iterator[tuple[str, object]]:
    """Yield every name and value in a plain configuration that is no mapping or list itself."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from [(name, inner)] if not isinstance(inner, dict | list) else ()
            yield from _settings(inner)
            if str(name).startswith("rope_") and isinstance(inner, dict):
                yield "rope_type", str(inner.get("type", "default"))  # as older ones call it
    elif isinstance(value, list):
        for inner in value:
            yield from _settings(inner)


def _plain(value: Any, depth: int = _DEPTH) -> Any:  # noqa: ANN401 - anything
    """Return ``value`` as JSON has it; of what JSON does not have, a text that stays."""
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
    if isinstance(parts, set | frozenset):  # in no order that stays
        plain.sort(key=lambda inner: json.dumps(inner, sort_keys=True))
    return plain


def _parts(value: Any) -> Mapping[Any, Any] | Iterable[Any] | None:  # noqa: ANN401 - anything
    """Return what a container or a configuration consists of; None if ``value`` is neither."""
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return value
    if isinstance(value, type):
        return None
    if hasattr(value, "to_dict"):
        try:
            parts = value.to_dict()
        except Exception:  # noqa: BLE001 - a checkpoint's own code, which nobody else calls
            parts = getattr(value, "__dict__", None)
        return parts if isinstance(parts, Mapping) else None
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name, None) for name in names}
    return None


def _text(value: object) -> str:
    """Return how ``value`` calls itself, without where it lies in this process."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # noqa: BLE001 - as above
        return type(value).__qualname__
