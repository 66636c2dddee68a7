"""Reads the stores that a warm-up fills: finds, verifies and retains their chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kvtier.config import KvtierConfig, NvmeTierConfig
from kvtier.doctor.rates import measure_directory
from kvtier.errors import KvtierError
from kvtier.tiers.slab.explain import explained
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.tiers.slab.maintain import hold, retain_chunks
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.tiers.slab.verify import verify
from kvtier.warmup._coverage import Coverage
from kvtier.warmup._engine import WarmupEngine
from kvtier.warmup._events import Saving, Verified
from kvtier.warmup._prefill import PrefillState

__all__ = [
    "estimate_saving",
    "nbytes_per_token",
    "newest_generation",
    "opened_namespaces",
    "retain",
    "verify_since",
]


def opened_namespaces(
    engine: WarmupEngine, tiers: Iterable[NvmeTierConfig]
) -> dict[str, StoredNamespace]:
    """Return the namespace of ``engine`` in each of ``tiers``, by the tier's name."""
    places = {place.tier: Path(place.path, place.namespace) for place in engine.stores}
    return {tier.name: find_namespaces(places[tier.name])[0] for tier in tiers}


def newest_generation(space: StoredNamespace) -> int:
    """Return the logical time when the newest chunk of ``space`` was stored."""
    with explained(space), IndexReader(space) as reader:
        return reader.latest_generation()


def verify_since(tier: str, space: StoredNamespace, generation: int) -> Verified:
    """Compare the chunks that were stored after ``generation`` with their checksums."""
    with explained(space), IndexReader(space) as reader:
        found = verify(space, reader, stored_after=generation)
    return Verified(tier, found.chunks, len(found.bad))


def retain(
    tier: NvmeTierConfig, space: StoredNamespace, places: Mapping[int, int], *, seconds: float
) -> int:
    """Protect chunks from eviction for a time, within the quota of ``tier``.

    Args:
        tier: The tier.
        space: The namespace; no engine may have it open.
        places: Rank of each chunk to retain, by the hash of its key. Beyond the quota, chunks
            with higher ranks are not retained.
        seconds: Time from now until the chunks may be evicted.

    Returns:
        The number of chunks that are retained.

    Raises:
        ConfigError: The namespace is in use or cannot be changed.
    """
    quota = int(tier.retain_quota * tier.capacity_bytes // space.layout.slot_nbytes)
    until = int(datetime.now(UTC).timestamp() + seconds)
    with explained(space), hold(space, "stop that engine first"):
        with IndexReader(space, idle=True) as reader:
            found = [
                (places[key_hash], entry)
                for entry in reader.entries("stored", -1)
                if (key_hash := hash_key(entry.key)) in places
            ]
        found.sort(key=operator.itemgetter(0))
        entries = [entry for _, entry in found]
        return retain_chunks(space, entries, until, quota_chunks=quota)


def estimate_saving(
    config: KvtierConfig,
    coverage: Coverage,
    state: PrefillState,
    spaces: Mapping[str, StoredNamespace],
    *,
    seconds: float,
) -> Saving | None:
    """Measure the disks, and return the time that loading the covered tokens saves.

    Args:
        config: The configuration of the tiers.
        coverage: The tokens that can be loaded.
        state: The tokens that were computed, and the time for them.
        spaces: The namespaces, by the tier's name.
        seconds: Time to measure each direction of each disk.

    Returns:
        The saving; None if nothing was computed or a disk cannot be measured.
    """
    if not state.computed_tokens or not coverage.hit_tokens:
        return None
    load_s = 0.0
    for tier in config.tiers:
        store, tokens = tier.local_directory(), coverage.tier_tokens.get(tier.name, 0)
        if store is None or not tokens:
            continue
        try:
            rates = measure_directory(config, store, seconds=seconds)
        except (KvtierError, OSError):
            return None
        nbytes = tokens * nbytes_per_token(spaces[tier.name])
        load_s += nbytes / rates.read_bytes_per_s
    rate = state.computed_tokens / max(state.seconds, 1e-9)
    return Saving(coverage.hit_tokens / rate, load_s)


def nbytes_per_token(space: StoredNamespace) -> float:
    """Return the bytes of stored KV per token, summed over all KV cache groups."""
    slot_nbytes = space.layout.slot_nbytes
    groups = space.layout.fingerprint.groups
    return sum(slot_nbytes / int(group["chunk_tokens"]) for group in groups)
