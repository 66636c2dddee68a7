"""Small models and adapters of other kinds than the demo's, their weights as telling as its."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.demo.model import HEAD, VOCABULARY, architecture

HIDDEN = 256
INNER = 512
HEADS = 4
KV_HEADS = 2
LATENT, ROTARY, UNROTATED, VALUE = 512, 64, 128, 128
"""Of latent attention: what vLLM's kernels for the CPU are built for."""
LATENT_LAYERS = 3
RECURRENT_LAYERS = ("conv", "full_attention", "conv", "full_attention")
KERNEL = 4
ADAPTER_RANK = 8

Matrix = Callable[..., torch.Tensor]
Weights = dict[str, torch.Tensor]


def write_latent_model(directory: Path) -> None:
    """Write a dense model with latent attention (MLA), as DeepSeek V2's."""
    other = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": LATENT_LAYERS,
        "num_key_value_heads": HEADS,
        "first_k_dense_replace": LATENT_LAYERS,  # so no layer has experts
        "moe_intermediate_size": INNER,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROTARY,
        "qk_nope_head_dim": UNROTATED,
        "v_head_dim": VALUE,
    }
    matrix = drawing()
    weights = ends(matrix, norm="model.norm") | {"lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LATENT_LAYERS):
        weights |= named(
            layer,
            {
                "self_attn.q_proj": matrix(HEADS * (UNROTATED + ROTARY), HIDDEN, 1.6),
                "self_attn.kv_a_proj_with_mqa": matrix(LATENT + ROTARY, HIDDEN, 1.6),
                "self_attn.kv_a_layernorm": torch.ones(LATENT),
                "self_attn.kv_b_proj": matrix(HEADS * (UNROTATED + VALUE), LATENT, 2.2),
                "self_attn.o_proj": matrix(HIDDEN, HEADS * VALUE, 1.5),
                "mlp.gate_proj": matrix(INNER, HIDDEN),
                "mlp.up_proj": matrix(INNER, HIDDEN),
                "mlp.down_proj": matrix(HIDDEN, INNER),
                "input_layernorm": torch.ones(HIDDEN),
                "post_attention_layernorm": torch.ones(HIDDEN),
            },
        )
    write(directory, other, weights)


def write_recurrent_model(directory: Path) -> None:
    """Write a hybrid whose other layers are short convolutions with a state, as LFM2's."""
    other = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "num_hidden_layers": len(RECURRENT_LAYERS),
        "layer_types": RECURRENT_LAYERS,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 1,
        "conv_L_cache": KERNEL,
        "norm_eps": 1e-5,
        "tie_embedding": True,
        "tie_word_embeddings": True,
    }
    matrix = drawing()
    weights = ends(matrix, norm="model.embedding_norm")
    for layer, kind in enumerate(RECURRENT_LAYERS):
        block = {
            "feed_forward.w1": matrix(INNER, HIDDEN),
            "feed_forward.w3": matrix(INNER, HIDDEN),
            "feed_forward.w2": matrix(HIDDEN, INNER),
            "operator_norm": torch.ones(HIDDEN),
            "ffn_norm": torch.ones(HIDDEN),
        }
        if kind == "conv":
            block |= {
                "conv.in_proj": matrix(3 * HIDDEN, HIDDEN, 1.5),
                "conv.conv": matrix(HIDDEN, KERNEL, 1.4).unsqueeze(1),
                "conv.out_proj": matrix(HIDDEN, HIDDEN, 2.0),
            }
        else:
            block |= {
                "self_attn.q_proj": matrix(HEADS * HEAD, HIDDEN),
                "self_attn.k_proj": matrix(KV_HEADS * HEAD, HIDDEN),
                "self_attn.v_proj": matrix(KV_HEADS * HEAD, HIDDEN, 6.0),
                "self_attn.out_proj": matrix(HIDDEN, HEADS * HEAD),
                "self_attn.q_layernorm": torch.full((HEAD,), 1.6),
                "self_attn.k_layernorm": torch.full((HEAD,), 1.6),
            }
        weights |= named(layer, block)
    write(directory, other, weights)


def write_adapter(directory: Path, seed: int) -> None:
    """Write a LoRA adapter of the demo's model that changes its keys and values much."""
    directory.mkdir(parents=True)
    widths = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}
    matrix = drawing(seed)
    weights = {}
    for layer in range(4):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = matrix(ADAPTER_RANK, HIDDEN)
            weights[f"{prefix}.lora_B.weight"] = matrix(width, ADAPTER_RANK, 2.0)
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "bias": "none",
        "target_modules": [*widths],
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def drawing(seed: int = 0) -> Matrix:
    """Return what draws matrices that keep the variance of what they are applied to."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(gain / math.sqrt(columns))

    return matrix


def ends(matrix: Matrix, *, norm: str) -> Weights:
    """Return the embeddings, of variance one, and the last norm."""
    embeddings = matrix(VOCABULARY, HIDDEN, math.sqrt(HIDDEN))
    return {"model.embed_tokens.weight": embeddings, f"{norm}.weight": torch.ones(HIDDEN)}


def named(layer: int, block: Weights) -> Weights:
    return {f"model.layers.{layer}.{name}.weight": block[name] for name in block}


def write(directory: Path, other: Mapping[str, object], weights: Weights) -> None:
    directory.mkdir(parents=True)
    settings = {name: value for name, value in architecture().items() if name != "head_dim"}
    (directory / "config.json").write_text(json.dumps(settings | {**other}))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
