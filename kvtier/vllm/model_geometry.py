"""Bytes of KV cache per token of a model, from its ``config.json``.

There are three kinds of attention. With *multi-head* attention (MHA) every query head has a key
and a value head. With *grouped-query* attention (GQA, and MQA with a single group) several
query heads share a key and a value head. With *multi-head latent* attention (MLA) all heads
share one compressed latent and one rotary key, and there is no separate value.

Tensor parallelism divides the KV heads between ranks. If there are more ranks than heads, and
always with MLA, several ranks have copies of the same bytes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.printable import printable

__all__ = ["Attention", "KvDtype", "ModelGeometry", "read_model_geometry"]

_NESTED: Final = ("text_config", "language_config", "llm_config")
_FULL_KV: Final = frozenset({"full_attention", "attention", "sliding_attention"})


class Attention(enum.Enum):
    """How the model's heads share keys and values."""

    MHA = "MHA"
    GQA = "GQA"
    MLA = "MLA"


class KvDtype(enum.StrEnum):
    """Element type of the KV cache, named as in vLLM."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FP8 = "fp8"


_ELEMENT_NBYTES: Final[Mapping[KvDtype, int]] = {
    KvDtype.FLOAT16: 2,
    KvDtype.BFLOAT16: 2,
    KvDtype.FLOAT32: 4,
    KvDtype.FP8: 1,
}


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Values that determine the size of a model's KV cache.

    Attributes:
        model: The model's type, as ``config.json`` names it.
        attention: How heads share keys and values.
        layers: Number of layers that keep KV for every token.
        query_heads: Number of attention heads.
        kv_heads: Number of key-value heads; 1 for MLA, in which all heads share the latent.
        head_elements: Number of elements per token, layer and KV head: key plus value, or the
            latent.
        dtype: Element type that vLLM's ``auto`` chooses for this model.
        notes: Sentences about layers that the numbers exclude.
    """

    model: str
    attention: Attention
    layers: int
    query_heads: int
    kv_heads: int
    head_elements: int
    dtype: KvDtype
    notes: tuple[str, ...] = ()

    def token_nbytes(self, dtype: KvDtype = KvDtype.AUTO) -> int:
        """Return the bytes of one token's KV, counted once for all ranks."""
        return self.layers * self.kv_heads * self.head_elements * self.element_nbytes(dtype)

    def rank_token_nbytes(self, tp: int, dtype: KvDtype = KvDtype.AUTO) -> int:
        """Return the bytes of one token's KV in each rank, if there are ``tp`` ranks.

        Raises:
            ConfigError: The heads cannot be divided between so many ranks.
        """
        return self.token_nbytes(dtype) * self.copies(tp) // tp

    def copies(self, tp: int) -> int:
        """Return how many of ``tp`` ranks have a copy of the same KV.

        Raises:
            ConfigError: The heads cannot be divided between so many ranks.
        """
        if self.query_heads % tp:
            problem = f"{self.query_heads} attention heads cannot be split over {tp} ranks"
            raise ConfigError(f"--tp {tp}: {problem}; use a divisor of {self.query_heads}")
        if self.attention is Attention.MLA:
            return tp
        if max(tp, self.kv_heads) % min(tp, self.kv_heads):
            problem = (
                f"{self.kv_heads} KV heads can be neither split over nor copied to {tp} ranks"
            )
            raise ConfigError(
                f"--tp {tp}: {problem}; use a divisor or multiple of {self.kv_heads}"
            )
        return max(1, tp // self.kv_heads)

    def element_nbytes(self, dtype: KvDtype) -> int:
        """Return the size of one element in bytes."""
        return _ELEMENT_NBYTES[self.dtype if dtype is KvDtype.AUTO else dtype]


def read_model_geometry(path: Path) -> ModelGeometry:
    """Read a model's geometry from its ``config.json``.

    Args:
        path: A Hugging Face model directory, or its ``config.json``.

    Raises:
        ConfigError: The file does not exist or does not describe a transformer.
    """
    file = path / "config.json" if _is_directory(path) else path
    source = printable(str(file))
    fields = _Fields(_read_json(file, source), source)
    for name in _NESTED:
        nested = fields.values.get(name)
        if isinstance(nested, dict):
            fields = _Fields({**fields.values, **nested}, source)
            break
    return _geometry(fields)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a ``config.json``, with errors that name the file."""

    values: dict[str, Any]
    source: str

    def count(self, *names: str) -> int:
        """Return the value of the first of ``names`` that is set; raise an error if none is."""
        value = self.optional(*names)
        if value is None:
            problem = f"{' or '.join(names)} is missing"
            remedy = "kvtier needs the config.json of a transformer language model"
            raise ConfigError(f"{self.source}: {problem}; {remedy}")
        return value

    def optional(self, *names: str) -> int | None:
        """Return the value of the first of ``names`` that is set; None if all are missing."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problem = f"{name} = {value!r}: not a positive whole number"
                raise ConfigError(f"{self.source}: {problem}; download the file again")
            return value
        return None


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # reading it reports the error
        return False


def _read_json(file: Path, source: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "give a directory that holds a model's config.json (kvtier downloads nothing)"
        raise ConfigError(f"{source}: no such file; {remedy}") from error
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}; download the file again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: not a JSON object; give a model's config.json")
    return values


def _geometry(fields: _Fields) -> ModelGeometry:
    query_heads = fields.count("num_attention_heads", "n_head")
    layers, notes = _layers(fields)
    latent = fields.optional("kv_lora_rank")
    if latent is not None:
        attention, kv_heads = Attention.MLA, 1
        head_elements = latent + fields.count("qk_rope_head_dim")
    else:
        kv_heads = fields.optional("num_key_value_heads", "num_kv_heads") or query_heads
        attention = Attention.MHA if kv_heads == query_heads else Attention.GQA
        head_elements = 2 * _head_dim(fields, query_heads)
    dtype, dtype_notes = _dtype(fields)
    return ModelGeometry(
        model=printable(str(fields.values.get("model_type", "unknown"))),
        attention=attention,
        layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_elements=head_elements,
        dtype=dtype,
        notes=(*notes, *dtype_notes),
    )


def _head_dim(fields: _Fields, query_heads: int) -> int:
    stated = fields.optional("head_dim")
    if stated is not None:
        return stated
    hidden = fields.count("hidden_size", "n_embd")
    if hidden % query_heads:
        problem = f"hidden_size {hidden} is not a multiple of the {query_heads} attention heads"
        raise ConfigError(f"{fields.source}: {problem}; add head_dim to the file")
    return hidden // query_heads


def _layers(fields: _Fields) -> tuple[int, list[str]]:
    """Return the number of layers with KV for every token, and notes on the other layers."""
    layers = fields.count("num_hidden_layers", "n_layer")
    kinds, notes = fields.values.get("layer_types"), []
    if isinstance(kinds, list) and kinds:
        keeping = sum(kind in _FULL_KV for kind in kinds)
        if 0 < keeping < len(kinds):
            notes.append(
                f"{len(kinds) - keeping} of {len(kinds)} layers keep a fixed state instead of "
                "KV per token; their state is not counted."
            )
            layers = keeping
        sliding = kinds.count("sliding_attention")
        if sliding:
            notes.append(
                f"{sliding} of {len(kinds)} layers attend to a sliding window: the engine "
                "offers them as groups of their own and may keep less than counted here."
            )
    if fields.optional("num_nextn_predict_layers") is not None:
        notes.append("Layers for speculative decoding are not counted.")
    if fields.optional("index_head_dim") is not None:
        notes.append("The sparse attention's index cache is not counted.")
    return layers, notes


def _dtype(fields: _Fields) -> tuple[KvDtype, list[str]]:
    """Return vLLM's default element type for the model, and notes."""
    stated = fields.values.get("dtype") or fields.values.get("torch_dtype")
    name = str(stated).removeprefix("torch.")
    if name in {KvDtype.FLOAT16, KvDtype.BFLOAT16}:
        return KvDtype(name), []
    if name == KvDtype.FLOAT32:
        note = "The weights are float32; vLLM serves them in 16 bits by default."
        return KvDtype.FLOAT16, [note]
    said = f"has dtype {printable(name)}" if stated else "has no dtype"
    return KvDtype.BFLOAT16, [f"config.json {said}: 2 bytes per element are assumed."]
