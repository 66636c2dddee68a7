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
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["BLOCK_TOKENS", "KV_NBYTES_PER_BLOCK", "VOCABULARY", "write_model"]

VOCABULARY = 512
HIDDEN = 256
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD = 64
INNER = 512
POSITIONS = 4096

BLOCK_TOKENS = 32
"""Tokens of one block; the CPU attention of vLLM wants multiples of 32."""

KV_NBYTES_PER_BLOCK = BLOCK_TOKENS * LAYERS * 2 * KV_HEADS * HEAD * 4
"""Bytes of KV of one block, all layers and ranks."""

QUERY_KEY_GAIN = 1.6
ATTENTION_GAIN = 3.0


def write_model(directory: Path, *, seed: int = 0) -> None:
    """Write ``config.json`` and ``model.safetensors``; equal seeds give equal files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(architecture(), indent=1))
    save_file(random_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})


def architecture() -> dict[str, object]:
    """Return what ``config.json`` says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
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


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Draw the weights, each matrix scaled to keep the variance of what it is applied to."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(gain / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        block = {
            "self_attn.q_proj": matrix(HEADS * HEAD, HIDDEN, QUERY_KEY_GAIN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD, HIDDEN, QUERY_KEY_GAIN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD, HIDDEN, ATTENTION_GAIN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": matrix(INNER, HIDDEN),
            "mlp.up_proj": matrix(INNER, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INNER),
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": block[name] for name in block}
    return weights
