"""A small Llama with weights that make wrong KV visible.

vLLM can make up weights by itself, but draws them so small that every attention head averages
over the whole context: one could swap blocks of KV and hardly change a logit, so a test that
compares tokens could not fail. Here queries and keys have a scale at which a head attends to
few positions and the residual stream is mostly what attention read. Greedy decoding then turns
a wrong block into other tokens, while the rounding of another batch size does not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

__all__ = [
    "BLOCK_TOKENS",
    "KV_NBYTES_PER_BLOCK",
    "TINY",
    "VOCABULARY",
    "ModelShape",
    "architecture",
    "write_model",
]

VOCABULARY = 512
HEAD = 64
POSITIONS = 4096

BLOCK_TOKENS = 32
"""Tokens of one block; the CPU attention of vLLM wants multiples of 32."""

QUERY_KEY_GAIN = 1.6
ATTENTION_GAIN = 3.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How large a model is.

    Attributes:
        hidden: Width of the residual stream.
        layers: Layers.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        inner: Width within an MLP.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def kv_nbytes_per_block(self) -> int:
        """Bytes of KV of one block, all layers and ranks."""
        return BLOCK_TOKENS * self.layers * 2 * self.kv_heads * HEAD * 4


TINY: Final = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, inner=512)
"""Large enough to notice wrong KV, and a step of it takes milliseconds."""

KV_NBYTES_PER_BLOCK: Final = TINY.kv_nbytes_per_block
"""Bytes of KV of one block of the tiny model."""


def write_model(directory: Path, *, shape: ModelShape = TINY) -> None:
    """Write ``config.json`` and ``model.safetensors``; equal shapes give equal files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(architecture(shape), indent=1))
    weights = random_weights(shape)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def architecture(shape: ModelShape = TINY) -> dict[str, object]:
    """Return what ``config.json`` says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def random_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Draw the weights, each matrix scaled to keep the variance of what it is applied to."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(gain / math.sqrt(columns))

    hidden, inner = shape.hidden, shape.inner
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=random),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    for layer in range(shape.layers):
        block = {
            "self_attn.q_proj": matrix(shape.heads * HEAD, hidden, QUERY_KEY_GAIN),
            "self_attn.k_proj": matrix(shape.kv_heads * HEAD, hidden, QUERY_KEY_GAIN),
            "self_attn.v_proj": matrix(shape.kv_heads * HEAD, hidden, ATTENTION_GAIN),
            "self_attn.o_proj": matrix(hidden, shape.heads * HEAD),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": block[name] for name in block}
    return weights
