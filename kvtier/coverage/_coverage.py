"""Computes the number of stored tokens of a prompt, from an index.

The *coverage* of a prompt is the number of tokens that an engine could load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtier.connector.groups import parse_groups
from kvtier.coverage._hashing import DEFAULT_ALGORITHM, BlockHasher, Scope
from kvtier.coverage._prompts import Prompt
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, counting_group, make_key, strip_adapter
from kvtier.manager import GroupReach, HitRules, Reach
from kvtier.manager import Prompt as HitPrompt
from kvtier.tiers.slab.explain import explained
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.piece_io import hash_key

__all__ = [
    "Coverage",
    "CoverageReader",
    "KeyRules",
    "PromptCoverage",
    "StoredKeys",
    "Stores",
]

NameChunk = Callable[[str], Callable[[ChunkKey], ChunkKey]]
"""Takes a LoRA adapter's name; returns a function that adds the adapter's digest to a key."""


class StoredKeys:
    """The keys in one index, as sorted 64-bit hashes, which take 8 bytes per chunk.

    Two keys may have the same hash. Then an absent chunk counts as stored. This happens about
    once in 10**12 prompts.
    """

    def __init__(self, hashes: npt.NDArray[np.uint64]) -> None:
        self._hashes = np.unique(hashes)

    @classmethod
    def read(cls, space: StoredNamespace, *, with_adapters: bool = True) -> Self:
        """Read the index of ``space``.

        A chunk counts as absent if an engine would drop the chunk when it opens ``space``.

        Args:
            space: The namespace.
            with_adapters: Whether keys include the digest of their LoRA adapter.

        Raises:
            ConfigError: The index cannot be read.
        """
        found = [np.empty(0, dtype=np.uint64)]
        with explained(space), IndexReader(space) as reader:
            if reader.reset_at() is None or reader.live:
                for keys in reader.all_keys():
                    if not with_adapters:
                        keys = list(map(strip_adapter, keys))  # noqa: PLW2901
                    found.append(np.fromiter(map(hash_key, keys), np.uint64, count=len(keys)))
        return cls(np.concatenate(found))

    def __len__(self) -> int:
        return len(self._hashes)

    def has(self, key_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return, for each of ``key_hashes``, whether the index has this hash."""
        if not len(self._hashes):
            return np.zeros(len(key_hashes), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self._hashes, key_hashes), len(self._hashes) - 1)
        found: npt.NDArray[np.bool_] = self._hashes[at] == key_hashes
        return found


@dataclass(frozen=True, slots=True)
class KeyRules:
    """The rules by which the engines of a namespace compute chunk keys.

    Attributes:
        groups: For each KV cache group, its number in keys and its reach: which chunks of a
            prefix the group reads.
        tokens_per_hash: Number of tokens between two consecutive block hashes.
        algorithm: The engines' ``--prefix-caching-hash-algo``.
        seed: The engines' ``PYTHONHASHSEED``; empty if it is not set.
    """

    groups: tuple[tuple[int, GroupReach], ...]
    tokens_per_hash: int
    algorithm: str = DEFAULT_ALGORITHM
    seed: str = ""

    @classmethod
    def of(cls, space: StoredNamespace, *, algorithm: str = DEFAULT_ALGORITHM) -> Self:
        """Return the key rules that the layout of a namespace records.

        Raises:
            ConfigError: The layout lacks the rules.
        """
        identity = space.layout.fingerprint
        try:
            tokens_per_hash, groups = parse_groups(identity.groups)
        except ValueError as error:
            raise ConfigError(
                f"{space.directory}: has no record of the chunk sizes, because an older kvtier "
                "wrote it; start an engine on it once"
            ) from error
        return cls(
            groups, tokens_per_hash, algorithm, str(identity.fields.get("hash_seed", ""))
        )

    @property
    def chunks_per_token(self) -> float:
        """Return the number of chunks per token, summed over all KV cache groups."""
        return sum(1 / reach.chunk_tokens for _, reach in self.groups)


