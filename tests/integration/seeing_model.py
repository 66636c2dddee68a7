"""A small model that sees: the demo's Llama behind a random encoder of images, as Idefics 3.

Nothing is fetched: words are numbers, and the image processor needs PIL and numpy only. What
the model makes of a patch has the variance of a word's embedding, so that answers depend on an
image as they do on words.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from tests.demo.model import TINY, VOCABULARY, architecture, random_weights

SPECIAL = (
    "<unk>",
    "<image>",
    "<global-img>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
)
WORDS = VOCABULARY - len(SPECIAL)
IMAGE = WORDS + SPECIAL.index("<image>")
"""The token that stands for an image in a prompt."""
PIXELS = 56
"""Of an image's longer side, as the model sees it."""
PATCH = 7
PATCHES = (PIXELS // PATCH) ** 2
"""Tokens an image becomes, besides three around them: two blocks."""
WIDTH = 128
GAIN = 1.5
"""Of the projection, so that what comes out has a variance near one."""


def write_seeing_model(directory: Path) -> None:
    """Write the model, its tokenizer and its image processor."""
    directory.mkdir(parents=True)
    vision: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIXELS,
        "patch_size": PATCH,
    }
    settings = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": IMAGE,
        "pad_token_id": 0,
        "scale_factor": 1,
        "text_config": architecture(),
        "vision_config": vision | {"model_type": "idefics3_vision"},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    write_json(directory / "config.json", settings)
    weights = seeing_weights(Idefics3VisionTransformer(Idefics3VisionConfig(**vision)))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    write_image_processor(directory)


def seeing_weights(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Draw the weights of every matrix; norms and biases stay what they are."""
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / math.sqrt(math.prod(shape[1:]))

    text = {
        name.replace("model.", "model.text_model.", 1): weight
        for name, weight in random_weights(TINY).items()
    }
    vision = {
        f"model.vision_model.{name}": drawn(*weight.shape) if weight.dim() > 1 else weight
        for name, weight in encoder.state_dict().items()
    }
    projection = "model.connector.modality_projection.proj.weight"
    return text | vision | {projection: GAIN * drawn(TINY.hidden, WIDTH)}


def write_tokenizer(directory: Path) -> None:
    names = [f"w{number}" for number in range(WORDS)] + [*SPECIAL]
    numbers = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    write_json(directory / "tokenizer_config.json", settings)


def write_image_processor(directory: Path) -> None:
    settings = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": PIXELS},
        "max_image_size": {"longest_edge": PIXELS},
        "do_image_splitting": False,
    }
    write_json(directory / "preprocessor_config.json", settings)
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": PATCHES}
    write_json(directory / "processor_config.json", settings)


def write_image(file: Path, seed: int) -> Path:
    """Write an image of large random squares."""
    random = np.random.default_rng(seed)
    squares = random.integers(0, 256, (PATCH, PATCH, 3), dtype=np.uint8)
    side = 2 * PIXELS
    Image.fromarray(squares).resize((side, side), Image.Resampling.NEAREST).save(file)
    return file


def write_json(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings))
