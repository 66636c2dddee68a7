"""Which part of the KV cache each rank of an engine keeps, and how two engines' parts relate.

Tensor parallelism splits a layer's KV heads over the ranks. With more ranks than heads several
ranks keep the same head; multi-head latent attention (MLA) has one latent vector instead of
heads, which every rank keeps. Two engines of the same model may differ in the number of ranks,
in the tokens of a block and in the order of dimensions in a block; what follows for somebody
who reads what the other wrote is worked out here. Nothing is moved, and no tensor is needed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import STRIPES, RankShare, shard_of

__all__ = ["BlockLayout", "EngineShape", "KVTopology"]

_MOST_RANKS: Final = 1 << 16


class BlockLayout(enum.Enum):
    """The order of dimensions within one layer of one block, outermost first."""

    HND = "HND"
    """Heads, tokens, elements: a rank's heads are one stretch of the page of all heads."""
    NHD = "NHD"
    """Tokens, heads, elements: a rank's heads are a piece of every token's row."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How one engine keeps KV.

    Attributes:
        ranks: Its tensor-parallel ranks.
        block_tokens: Tokens of a block.
        layout: The order of dimensions in a block.

    Raises:
        UnsupportedError: A number is not positive.
    """

    ranks: int
    block_tokens: int
    layout: BlockLayout = BlockLayout.HND

    def __post_init__(self) -> None:
        for name, number in (("ranks", self.ranks), ("block_tokens", self.block_tokens)):
            if not 1 <= number <= _MOST_RANKS:
                raise UnsupportedError(f"{name} is {number}, not a positive number")


