"""Finds the namespaces that a warm-up fills, and verifies and retains chunks in them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig, NvmeTierConfig, TierConfig
from kvtier.doctor.rates import measure_directory
from kvtier.errors import ConfigError, KvtierError
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.explain import explained
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.tiers.slab.maintain import hold, retain_chunks
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.tiers.slab.start_plan import describe_difference
from kvtier.tiers.slab.verify import verify
from kvtier.warmup._events import Verified

__all__ = [
    "find_fitting",
    "load_seconds",
    "newest_generation",
    "persistent_tiers",
    "readable",
    "require_same_identity",
    "retain",
    "verify_since",
]

_MODEL: Final = ("model", "model_files")


def persistent_tiers(config: KvtierConfig) -> list[tuple[TierConfig, Path]]:
    """Return the tiers that keep chunks on this machine, each with its directory.

    Raises:
        ConfigError: No tier keeps chunks on this machine.
    """
    tiers = [(tier, store.path) for tier in config.tiers if (store := tier.local_directory())]
    if not tiers:
        problem = "none of them keeps chunks in a directory after the warm-up's engine ends"
        remedy = "add one that does, such as kind: nvme, or warm up a running server (--server)"
        raise ConfigError(config.origin.format_problem("tiers", problem, remedy))
    return tiers


def readable(path: Path) -> list[StoredNamespace]:
    """Return the namespaces at ``path``; an empty list if none can be read."""
    try:
        return find_namespaces(path)
    except ConfigError:
        return []


def find_fitting(path: Path, identity: Fields) -> list[StoredNamespace]:
    """Return the namespaces at ``path`` whose settings match those in ``identity``.

    ``identity`` may lack settings, such as those that only a running engine knows.
    """
    return [space for space in readable(path) if not _difference(space, identity)]


def _difference(space: StoredNamespace, identity: Fields) -> str:
    """Describe the settings that differ between ``identity`` and ``space``."""
    known = dict(identity)
    if len(space.layout.fingerprint.groups) > 1:
        known.pop("tokens_per_hash", None)  # vLLM chooses it, whatever --block-size says
    return describe_difference(space.layout.fingerprint.fields, known)


def require_same_identity(
    tier: str, path: Path, identity: Fields, *, own: StoredNamespace | None
) -> None:
    """Check that an engine uses the namespace in which the deployment stored its chunks.

    Args:
        tier: Name of the tier.
        path: The tier's directory.
        identity: The known fields of the engine's identity.
        own: The namespace of the running engine; None if no engine runs.

    Raises:
        ConfigError: Another namespace has chunks of the same model, and the engine's own
            namespace has no chunk. The message names the settings that differ.
    """
    if find_fitting(path, identity) if own is None else _has_chunks(own):
        return
    model = {name: identity[name] for name in _MODEL}
    others = [
        (difference, space.directory)
        for space in find_fitting(path, model)
        if (difference := _difference(space, identity)) and _has_chunks(space)
    ]
    if others:
        difference, directory = min(others, key=lambda other: other[0].count(" there and "))
        raise ConfigError(
            f"tier {tier}: {directory} has the model's chunks, but an engine with these "
            f"arguments would not read them: {difference}; give the arguments of the "
            "deployment after --, or --new-cache to fill another cache"
        )


def _has_chunks(space: StoredNamespace) -> bool:
    with contextlib.suppress(ConfigError), explained(space), IndexReader(space) as reader:
        return reader.chunks_from(0) > 0
    return False


def newest_generation(space: StoredNamespace) -> int:
    """Return the largest generation of all chunks in ``space``."""
    with explained(space), IndexReader(space) as reader:
        return reader.latest_generation()


def verify_since(tier: str, space: StoredNamespace, generation: int) -> Verified:
    """Compare the chunks that were stored after ``generation`` with their checksums."""
    with explained(space), IndexReader(space) as reader:
        found = verify(space, reader, stored_after=generation)
    return Verified(tier, found.chunks, len(found.bad))


def retain(
    tier: NvmeTierConfig, space: StoredNamespace, ranks: Mapping[int, int], *, seconds: float
) -> int:
    """Protect chunks from eviction for a time, within the tier's quota.

    Args:
        tier: The tier.
        space: The namespace; no engine may have it open.
        ranks: Rank of each chunk to retain, by the hash of the chunk's key. If the quota is too
            small, chunks with lower ranks are retained first.
        seconds: Time from now until the chunks may be evicted.

    Returns:
        The number of retained chunks.

    Raises:
        ConfigError: The namespace is in use or cannot be changed.
    """
    quota = int(tier.retain_quota * tier.capacity_bytes // space.layout.slot_nbytes)
    until = int(datetime.now(UTC).timestamp() + seconds)
    with explained(space), hold(space, "stop that engine first"):
        with IndexReader(space, idle=True) as reader:
            found = [
                (ranks[key_hash], entry)
                for entry in reader.entries("stored", -1)
                if (key_hash := hash_key(entry.key)) in ranks
            ]
        found.sort(key=operator.itemgetter(0))
        entries = [entry for _, entry in found]
        return retain_chunks(space, entries, until, quota_chunks=quota)


def load_seconds(
    config: KvtierConfig, nbytes: Mapping[str, float], *, seconds: float
) -> float | None:
    """Measure the disks; return the time in seconds to load ``nbytes`` from the tiers.

    Args:
        config: The configuration of the tiers.
        nbytes: Number of bytes to load from each tier, by the tier's name.
        seconds: Duration of the measurement in each direction of each disk.

    Returns:
        The sum of the tiers' times; None if a disk cannot be measured.
    """
    load_s = 0.0
    for tier in config.tiers:
        store = tier.local_directory()
        if store is not None and nbytes.get(tier.name):
            try:
                rates = measure_directory(config, store, seconds=seconds)
            except (KvtierError, OSError):
                return None
            load_s += nbytes[tier.name] / rates.read_bytes_per_s
    return load_s
