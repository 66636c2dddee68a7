"""``kvtier plan``: prints the capacity of each tier in tokens of a model."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from kvtier.cli._options import AsJson, File, choice, finite
from kvtier.cli._render import make_console, make_table, show_json, show_table
from kvtier.config import (
    KvtierConfig,
    check_chunk_fits,
    has_rank_paths,
    load_config,
    slot_nbytes,
)
from kvtier.units import approximate_duration, approximate_size
from kvtier.vllm.model_geometry import Attention, KvDtype, ModelGeometry, read_model_geometry

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plan"]

_DTYPES: Final = f"Element type of the KV cache: {', '.join(KvDtype)}."
_BLOCK_TOKENS: Final = 16
_PREFILL_TOKENS_PER_S: Final = 10_000
_LIMITS: Final = (
    "Not included: the engine's real layout (padding, KV cache groups, pipeline parallelism). "
    "The engine's log states the chunk size it uses."
)


@dataclass(frozen=True, slots=True)
class _TierPlan:
    """The capacity of one tier, and the time to fill the tier."""

    name: str
    kind: str
    capacity_bytes: int
    chunks: int
    tokens: int
    fill_s: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """The capacities of all tiers. Sizes are sums over all tensor-parallel ranks.

    Attributes:
        layers: Number of layers that have a KV cache.
        copies: Number of ranks that have equal copies of the KV.
        token_nbytes: Number of bytes of one token's KV, including copies.
        chunk_nbytes: Number of bytes of one chunk, including copies.
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
    block_tokens: int
    prefill_tokens_per_s: float
    prefill_bytes_per_s: float
    tiers: tuple[_TierPlan, ...]
    notes: tuple[str, ...]


def plan(  # noqa: PLR0913 - each is an option of the command
    file: File,
    *,
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory of the model, with its config.json.", readable=False
        ),
    ],
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks.")] = 1,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help=_DTYPES)] = KvDtype.AUTO.value,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"The engine's --block-size in tokens; {_BLOCK_TOKENS} if not given.",
        ),
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            callback=finite,
            metavar="N",
            help="Prompt tokens computed per second, the prompt throughput in vLLM's log; "
            f"{_PREFILL_TOKENS_PER_S:,} if not given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how many tokens of a model each tier of FILE holds.

    Reads FILE and the model's config.json, and nothing else.
    """
    dtype = KvDtype(choice("--kv-dtype", kv_dtype, KvDtype))
    config = load_config(file)
    result = _make_plan(
        config,
        read_model_geometry(model),
        tp,
        dtype,
        block_tokens or _BLOCK_TOKENS,
        prefill_rate or _PREFILL_TOKENS_PER_S,
    )
    assumed = _assumptions(result, block_tokens, prefill_rate)
    result = replace(result, notes=(*assumed, *result.notes))
    if as_json:
        show_json(asdict(result))
    else:
        _show(make_console(), result)


def _make_plan(
    config: KvtierConfig,
    model: ModelGeometry,
    tp: int,
    dtype: KvDtype,
    block_tokens: int,
    rate: float,
) -> _Plan:
    """Return how many chunks and tokens each tier can hold, and the time to fill the tier.

    ``rate`` is the prefill rate in tokens per second. The tiers must hold a chunk, and the
    ranks must be able to divide the model's heads.
    """
    token_nbytes = model.rank_token_nbytes(tp, dtype) * tp
    chunk_tokens = block_tokens * config.engine.blocks_per_chunk
    chunk_nbytes = token_nbytes * chunk_tokens
    check_chunk_fits(config, chunk_nbytes)
    slot = slot_nbytes(chunk_nbytes)
    tiers = []
    for tier in config.tiers:
        chunks = tier.capacity_bytes // slot
        tokens = chunks * chunk_tokens
        tiers.append(
            _TierPlan(tier.name, tier.kind, tier.capacity_bytes, chunks, tokens, tokens / rate)
        )
    return _Plan(
        model=model.model,
        attention=model.attention.value,
        layers=model.layers,
        kv_dtype=(model.dtype if dtype is KvDtype.AUTO else dtype).value,
        tp=tp,
        copies=model.copies(tp),
        token_nbytes=token_nbytes,
        chunk_tokens=chunk_tokens,
        chunk_nbytes=chunk_nbytes,
        slot_nbytes=slot,
        block_tokens=block_tokens,
        prefill_tokens_per_s=rate,
        prefill_bytes_per_s=rate * token_nbytes,
        tiers=tuple(tiers),
        notes=(*_notes(config, model, tp, dtype), *model.notes),
    )


def _assumptions(
    result: _Plan, block_tokens: int | None, prefill_rate: float | None
) -> list[str]:
    """Return sentences that say what the plan assumes about the engine."""
    block = f"A block has {result.block_tokens} tokens"
    if block_tokens is None:
        block += ", which is assumed; give the engine's --block-size as --block-tokens"
    tokens = f"{result.prefill_tokens_per_s:,.0f} prompt tokens per second"
    if prefill_rate is None:
        tokens += ", which are assumed (--prefill-rate),"
    rate = f"{approximate_size(result.prefill_bytes_per_s)}/s"
    return [
        f"{block}.",
        f"{tokens} fill a tier at {rate}; loading saves time where a tier reads faster.",
    ]


def _notes(config: KvtierConfig, model: ModelGeometry, tp: int, dtype: KvDtype) -> list[str]:
    notes = []
    if has_rank_paths(config):
        notes.append("The tiers are those of one data-parallel rank; each rank has its own.")
    copies = model.copies(tp)
    if copies > 1:
        what = "the latent" if model.attention is Attention.MLA else "each KV head"
        notes.append(
            f"{copies} ranks hold the same bytes of {what}; all copies are counted. "
            f"If the engine stores one copy, tiers hold {copies} times the tokens."
        )
    if model.attention is Attention.MLA and dtype is KvDtype.FP8:
        notes.append("Some engines keep scales beside an fp8 latent; they are not counted.")
    if len(config.tiers) > 1 and config.placement.writes_through:
        notes.append(
            "With write: through, slower tiers hold copies of the faster ones: the slowest "
            "tier alone limits how many different tokens are kept."
        )
    return notes


def _show(console: Console, result: _Plan) -> None:
    layers = f"{result.layers} layers that keep KV"
    ranks = f"{result.tp} ranks" if result.tp > 1 else "1 rank"
    head = f"{result.model}: {result.attention}, {layers}, KV in {result.kv_dtype}, {ranks}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print()
    sizes = make_table("", numbers=("tokens", "size", "bytes"))
    for name, tokens, nbytes in (
        ("one token", 1, result.token_nbytes),
        ("one chunk", result.chunk_tokens, result.chunk_nbytes),
        ("its slot in a tier", result.chunk_tokens, result.slot_nbytes),
    ):
        sizes.add_row(name, f"{tokens:,}", approximate_size(nbytes), f"{nbytes:,}")
    show_table(console, sizes)
    console.print()
    columns = ("capacity", "chunks", "tokens", "time to fill")
    tiers = make_table("tier", "kind", numbers=columns)
    for tier in result.tiers:
        tiers.add_row(
            tier.name,
            tier.kind,
            approximate_size(tier.capacity_bytes),
            f"{tier.chunks:,}",
            f"{tier.tokens:,}",
            approximate_duration(tier.fill_s),
        )
    show_table(console, tiers)
    console.print()
    for note in (*result.notes, _LIMITS):
        text = textwrap.fill(
            note, width=console.width, initial_indent="- ", subsequent_indent="  "
        )
        console.print(text, soft_wrap=True)