@dataclass(frozen=True, slots=True)
class KVTopology:
    """One rank's view of its own engine, and of others of the same model.

    Attributes:
        engine_id: The own engine.
        rank: This rank of it.
        kv_heads: KV heads of a layer over all ranks; 1 with MLA.
        is_mla: Whether every rank keeps all of the KV.
        engines: The engines by id, the own one among them.

    Raises:
        UnsupportedError: The own engine is not among ``engines``, it has no such rank, or the
            heads of one of them cannot be split over its ranks.
    """

    engine_id: str
    rank: int
    kv_heads: int
    is_mla: bool
    engines: Mapping[str, EngineShape]

    def __post_init__(self) -> None:
        if self.kv_heads < 1:
            raise UnsupportedError(f"a layer has {self.kv_heads} KV heads, not at least one")
        own = self.engine(self.engine_id)
        _require_rank(self.engine_id, self.rank, own.ranks)
        for engine_id, engine in self.engines.items():
            self._require_split(engine_id, engine)

    # -- what a rank keeps ---------------------------------------------------------------------

    def engine(self, engine_id: str) -> EngineShape:
        """Return the shape of an engine.

        Raises:
            UnsupportedError: It is not known.
        """
        engine = self.engines.get(engine_id)
        if engine is None:
            known = ", ".join(sorted(self.engines)) or "none"
            raise UnsupportedError(f"engine {engine_id} is not known; known: {known}")
        return engine

    def is_replicated(self, engine_id: str) -> bool:
        """Whether several ranks of an engine keep the same KV."""
        return self.alike(engine_id) > 1

    def alike(self, engine_id: str) -> int:
        """Return how many ranks of an engine keep the same KV as each of them."""
        ranks = self.engine(engine_id).ranks
        return ranks if self.is_mla else max(ranks // self.kv_heads, 1)

    def heads(self, engine_id: str, rank: int) -> range:
        """Return the heads that a rank of an engine keeps.

        Raises:
            UnsupportedError: The engine is not known, or has no such rank.

        >>> two = EngineShape(ranks=2, block_tokens=16)
        >>> KVTopology("a", 1, 8, False, {"a": two}).heads("a", 1)
        range(4, 8)
        """
        ranks = self.engine(engine_id).ranks
        _require_rank(engine_id, rank, ranks)
        if self.is_mla:
            return range(self.kv_heads)
        each = max(self.kv_heads // ranks, 1)
        first = rank // self.alike(engine_id) * each
        return range(first, first + each)

    def share(self) -> RankShare:
        """Return this rank's part of slots that any number of ranks can read.

        Raises:
            UnsupportedError: There is none: this number of ranks does not split the heads into
                whole stripes, or has tokens outermost. The remedy is in the message.
        """
        own = self.engine(self.engine_id)
        heads = self.heads(self.engine_id, self.rank)
        if len(heads) == self.kv_heads:
            stripes = range(STRIPES)
        elif own.layout is not BlockLayout.HND:
            raise UnsupportedError(
                f"engine {self.engine_id} keeps tokens outermost in a block "
                f"({own.layout.value}), so a rank's heads are scattered: use the layout HND"
            )
        else:
            first, end = heads.start * STRIPES, heads.stop * STRIPES
            if first % self.kv_heads or end % self.kv_heads:
                raise UnsupportedError(
                    f"engine {self.engine_id} splits {self.kv_heads} KV heads over {own.ranks} "
                    f"ranks, which is not in whole {STRIPES}ths: with 1, 2, 4 or {STRIPES} "
                    "ranks it would be"
                )
            stripes = range(first // self.kv_heads, end // self.kv_heads)
        alike = self.alike(self.engine_id)
        return RankShare(tuple(stripes), alike, self.rank % alike)

    def shard(self) -> RankShare:
        """Return this rank's part of slots that only as many ranks can read."""
        return shard_of(self.rank)

    # -- reading what another engine wrote -----------------------------------------------------

    def rank_ratio(self, engine_id: str) -> int:
        """Return how many ranks of this engine there are for each of another one.

        Returns:
            The ratio if this engine has at least as many; the negative inverse if it has fewer:
            -2 if there are two of the other for each of this.

        Raises:
            UnsupportedError: Neither number divides the other.
        """
        own, other = self.engine(self.engine_id).ranks, self.engine(engine_id).ranks
        if own % other == 0:
            return own // other
        if other % own == 0:
            return -(other // own)
        raise UnsupportedError(
            f"engine {self.engine_id} has {own} ranks and engine {engine_id} {other}: neither "
            "divides the other"
        )

    def source_ranks(self, engine_id: str) -> tuple[int, ...]:
        """Return the ranks of another engine that keep what this rank needs, each head once.

        Where ranks keep the same, the readers are spread over them.

        Raises:
            UnsupportedError: Neither engine's number of different parts divides the other's, so
                no rank's heads are whole ranks' heads.
        """
        own, other = self._parts(self.engine_id), self._parts(engine_id)
        if own % other and other % own:
            raise UnsupportedError(
                f"engine {self.engine_id} has its heads in {own} parts and engine {engine_id} "
                f"in {other}: neither divides the other, so no rank's heads are whole ranks' "
                "heads"
            )
        alike = self.alike(engine_id)
        mine = self.heads(self.engine_id, self.rank)
        chosen = self.rank % alike
        return tuple(
            first + chosen
            for first in range(0, self.engine(engine_id).ranks, alike)
            if not set(mine).isdisjoint(self.heads(engine_id, first))
        )

    def heads_from(self, engine_id: str, rank: int) -> tuple[range, range]:
        """Return which heads to take from a rank of another engine, and what they are here.

        Returns:
            Their places among the heads of that rank, and among the heads of this one; both
            empty if there are none.

        Raises:
            UnsupportedError: The engine is not known, or has no such rank.
        """
        theirs, mine = self.heads(engine_id, rank), self.heads(self.engine_id, self.rank)
        first, end = max(theirs.start, mine.start), min(theirs.stop, mine.stop)
        end = max(first, end)
        return (
            range(first - theirs.start, end - theirs.start),
            range(first - mine.start, end - mine.start),
        )

    def block_ratio(self, engine_id: str) -> int:
        """Return how many blocks of another engine make one of this.

        Returns:
            The ratio if blocks here are at least as large; the negative inverse if they are
            smaller.

        Raises:
            UnsupportedError: Neither engine's block is whole blocks of the other.
        """
        own, other = (self.engine(id_).block_tokens for id_ in (self.engine_id, engine_id))
        if own % other == 0:
            return own // other
        if other % own == 0:
            return -(other // own)
        raise UnsupportedError(
            f"engine {self.engine_id} has blocks of {own} tokens and engine {engine_id} of "
            f"{other}: neither is a multiple of the other"
        )

    def needs_permutation(self, engine_id: str) -> bool:
        """Whether another engine's blocks have their dimensions in another order."""
        return self.engine(self.engine_id).layout is not self.engine(engine_id).layout

    def _parts(self, engine_id: str) -> int:
        """Return how many different parts of the KV an engine's ranks keep."""
        return self.engine(engine_id).ranks // self.alike(engine_id)

    def _require_split(self, engine_id: str, engine: EngineShape) -> None:
        ranks, heads = engine.ranks, self.kv_heads
        if self.is_mla or heads % ranks == 0 or ranks % heads == 0:
            return
        raise UnsupportedError(
            f"engine {engine_id} has {ranks} ranks and the model {heads} KV heads: neither "
            "divides the other"
        )


def _require_rank(engine_id: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise UnsupportedError(f"engine {engine_id} has ranks 0 to {ranks - 1}, not {rank}")