@dataclass(frozen=True, slots=True)
class PromptCoverage:
    """The coverage of one prompt.

    Attributes:
        line: Number of the prompt's line, from 1.
        tokens: Number of the prompt's tokens.
        tail_tokens: Number of tokens after the prompt's last whole chunk.
        reusable_tokens: Number of tokens that could be loaded if all chunks of the prompt were
            stored.
        hit_tokens: Number of tokens that can be loaded now.
        tier_tokens: Number of hit tokens that each tier provides, by the tier's name.
        key_hashes: Key hashes of the chunks that a warm-up stores for the prompt; empty if the
            prompt is shorter than a chunk.
        is_missing: Whether each of these chunks is missing now.
        is_stored: Whether a warm-up would add nothing for this prompt.
    """

    line: int
    tokens: int
    tail_tokens: int
    reusable_tokens: int
    hit_tokens: int
    tier_tokens: Mapping[str, int]
    key_hashes: npt.NDArray[np.uint64]
    is_missing: npt.NDArray[np.bool_]
    is_stored: bool


@dataclass(slots=True)
class Coverage:
    """The coverage of several prompts together.

    Attributes:
        prompts: Number of prompts.
        whole: Number of prompts with all chunks stored.
        partly: Number of prompts with some, but not all, reusable tokens stored.
        short: Number of prompts shorter than a chunk. These prompts cannot be stored.
        tokens: Number of tokens of all prompts.
        reusable_tokens: Number of tokens that could be loaded if all chunks of the prompts were
            stored.
        hit_tokens: Number of tokens that can be loaded now.
        tier_tokens: Number of hit tokens that each tier provides, by the tier's name.
    """

    prompts: int = 0
    whole: int = 0
    partly: int = 0
    short: int = 0
    tokens: int = 0
    reusable_tokens: int = 0
    hit_tokens: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return ``hit_tokens / reusable_tokens``; 0 without reusable tokens."""
        return self.hit_tokens / self.reusable_tokens if self.reusable_tokens else 0.0

    def add(self, prompt: PromptCoverage) -> None:
        """Add the coverage of one prompt to the sums."""
        self.prompts += 1
        self.tokens += prompt.tokens
        self.reusable_tokens += prompt.reusable_tokens
        self.hit_tokens += prompt.hit_tokens
        if not len(prompt.key_hashes):
            self.short += 1
        elif prompt.is_stored:
            self.whole += 1
        elif prompt.hit_tokens:
            self.partly += 1
        for name, tokens in prompt.tier_tokens.items():
            self.tier_tokens[name] = self.tier_tokens.get(name, 0) + tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the sums and the share as plain values."""
        return asdict(self) | {"share": self.share}


class _Found:
    """The stored chunks of one prompt, as an argument of :meth:`HitRules.longest`."""

    def __init__(self, keys: Iterable[ChunkKey], present: Iterable[bool]) -> None:
        self._present = dict(zip(keys, present, strict=True))

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))

    def has(self, key: ChunkKey) -> bool:
        return self._present.get(key, False)


