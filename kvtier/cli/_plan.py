"""What a configuration means for a model: a pure function from sizes to tokens and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvtier.config import KvtierConfig, check_chunk_fits, has_rank_paths, slot_nbytes
from kvtier.model_geometry import Attention, KvDtype, ModelGeometry

__all__ = ["Plan", "PlanRequest", "TierPlan", "make_plan"]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the engine will be started with.

    Attributes:
        tp: Tensor-parallel ranks.
        kv_dtype: Element type of the KV cache.
        block_tokens: Tokens of one engine block.
        fill_bytes_per_s: Rate at which new KV arrives.
    """

    tp: int
    kv_dtype: KvDtype
    block_tokens: int
    fill_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier, counted in chunks."""

    name: str
    kind: str
    capacity_bytes: int
    chunks: int
    tokens: int
    fill_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration counted in tokens.

    Attributes:
        model: The model's type.
        attention: MHA, GQA or MLA.
        layers: Layers that keep KV.
        kv_dtype: Element type the numbers are for.
        tp: Tensor-parallel ranks.
        copies: How often the ranks together hold each byte.
        token_nbytes: Bytes of one token over all ranks, copies included.
        chunk_tokens: Tokens of one chunk.
        chunk_nbytes: Bytes of one chunk over all ranks.
        slot_nbytes: Bytes a chunk takes in a tier.
        fill_bytes_per_s: The rate that the times are for.
        fill_tokens_per_s: The same rate in tokens.
        tiers: The tiers, fastest first.
        notes: What the numbers leave out.
    """

    model: str
    attention: str
    layers: int
    kv_dtype: str
    tp: int
    copies: int
    token_nbytes: int
    chunk_tokens: int
    chunk_nbytes: int
    slot_nbytes: int
    fill_bytes_per_s: int
    fill_tokens_per_s: int
    tiers: tuple[TierPlan, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self)


def make_plan(config: KvtierConfig, model: ModelGeometry, request: PlanRequest) -> Plan:
    """Count ``config`` in tokens of ``model``.

    Raises:
        ConfigError: A tier is smaller than one chunk, or the model's heads cannot be split
            over the ranks.
    """
    token_nbytes = model.rank_token_nbytes(request.tp, request.kv_dtype) * request.tp
    chunk_tokens = request.block_tokens * config.engine.blocks_per_chunk
    chunk_nbytes = token_nbytes * chunk_tokens
    check_chunk_fits(config, chunk_nbytes)
    slot = slot_nbytes(chunk_nbytes)
    dtype = model.dtype if request.kv_dtype is KvDtype.AUTO else request.kv_dtype
    return Plan(
        model=model.model,
        attention=model.attention.value,
        layers=model.layers,
        kv_dtype=dtype.value,
        tp=request.tp,
        copies=model.copies(request.tp),
        token_nbytes=token_nbytes,
        chunk_tokens=chunk_tokens,
        chunk_nbytes=chunk_nbytes,
        slot_nbytes=slot,
        fill_bytes_per_s=request.fill_bytes_per_s,
        fill_tokens_per_s=request.fill_bytes_per_s // token_nbytes,
        tiers=tuple(
            TierPlan(
                name=tier.name,
                kind=tier.kind,
                capacity_bytes=tier.capacity_bytes,
                chunks=tier.capacity_bytes // slot,
                tokens=tier.capacity_bytes // slot * chunk_tokens,
                fill_s=tier.capacity_bytes // slot * slot / request.fill_bytes_per_s,
            )
            for tier in config.tiers
        ),
        notes=(*_notes(config, model, request), *model.notes),
    )


def _notes(config: KvtierConfig, model: ModelGeometry, request: PlanRequest) -> list[str]:
    notes = []
    if has_rank_paths(config):
        notes.append("The tiers are those of one data-parallel rank; each rank has its own.")
    copies = model.copies(request.tp)
    if copies > 1:
        what = "the latent" if model.attention is Attention.MLA else "each KV head"
        notes.append(
            f"{copies} ranks hold the same bytes of {what}; all copies are counted. "
            f"Where the engine stores one of them, tiers hold {copies} times the tokens."
        )
    if model.attention is Attention.MLA and request.kv_dtype is KvDtype.FP8:
        notes.append("Some engines keep scales beside an fp8 latent; they are not counted.")
    placement = config.placement
    writes_through = placement.policy == "ladder" and placement.write == "through"
    if len(config.tiers) > 1 and writes_through:
        notes.append(
            "With write: through the slower tiers hold copies of the faster ones, so the "
            "slowest tier alone says how many different tokens are kept."
        )
    return notes
