"""An engine that runs its model otherwise finds nothing of what was stored before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.demo.model import architecture, write_model
from tests.demo.runner import run_engine
from tests.integration.harness import Reference, Site

SHORT, LONG = 1024, 2048
"""Longest contexts, of which LongRoPE has other position embeddings."""


def write_long_rope_model(directory: Path) -> None:
    """Write the small model as a Phi-3, whose keys depend on the longest context."""
    write_model(directory)
    factors = range(32)
    config = architecture() | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "max_position_embeddings": LONG,
        "original_max_position_embeddings": SHORT,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.02 * factor for factor in factors],
            "long_factor": [1 + 0.9 * factor for factor in factors],
        },
        "pad_token_id": 0,
    }
    del config["head_dim"]
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    for whole, parts in [
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ]:
        for name in [name for name in weights if parts[0] in name]:
            pieces = [weights.pop(name.replace(parts[0], part)) for part in parts]
            weights[name.replace(parts[0], whole)] = torch.cat(pieces)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_a_longer_context_finds_nothing_where_keys_depend_on_it(
    reference: Reference, site: Site
) -> None:
    model = site.directory / "phi"
    write_long_rope_model(model)
    wave = reference.conversations[0]
    wave = wave.model_copy(update={"prompts": wave.prompts[:8]})
    scenario = site.scenario((wave,), ram_blocks=48, nvme_blocks=512)
    file = site.directory / "kvtier.yaml"
    file.write_text(file.read_text().replace("kind: nvme", "kind: nvme\n  on_mismatch: remove"))
    scenario = scenario.model_copy(update={"model": model, "context_tokens": LONG})
    plain = run_engine(
        scenario.model_copy(update={"config": None}), site.directory, "plain"
    ).tokens()
    before = scenario.model_copy(update={"context_tokens": SHORT})
    assert run_engine(before, site.directory, "short").tokens() != plain
    report = run_engine(scenario, site.directory, "long")
    assert report.tokens() == plain
    assert report.count("kvtier_hit_tokens", tier="nvme") == 0
    report = run_engine(scenario, site.directory, "again")
    assert report.tokens() == plain
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