class CoverageReader:
    """Looks prompts up in the indexes of an engine's persistent tiers.

    Args:
        rules: The rules by which the engine makes keys.
        stores: The keys of each persistent tier, by name, fastest first.
        lora_paths: Path of each LoRA adapter, by name, as in the engine's arguments.
        name_chunk: Takes the name of a LoRA adapter and returns a function that adds the
            adapter's digest to a key; None if the keys in ``stores`` have no such digests.
    """

    def __init__(
        self,
        rules: KeyRules,
        stores: Mapping[str, StoredKeys],
        *,
        lora_paths: Mapping[str, str] | None = None,
        name_chunk: NameChunk | None = None,
    ) -> None:
        self._stores = stores
        self._lora_paths = lora_paths or {}
        self._name_chunk = name_chunk
        self._hasher = BlockHasher(
            rules.tokens_per_hash, algorithm=rules.algorithm, seed=rules.seed
        )
        self._groups = rules.groups
        self._steps = [each.chunk_tokens // rules.tokens_per_hash for _, each in rules.groups]
        self._hits = HitRules([reach for _, reach in rules.groups])
        counted = counting_group(
            {number: reach.reach is Reach.PREFIX for number, reach in rules.groups}
        )
        self._counted = [number for number, _ in rules.groups].index(counted)

    def cover(self, prompt: Prompt) -> PromptCoverage:
        """Return the coverage of ``prompt``."""
        keys = self._keys(prompt)
        listed = list(chain.from_iterable(keys))
        hashes = np.fromiter(map(hash_key, listed), np.uint64, count=len(listed))
        in_tier = [stored.has(hashes) for stored in self._stores.values()]
        present = np.logical_or.reduce([np.zeros(len(listed), np.bool_), *in_tier])
        # vLLM always computes the last token of a prompt.
        limit = max(len(prompt.tokens) - 1, 0)
        best = limit - limit % self._hits.alignment_tokens
        found = _Found(listed, present.tolist())
        hit = self._hits.longest(HitPrompt(keys, 0, limit), found)
        wanted = self._wanted(keys, best)
        missing = ~present[wanted]
        return PromptCoverage(
            line=prompt.line,
            tokens=len(prompt.tokens),
            tail_tokens=len(prompt.tokens) % self._groups[self._counted][1].chunk_tokens,
            reusable_tokens=best,
            hit_tokens=hit,
            tier_tokens=self._by_tier(keys, in_tier, hit),
            key_hashes=hashes[wanted],
            is_missing=missing,
            is_stored=self._is_stored(missing, hit=hit, best=best),
        )

    def _keys(self, prompt: Prompt) -> list[list[ChunkKey]]:
        """Return the keys of the whole chunks of ``prompt``, group by group."""
        path = self._lora_paths.get(prompt.lora, "")
        hashes = self._hasher.hashes(prompt.tokens, Scope(prompt.lora, path, prompt.cache_salt))
        keys = [
            [make_key(each, number) for each in hashes[step - 1 :: step]]
            for (number, _), step in zip(self._groups, self._steps, strict=True)
        ]
        if prompt.lora and self._name_chunk is not None:
            name = self._name_chunk(prompt.lora)
            keys = [[name(key) for key in group] for group in keys]
        return keys

    def _wanted(self, keys: Sequence[Sequence[ChunkKey]], best: int) -> npt.NDArray[np.intp]:
        """Return the chunks to store, as indices into the concatenated lists in ``keys``."""
        wanted: list[int] = []
        first = 0
        for (_, reach), group in zip(self._groups, keys, strict=True):
            chunks = range(len(group))
            if reach.reach is not Reach.PREFIX:
                size = reach.chunk_tokens
                chunks = range(max(reach.first_token(best), 0) // size, best // size)
            wanted += [first + chunk for chunk in chunks]
            first += len(group)
        return np.array(wanted, dtype=np.intp)

    def _is_stored(self, missing: npt.NDArray[np.bool_], *, hit: int, best: int) -> bool:
        """Return whether a cache has all chunks that a warm-up would store for a prompt.

        For sliding windows and recurrent states, an engine stores only the chunks that a hit
        needs. The engine may skip the chunks that only the longest possible hit needs.
        """
        if all(reach.reach is Reach.PREFIX for _, reach in self._groups):
            return not missing.any()
        return hit >= best - self._hits.alignment_tokens

    def _by_tier(
        self,
        keys: Sequence[Sequence[ChunkKey]],
        in_tier: Sequence[npt.NDArray[np.bool_]],
        hit: int,
    ) -> dict[str, int]:
        """Return the number of hit tokens that each tier provides, in the counting group."""
        first = sum(map(len, keys[: self._counted]))
        size = self._groups[self._counted][1].chunk_tokens
        left = np.ones(hit // size, dtype=np.bool_)
        tokens = []
        for present in in_tier:
            held = left & present[first : first + hit // size]
            tokens.append(int(held.sum()) * size)
            left &= ~held
        if tokens:  # chunks of windows that a hit skips are in no tier
            tokens[-1] += hit - sum(tokens)
        return dict(zip(self._stores, tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Stores:
    """An engine's key rules, and its namespace in each persistent tier on this machine.

    Attributes:
        spaces: The engine's namespace in each persistent tier, by the tier's name.
        rules: The rules by which the engine makes keys.
        capacity_chunks: Number of chunks that the largest of the tiers holds.
        slot_nbytes: Size in bytes of a slot; 0 if unknown.
        lora_paths: Path of each LoRA adapter, by name.
        name_chunk: The argument of :class:`CoverageReader`.
    """

    spaces: Mapping[str, StoredNamespace]
    rules: KeyRules
    capacity_chunks: float
    slot_nbytes: int
    lora_paths: Mapping[str, str]
    name_chunk: NameChunk | None

    def reader(self) -> CoverageReader:
        """Read the indexes, and return a reader that looks prompts up in them."""
        named = self.name_chunk is not None
        keys = {
            tier: StoredKeys.read(space, with_adapters=named)
            for tier, space in self.spaces.items()
        }
        return CoverageReader(
            self.rules, keys, lora_paths=self.lora_paths, name_chunk=self.name_chunk
        )

    @property
    def nbytes_per_token(self) -> float:
        """Return the number of bytes of KV per token, summed over all KV cache groups."""
        return self.slot_nbytes * self.rules.chunks_per_token
