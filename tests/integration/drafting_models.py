"""What guesses the tokens of a small model: layers of its own, or a smaller model.

Their weights are random, but the model knows few words and so do they: chance alone makes some
guesses right, and most are rejected. What is asked of kvtier is that KV of what was rejected
never becomes a token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.demo.model import HEAD, TINY, ModelShape, architecture, random_weights

DRAFT = ModelShape(
    hidden=TINY.hidden, layers=1, heads=TINY.heads, kv_heads=TINY.kv_heads, inner=TINY.inner
)
KNOWN_WORDS = 4
SEEN_LAYERS = (1, 2, 3)


def few_words(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave the head a few rows only: the others' logits are zero, hardly ever the largest."""
    weights["lm_head.weight"][KNOWN_WORDS:] = 0
    return weights


def write_terse_model(directory: Path) -> None:
    """Write the demo's model, knowing few words."""
    write(directory, few_words(random_weights(TINY)), architecture())


def write_eagle_layer(directory: Path) -> None:
    """Write one layer behind the model's last, as EAGLE's; words and head are the model's."""
    weights = {
        name.removeprefix("model."): weight
        for name, weight in random_weights(DRAFT).items()
        if "layers" in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = joining(2)
    write(directory, weights, architecture(DRAFT))


def write_eagle3_layer(directory: Path) -> None:
    """Write one layer that reads three of the model's, as EAGLE 3's; the head is its own."""
    drawn = few_words(random_weights(DRAFT))
    weights = {
        name.replace("model.layers.0.", "midlayer."): joining(2, weight.shape[0])
        if name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"}
        else weight
        for name, weight in drawn.items()
        if "layers" in name
    }
    weights |= {
        "midlayer.hidden_norm.weight": torch.ones(TINY.hidden),
        "norm.weight": torch.ones(TINY.hidden),
        "lm_head.weight": drawn["lm_head.weight"],
        "fc.weight": joining(len(SEEN_LAYERS)),
    }
    seen = {"eagle_aux_hidden_state_layer_ids": SEEN_LAYERS}
    write(directory, weights, architecture(DRAFT) | seen)


def write_predicting_model(directory: Path) -> None:
    """Write a model with a layer that predicts a second token (MTP), as MiMo's."""
    weights = few_words(random_weights(TINY))
    for layer in range(TINY.layers):
        biases = {"q_proj": TINY.heads, "k_proj": TINY.kv_heads, "v_proj": TINY.kv_heads}
        for name, heads in biases.items():
            weights[f"model.layers.{layer}.self_attn.{name}.bias"] = torch.zeros(heads * HEAD)
    predicting = "model.mtp_layers.0"
    weights |= {
        name.replace("model.layers.0", predicting): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    weights |= {
        f"{predicting}.{name}.weight": torch.ones(TINY.hidden)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    weights[f"{predicting}.input_proj.weight"] = joining(2)
    settings = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # transformers does not know MiMo's, which adds nothing to it
        "num_nextn_predict_layers": 1,
    }
    write(directory, weights, architecture() | settings)


def write_draft_model(directory: Path) -> None:
    """Write a model of one layer."""
    write(directory, few_words(random_weights(DRAFT)), architecture(DRAFT))


def joining(streams: int, rows: int = TINY.hidden) -> torch.Tensor:
    """Draw what makes one vector of several of the model's width."""
    random = torch.Generator().manual_seed(rows + streams)
    columns = streams * TINY.hidden
    return torch.randn(rows, columns, generator=random).div_(math.sqrt(columns))


def write(
    directory: Path, weights: dict[str, torch.Tensor], settings: dict[str, object]
) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
