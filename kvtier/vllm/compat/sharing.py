"""Engines in which no request can use what another one computed.

vLLM turns its own prefix caching off for most of them, or spares itself what it needs for it,
and asks connectors all the same.
"""

from __future__ import annotations

from typing import Any

from kvtier.errors import UnsupportedError

__all__ = ["layer_kinds", "require_shareable_kv"]


def require_shareable_kv(config: Any) -> None:  # noqa: ANN401 - vLLM's
    """Refuse an engine whose chunks would be wrong, or of no use, for other requests.

    Args:
        config: vLLM's configuration, once the model is built.

    Raises:
        UnsupportedError: It is one; says why, and what to do.
        AttributeError: It has not what every release has.
    """
    kinds = layer_kinds(config).values()
    if any(getattr(kind, "non_causal", False) or _forgets_answers(kind) for kind in kinds):
        raise UnsupportedError(
            "this model's keys and values depend on more than the tokens before them, so no "
            "other request can use them: vLLM has no prefix caching for it either; start vLLM "
            "without kvtier"
        )
    if getattr(config.model_config, "is_diffusion", False):
        raise UnsupportedError(
            "this model writes its answers by diffusion: while it does, their keys and values "
            "follow from tokens that are replaced, and those of a read-only request are never "
            "computed again from what it answered; start vLLM without kvtier"
        )
    if _needs_whole_prompts(config.model_config):
        raise UnsupportedError(
            "this pooling model needs all tokens of a prompt to be computed, so nothing of it "
            "can be loaded: vLLM has no prefix caching for it either, and its engine ends when "
            "a connector loads a prefix; start vLLM without kvtier"
        )
    if _counts_media(config):
        raise UnsupportedError(
            "with --mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM does not name "
            "images and other media by their content, and one would be served the KV of "
            "another; remove one of the two, or say --language-model-only"
        )


def layer_kinds(config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return what each layer keeps, by its name; None for one that uses what another keeps.

    Args:
        config: vLLM's configuration, once the model is built.

    Raises:
        AttributeError: It has not what every release has.
    """
    layers = config.compilation_config.static_forward_context
    return {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers.items()
        if hasattr(layer, "get_kv_cache_spec")
    }


def _forgets_answers(kind: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether a token sees less of what came before if it was generated."""
    return hasattr(kind, "rswa_window")


def _needs_whole_prompts(model: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether a pooling model makes its answer of more than the last token."""
    pools = getattr(model, "runner_type", None) == "pooling"
    return pools and not getattr(model, "is_prefix_caching_supported", True)


def _counts_media(config: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether media are named by when they came.

    Without both of its caches vLLM spares itself the hashing and counts media from its start
    on: the fifth image of an engine has the name of the fifth that the one before it saw.
    """
    media = getattr(config.model_config, "multimodal_config", None)
    return (
        getattr(media, "mm_processor_cache_gb", None) == 0
        and not getattr(media, "language_model_only", False)
        and not getattr(config.cache_config, "enable_prefix_caching", True)
    )
